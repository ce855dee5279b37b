"""Weights of other libraries: their outputs from our layers, and every bit of them back.

`data/convert/*.safetensors` hold weights and outputs of the libraries themselves, in the versions
that `data/convert/make.py` names, which made them.
"""

import re
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.parametrizations import spectral_norm

import openrnn
from openrnn import cells, from_weights, to_weights
from openrnn.convert.arrays import ordered
from openrnn.convert.libraries import LIBRARIES

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = Path(__file__).with_name("data") / "convert"
NAMES = {"tf_keras": "keras", "tensorflow": "tf_cell"}
CELLS = ("peephole_lstm", "gru_reset_before", "slstm", "lstm", "gru", "rnn_tanh", "rnn_relu")
FLAT = ("jax", "mxnet_fused")


def source_of(library, case):
    """Our name of the layout that a case has."""
    first = case.partition("_")[0]
    if library == "mxnet":
        return {"gluon": "gluon", "fused": "mxnet_fused", "cells": "mxnet"}[first]
    if first == "nnx":
        return "nnx_plain" if case.endswith("plain") else "nnx"
    return "xlstm_cuda" if case.startswith("slstm_cuda") else NAMES.get(library, library)


def cases():
    """(library, case) -> its arrays, and what its library computed."""
    found = {}
    for path in sorted(DATA.glob("*.safetensors")):
        tensors = load_file(path)
        x = tensors.pop("x")
        for key, tensor in tensors.items():
            case, kind, *name = key.split(":", 2)
            entry = found.setdefault((path.stem, case), {"x": x, "w": {}})
            if kind == "w":
                entry["w"][name[0]] = tensor
            else:
                entry[kind] = tensor
    return found


CASES = cases()
EVERY = pytest.mark.parametrize(("library", "case"), CASES, ids=["-".join(key) for key in CASES])


def options_of(library, case):
    """What a user has to say: the cell where shapes leave it open, and sizes of flat buffers."""
    made = {"cell": next((cell for cell in CELLS if cell in case), "lstm")}
    if case.endswith("backwards"):
        made["reverse"] = True
    if source_of(library, case) in FLAT:
        both = case.endswith("both")
        layers = 2 if case in ("lstm_both", "fused_rnn_relu") else 1
        made |= {"hidden_size": 4, "num_layers": layers, "bidirectional": both}
    return made


def load(library, case):
    arrays = ordered(CASES[library, case]["w"])
    return from_weights(arrays, source_of(library, case), **options_of(library, case))


def same_bits(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second):
        assert np.asarray(one).shape == np.asarray(other).shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@EVERY
def test_outputs_are_those_of_the_library(library, case):
    entry = CASES[library, case]
    layer = load(library, case)
    lengths = torch.tensor([5, 3]) if case == "masked" else None
    y, state = layer(entry["x"], lengths=lengths)
    want = entry["y"]
    if lengths is not None:  # Keras goes on with the last output, ours is 0 there
        assert not y[3:, 1].any()
        y[3:, 1] = want[3:, 1]
    torch.testing.assert_close(y, want, rtol=0, atol=1e-6)
    for name, found in zip("hc", state if isinstance(state, tuple) else (state,)):
        if name in entry:
            torch.testing.assert_close(found, entry[name], rtol=0, atol=1e-6)


@EVERY
def test_every_bit_comes_back(library, case):
    heads = int(case[-1]) if library in ("xlstm", "flashrnn") else 1
    made = to_weights(load(library, case), source_of(library, case), heads=heads)
    given = ordered(CASES[library, case]["w"])
    same_bits(given.values(), ordered(made).values())
    again = from_weights(made, source_of(library, case), **options_of(library, case))
    same_bits(load(library, case).state_dict().values(), again.state_dict().values())


def test_each_library_of_the_rows_is_tested():
    tested = {source_of(*key) for key in CASES}
    assert tested | {"openrnn", "torch", "cudnn", "tf_canonical", "haste"} == set(LIBRARIES)
    page = (DATA.parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in LIBRARIES)


# libraries that are here: torch itself, our own state dicts, our own buffers


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("face", "cell", "more"),
    [
        (torch.nn.LSTM, "lstm", {}),
        (torch.nn.LSTM, "lstm", {"proj_size": 2}),
        (torch.nn.GRU, "gru", {}),
        (torch.nn.RNN, "rnn_tanh", {}),
        (torch.nn.RNN, "rnn_relu", {"nonlinearity": "relu"}),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_torch(face, cell, more, bias, both):
    theirs = face(3, 4, 2, bias=bias, bidirectional=both, **more)
    state = theirs.state_dict()
    layer = from_weights(state, "torch", cell=cell)
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(layer(x)[0], theirs(x)[0], rtol=0, atol=1e-6)
    made = to_weights(layer, "torch")
    assert list(made) == list(state)
    same_bits(made.values(), state.values())


@pytest.mark.parametrize("mode", ["double", "input", "recurrent", "none"])
@pytest.mark.parametrize("cell", [c for c in vars(cells).values() if isinstance(c, cells.Cell)])
def test_our_own_state_dicts(cell, mode):
    layer = openrnn.Recurrent(cell, 3, 4, 2, bidirectional=True, bias_mode=mode)
    state = layer.state_dict()
    again = from_weights({f"net.{k}": v for k, v in state.items()}, "openrnn", cell=cell.key)
    assert again.spec == layer.spec
    assert list(to_weights(again, "openrnn")) == list(state)
    same_bits(again.state_dict().values(), state.values())


@pytest.mark.parametrize("proj", [0, 2])
def test_flat_buffers_and_canonical_lists_are_those_of_the_operators(proj):
    layer = openrnn.LSTM(3, 4, 2, bidirectional=True, proj_size=proj)
    flat = openrnn.params.pack(layer.spec, [*layer.parameters()]).detach()
    (buffer,) = to_weights(layer, "cudnn").values()
    same_bits([buffer], [flat])
    sizes = {"hidden_size": 4, "num_layers": 2, "bidirectional": True, "proj_size": proj}
    again = from_weights(buffer, "cudnn", cell="lstm", **sizes)
    assert again.spec == layer.spec
    same_bits(again.state_dict().values(), layer.state_dict().values())
    weights, biases = openrnn.ops.params_to_canonical(flat, layer.spec)
    made = to_weights(layer, "tf_canonical")
    same_bits(made.values(), [*weights, *biases])
    for given in (made, (weights, biases), {"weights": weights, "biases": biases}):
        again = from_weights(given, "tf_canonical", cell="lstm")
        assert again.spec == layer.spec
        same_bits(again.state_dict().values(), layer.state_dict().values())


# libraries that do not run here: their documented formulas in numpy stand in for them


def drawn(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape) / 2


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def loop(step, x, width=4):
    """h of every step, from zeros; `step` gives the new states."""
    states, out = (np.zeros((x.shape[1], width)),) * 2, []
    for x_t in x:
        states = step(x_t, *states)
        out.append(states[0])
    return np.array(out)


SCOPES = {
    cell: f"rnn/multi_rnn_cell/cell_0/{scope}_cell/"
    for cell, scope in (("gru", "cudnn_compatible_gru"), ("rnn_tanh", "basic_rnn"),
                        ("rnn_relu", "basic_rnn"))
}  # fmt: skip


def haste_lstm(w):
    def step(x, h, c):
        v = x @ w["kernel"] + h @ w["recurrent_kernel"] + w["bias"]
        i, g, f, o = np.split(v, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c

    return step


def haste_gru(w):
    def step(x, h, c):
        x_z, x_r, x_g = np.split(x @ w["kernel"] + w["bias"], 3, axis=1)
        h_z, h_r, h_g = np.split(h @ w["recurrent_kernel"] + w["recurrent_bias"], 3, axis=1)
        z, g = sigmoid(x_z + h_z), np.tanh(x_g + sigmoid(x_r + h_r) * h_g)
        return z * h + (1 - z) * g, c

    return step


def compatible_gru(w):
    """TensorFlow's CudnnCompatibleGRUCell."""

    def step(x, h, c):
        gates = np.concatenate([x, h], axis=1) @ w["gates/kernel"] + w["gates/bias"]
        r, u = np.split(sigmoid(gates), 2, axis=1)
        side = "candidate/hidden_projection/"
        hidden = h @ w[side + "kernel"] + w[side + "bias"]
        side = "candidate/input_projection/"
        new = np.tanh(x @ w[side + "kernel"] + w[side + "bias"] + r * hidden)
        return (1 - u) * new + u * h, c

    return step


def basic_rnn(function):
    def of(w):
        def step(x, h, c):
            return function(np.concatenate([x, h], axis=1) @ w["kernel"] + w["bias"]), c

        return step

    return of


@pytest.mark.parametrize(
    ("source", "cell", "formula", "shapes"),
    [
        ("haste", "lstm", haste_lstm, {"kernel": (3, 16), "recurrent_kernel": (4, 16),
                                       "bias": (16,)}),
        ("haste", "gru", haste_gru, {"kernel": (3, 12), "recurrent_kernel": (4, 12), "bias": (12,),
                                     "recurrent_bias": (12,)}),
        ("tf_cell", "gru", compatible_gru, {
            "gates/kernel": (7, 8), "gates/bias": (8,),
            "candidate/input_projection/kernel": (3, 4), "candidate/input_projection/bias": (4,),
            "candidate/hidden_projection/kernel": (4, 4), "candidate/hidden_projection/bias": (4,),
        }),
        ("tf_cell", "rnn_tanh", basic_rnn(np.tanh), {"kernel": (7, 4), "bias": (4,)}),
        ("tf_cell", "rnn_relu", basic_rnn(lambda a: np.maximum(a, 0)),
         {"kernel": (7, 4), "bias": (4,)}),
    ],
)  # fmt: skip
def test_formulas(source, cell, formula, shapes):
    weights = {name: drawn(place + 1, *shape)[place] for place, (name, shape) in
               enumerate(shapes.items())}  # fmt: skip
    layer = from_weights(weights, source, cell=cell)
    x = drawn(5, 2, 3)
    y, _ = layer(torch.from_numpy(x))
    np.testing.assert_allclose(y.detach(), loop(formula(weights), x), rtol=0, atol=1e-12)
    made = to_weights(layer, source)
    assert [name.removeprefix(SCOPES.get(cell, "")) for name in made] == list(weights)
    same_bits(made.values(), weights.values())


@pytest.mark.parametrize("both", [False, True])
def test_the_names_of_checkpoints_of_tensorflow(both):
    """Those of its CudnnLSTM, under which its cells find them."""
    layer = openrnn.LSTM(3, 4, 12, bidirectional=both, bias_mode="input")
    made = to_weights(layer, "tf_cell")
    cell = "cudnn_compatible_lstm_cell/kernel"
    name = f"stack_bidirectional_rnn/cell_11/bidirectional_rnn/bw/{cell}"
    last = name if both else f"rnn/multi_rnn_cell/cell_11/{cell}"
    assert made[last].shape == (12 if both else 8, 16)
    again = from_weights({name: made[name] for name in sorted(made)}, "tf_cell", cell="lstm")
    assert again.spec == layer.spec
    same_bits(again.state_dict().values(), layer.state_dict().values())


# biases


def test_one_bias_goes_to_libraries_with_two():
    layer = openrnn.LSTM(3, 4, bias_mode="recurrent")
    made = to_weights(layer, "torch")
    assert not made["bias_ih_l0"].any()
    same_bits([made["bias_hh_l0"]], [layer.bias_hh_l0.detach()])


def test_a_bias_moves_where_the_function_is_the_same():
    layer = openrnn.LSTM(3, 4, bias_mode="recurrent")
    same_bits([to_weights(layer, "equinox")["bias"]], [layer.bias_hh_l0.detach()])


def test_two_biases_are_summed_only_where_asked():
    layer = openrnn.GRU(3, 4)
    with pytest.raises(ValueError, match="equinox has one bias of gate r, layer 0 has two"):
        to_weights(layer, "equinox")
    again = from_weights(to_weights(layer, "equinox", sum_biases=True), "equinox")
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(again(x)[0], layer(x)[0], rtol=0, atol=1e-6)


def test_a_bias_that_the_reset_gate_multiplies_stays_where_it_is():
    layer = openrnn.GRU(3, 4)
    with pytest.raises(ValueError, match="nnx has no recurrent bias of gate n, layer 0 has one"):
        to_weights(layer, "nnx", sum_biases=True)
    with torch.no_grad():
        layer.bias_hh_l0.zero_()
    same_bits([to_weights(layer, "nnx")["dense_i/bias"]], [layer.bias_ih_l0.detach()])


def test_a_network_without_biases():
    layer = openrnn.GRU(3, 4, bias=False)
    assert list(to_weights(layer, "keras")) == ["kernel", "recurrent_kernel"]
    assert not to_weights(layer, "haste")["bias"].any()


# what names, order and shapes say


def kernels(inputs=3, hidden=4, gates=4):
    """The arrays of a Keras layer, as `get_weights` lists them."""
    return [drawn(inputs, gates * hidden), drawn(hidden, gates * hidden), drawn(gates * hidden)]


def test_lists_in_the_order_of_the_library():
    one, two = kernels(), kernels(4)
    for arrays in ([*one, *two], [one, two]):
        layer = from_weights(arrays, "keras")
        assert (layer.num_layers, layer.bidirectional) == (2, False)
        same_bits([layer.weight_ih_l1.detach()], [two[0].T])
    bidirectional = from_weights([*one, *kernels(), *kernels(8), *kernels(8)], "keras")
    assert (bidirectional.num_layers, bidirectional.bidirectional) == (2, True)


def test_what_shapes_leave_open_is_asked_for():
    arrays = [*kernels(4), *kernels(4)]
    with pytest.raises(ValueError, match="say which by bidirectional="):
        from_weights(arrays, "keras")
    assert from_weights(arrays, "keras", bidirectional=True).num_layers == 1
    assert from_weights(arrays, "keras", bidirectional=False).num_layers == 2
    with pytest.raises(ValueError, match="several cells, say which by cell=: rnn_tanh, rnn_relu"):
        from_weights(kernels(gates=1), "keras")
    with pytest.raises(ValueError, match="say which by cell=: gru, gru_reset_before"):
        from_weights(kernels(gates=3)[:2], "keras")


@pytest.mark.parametrize("cell", [cells.rnn_tanh, cells.rnn_relu], ids=lambda cell: cell.name)
def test_what_may_be_a_stack_is_not_taken_for_the_one_network_that_fits_whole(cell):
    """Two kernels (8, 4) of tf_cell are also an LSTM of one unit in two directions."""
    layer = openrnn.Recurrent(cell, 4, 4, num_layers=2)
    arrays = openrnn.to_weights(layer, "tf_cell", sum_biases=True)
    with pytest.raises(ValueError, match="say which by cell=: lstm, rnn_tanh, rnn_relu"):
        from_weights(arrays, "tf_cell")
    again = from_weights(arrays, "tf_cell", cell=cell.name, bidirectional=False)
    assert (again.num_layers, again.hidden_size) == (2, 4)
    assert from_weights(arrays, "tf_cell", cell="lstm").bidirectional


@pytest.mark.parametrize("source", ["equinox", "onnx"])
def test_a_list_of_mappings(source):
    """Of layers that the library keeps one by one."""
    first, second = openrnn.GRU(3, 4, bidirectional=source == "onnx"), openrnn.GRU(4, 4)
    if source == "onnx":
        second = openrnn.GRU(8, 4, bidirectional=True)
    else:  # equinox has a second bias of n alone
        for layer in (first, second):
            torch.nn.init.zeros_(layer.bias_hh_l0)
    parts = [to_weights(layer, source) for layer in (first, second)]
    layer = from_weights(parts, source, cell="gru")
    assert layer.num_layers == 2
    for name, tensor in second.state_dict().items():
        same_bits([layer.state_dict()[name.replace("_l0", "_l1")]], [tensor])
    made = to_weights(layer, source)
    same_bits(made.values(), [*parts[0].values(), *parts[1].values()])


def test_a_list_with_biases_or_without():
    """With H = 2 the bias (2, 3H) of a GRU has the shape of its matrices."""
    arrays = [drawn(2, 6) for _ in range(6)]
    with pytest.raises(ValueError, match="the list may have biases or none"):
        from_weights(arrays, "keras", cell="gru", bidirectional=False)
    names = ("kernel", "recurrent_kernel", "bias")
    named = [dict(zip(names, arrays[:3])), dict(zip(names, arrays[3:]))]
    assert from_weights(named, "keras", bidirectional=False).num_layers == 2


def test_layers_that_are_not_recurrent_are_left():
    arrays = dict(zip(("m/lstm/kernel:0", "m/lstm/recurrent_kernel:0", "m/lstm/bias:0"), kernels()))
    dense = {"m/dense/kernel:0": drawn(4, 2), "m/dense/bias:0": drawn(2)}
    assert from_weights(arrays | dense, "keras").hidden_size == 4
    with pytest.raises(ValueError, match="m/lstm/biases is no array of bias, kernel"):
        from_weights({**arrays, "m/lstm/biases": drawn(16)}, "keras")


def test_directions_are_paired_by_their_names():
    forward, reverse = kernels(), [-array for array in kernels()]
    names = ("kernel", "recurrent_kernel", "bias")
    arrays = {"backward_rnn": dict(zip(names, reverse)), "forward_rnn": dict(zip(names, forward))}
    layer = from_weights(arrays, "keras")
    same_bits([layer.weight_ih_l0.detach()], [forward[0].T])
    same_bits([layer.weight_ih_l0_reverse.detach()], [reverse[0].T])
    with pytest.raises(ValueError, match="bidirectional is False, the names have 2 directions"):
        from_weights(arrays, "keras", bidirectional=False)
    with pytest.raises(ValueError, match="got 1 forward and 2 reverse"):
        from_weights(arrays | {"backward_2": dict(zip(names, reverse))}, "keras")


def test_numbers_in_names_are_numbers():
    names = ("kernel", "recurrent_kernel", "bias")
    chains = {f"lstm_{k}": dict(zip(names, [a + k for a in kernels(4)])) for k in range(12)}
    layer = from_weights(dict(sorted(chains.items())), "keras", bidirectional=False)
    for k in range(12):
        same_bits([getattr(layer, f"bias_ih_l{k}").detach()], [chains[f"lstm_{k}"]["bias"]])


def test_a_prefix_chooses():
    theirs = torch.nn.ModuleDict({"a": torch.nn.LSTM(3, 4), "b": torch.nn.LSTM(3, 5)})
    with pytest.raises(ValueError, match=r"several networks, choose one by prefix=: 'a\.', 'b\.'"):
        from_weights(theirs.state_dict(), "torch", cell="lstm")
    assert from_weights(theirs.state_dict(), "torch", prefix="b.").hidden_size == 5
    with pytest.raises(ValueError, match="no array has a name that begins with 'c'"):
        from_weights(theirs.state_dict(), "torch", prefix="c")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_of_numbers(dtype):
    layer = openrnn.GRU(3, 4, dtype=dtype)
    made = to_weights(layer, "keras")
    again = from_weights(made, "keras")
    assert again.weight_ih_l0.dtype == dtype
    for name, tensor in layer.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_options_of_the_layer():
    layer = from_weights(kernels(), "keras", batch_first=True, backend="reference")
    assert layer.batch_first
    assert layer.backend == "reference"
    with pytest.raises(ValueError, match=r"follow from the shapes of keras's"):
        from_weights(kernels(), "keras", num_layers=2)
    with pytest.raises(TypeError, match="bias_mode follows from the arrays"):
        from_weights(kernels(), "keras", bias_mode="double")


# what is refused, in one sentence that names the array

GOOD = dict(zip(("kernel", "recurrent_kernel", "bias"), kernels()))
TORCH = {name: tensor.numpy() for name, tensor in torch.nn.LSTM(3, 4).state_dict().items()}


@pytest.mark.parametrize(
    ("source", "arrays", "more", "text"),
    [
        ("keras", GOOD | {"recurrent_kernel": drawn(4, 15)}, {"cell": "lstm"},
         "recurrent_kernel must have 4 * H columns, got (4, 15)"),
        ("keras", GOOD | {"bias": drawn(12)}, {"cell": "lstm"},
         "bias must have shape (16,), got (12,)"),
        ("keras", GOOD | {"kernel": drawn(16)}, {"cell": "lstm"},
         "kernel must have 2 axes and not be empty, got shape (16,)"),
        ("keras", GOOD | {"kernel": GOOD["kernel"].astype("f")}, {"cell": "lstm"},
         "recurrent_kernel must be of one type of real numbers with the others, "
         "got torch.float64 beside torch.float32"),
        ("keras", {"kernel": drawn(3, 16)}, {}, "there is no array recurrent_kernel, only kernel"),
        ("keras", [drawn(3, 16)], {"cell": "lstm"},
         "needs kernel, recurrent_kernel, bias of each layer and direction, got 1 arrays"),
        ("keras", [*kernels(), *kernels(5)], {"cell": "lstm"},
         "array 3 and after: kernel must have shape (4, 16), got (5, 16)"),
        ("keras", GOOD, {"cell": "mgu"}, "keras has no cell 'mgu', it has lstm, gru, "
         "gru_reset_before, rnn_tanh, rnn_relu"),
        ("caffe", GOOD, {}, "source must be one of openrnn, torch, keras, "),
        ("torch", {**TORCH, "weight_ih_l1": drawn(16, 4)}, {"cell": "lstm"},
         "weight_ih_l1 is no array of 1 layers in 1 directions"),
        ("torch", {k: v for k, v in TORCH.items() if k != "bias_hh_l0"}, {"cell": "lstm"},
         "there is no array bias_hh_l0"),
        ("onnx", {"W": drawn(1, 16, 3), "R": drawn(2, 16, 4)}, {"cell": "lstm"},
         "arrays must have 1 or 2 directions along their first axis, got 1 in W, 2 in R"),
        ("cudnn", drawn(100), {"cell": "lstm"}, "the length of a flat buffer of cudnn does not say "
         "its sizes"),
        ("cudnn", drawn(100), {"cell": "lstm", "hidden_size": 4},
         "params must be a vector of 96 + 16 * I numbers, got shape (100,)"),
        ("cudnn", drawn(129), {"cell": "lstm", "hidden_size": 4},
         "params must be a vector of 96 + 16 * I numbers, got shape (129,)"),
        ("cudnn", np.ones(112, int), {"cell": "lstm", "hidden_size": 4},
         "params must be real numbers, got torch.int64"),
        ("keras", {"a0": dict(zip(GOOD, kernels())), "a1": dict(zip(GOOD, kernels(4)[:2]))},
         {"cell": "lstm"}, "some layers and directions have biases, others have none"),
        ("tf_canonical", ([drawn(4, 3)], [drawn(4)]), {"cell": "lstm"},
         "needs 8 weights and biases of each layer and direction, got 1 weights and 1 biases"),
        ("xlstm", {**dict.fromkeys([f"{gate}gate.weight" for gate in "ifzo"], drawn(1, 4, 4)),
                   "slstm_cell._recurrent_kernel_": np.ones((0, 16, 4)),
                   "slstm_cell._bias_": drawn(16)}, {},
         "slstm_cell._recurrent_kernel_ must have 3 axes and not be empty, got shape (0, 16, 4)"),
        ("torch", {**TORCH, "weight_hr_l0": drawn(4)}, {"cell": "lstm"},
         "weight_hr must have 2 axes and not be empty, got shape (4,)"),
        ("tf_cell", {"kernel": drawn(3, 16), "bias": drawn(16)}, {"cell": "lstm"},
         "input_size must not be negative, got -1"),
        ("equinox", [GOOD, GOOD], {}, "there is no array weight_hh"),
    ],
)  # fmt: skip
def test_wrong_arrays(source, arrays, more, text):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        from_weights(arrays, source, **more)
    assert "\n" not in str(caught.value)


def test_wrong_types():
    with pytest.raises(TypeError, match="bias must be an array of real numbers, got str"):
        from_weights(GOOD | {"bias": "none"}, "keras")
    with pytest.raises(ValueError, match="must be of one type of real numbers"):
        from_weights({name: array.astype(int) for name, array in GOOD.items()}, "keras")
    with pytest.raises(TypeError, match="layer must be a layer of openrnn, got torch's LSTM"):
        to_weights(torch.nn.LSTM(3, 4), "keras")


@pytest.mark.parametrize(
    ("layer", "target", "text"),
    [
        (openrnn.LSTM(3, 4, proj_size=2), "keras", "keras has no projection, got proj_size 2"),
        (openrnn.LSTM(4, 4, input_mode="skip"), "keras", "keras needs input_mode 'linear'"),
        (openrnn.LSTM(3, 4, cell_clip=2), "onnx", "onnx bounds no cell state, got cell_clip"),
        (openrnn.Recurrent(cells.mgu, 3, 4), "torch", "torch has no cell 'mgu', it has lstm"),
    ],
)
def test_what_a_library_has_not(layer, target, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        to_weights(layer, target)


def test_heads():
    layer = openrnn.Recurrent(cells.slstm, 4, 4, bias_mode="input")
    with pytest.raises(ValueError, match="heads must divide hidden_size 4, got 3"):
        to_weights(layer, "xlstm", heads=3)
    with pytest.raises(ValueError, match=r"holds 2 heads, got a matrix .* outside its 2 blocks"):
        to_weights(layer, "xlstm", heads=2)
    with pytest.raises(ValueError, match="heads must be 1"):
        to_weights(openrnn.LSTM(3, 4, bias_mode="input"), "keras", heads=2)


@pytest.mark.parametrize("sizes", [(16, 16), (3, 4)])
def test_a_quantized_layer_has_floating_weights(sizes):
    """Whatever the library: those that its own calls in floating point run with."""
    layer, plain = openrnn.GRU(*sizes), openrnn.GRU(*sizes)
    torch.nn.init.zeros_(layer.bias_hh_l0)  # some have no place for that of n
    openrnn.quantize(layer, quiet=True)
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), layer.weights(), strict=True):
            parameter.copy_(value)
    taken = [
        name for name in LIBRARIES if any(row.cell == "gru" for row in LIBRARIES[name].layouts)
    ]
    assert len(taken) > 5
    for name in taken:
        found, wanted = (to_weights(each, name, sum_biases=True) for each in (layer, plain))
        assert found.keys() == wanted.keys()
        same_bits(found.values(), wanted.values())


def test_reading_weights_changes_nothing():
    """Modes of parts that differ, and the vectors of a spectral norm, which training moves."""
    layer = spectral_norm(openrnn.GRU(3, 4), "weight_hh_l0")
    layer.parametrizations["weight_hh_l0"].eval()
    spectral_norm(layer, "weight_ih_l0")
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    modes = [module.training for module in layer.modules()]
    to_weights(layer, "torch")
    assert [module.training for module in layer.modules()] == modes
    assert all(value.equal(before[name]) for name, value in layer.state_dict().items())


def test_no_library_is_imported():
    """Only torch and numpy, whatever else is installed."""
    program = (
        "import sys, numpy as np, openrnn; "
        "openrnn.from_weights([np.ones((3, 16)), np.ones((4, 16)), np.ones(16)], 'keras'); "
        "print(*sys.modules)"
    )
    ran = forks.python(program)
    assert ran.returncode == 0, ran.stderr
    loaded = ran.stdout.split()
    foreign = {"keras", "tensorflow", "jax", "flax", "equinox", "onnx", "mxnet", "h5py"}
    assert not foreign & {name.partition(".")[0] for name in loaded}
