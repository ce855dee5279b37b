"""int8 weights: `openrnn.quantize`, its kernels, and the calls that they do not take."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from cases import CLIP
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import openrnn
from openrnn import cells
from openrnn.nn.quantized import QUANTIZED, Quantized, int8_rows

LAYERS = {
    "lstm": lambda: openrnn.LSTM(40, 64, 2),
    "gru": lambda: openrnn.GRU(10, 37),
    "rnn": lambda: openrnn.RNN(1, 5, nonlinearity="relu"),
    "both ways": lambda: openrnn.LSTM(33, 50, 2, bidirectional=True),
    "batch_first": lambda: openrnn.GRU(32, 31, batch_first=True),
    "projection": lambda: openrnn.LSTM(30, 50, proj_size=20),
    "clip": lambda: openrnn.LSTM(12, 20, cell_clip=CLIP),
    "no bias": lambda: openrnn.LSTM(12, 20, bias=False),
    "skip": lambda: openrnn.GRU(20, 20, 2, input_mode="skip"),
    "gates": lambda: openrnn.GRU(60, 20, 2, input_mode="gates"),
    "reverse": lambda: openrnn.GRU(12, 20, reverse=True),
    "teams": lambda: openrnn.LSTM(300, 512),
    "peephole": lambda: openrnn.Recurrent(cells.peephole_lstm, 12, 20),
    "two sides": lambda: openrnn.Recurrent(cells.slstm, 12, 20),
}  # fmt: skip


def both(name, seed=0):
    """A quantized layer, and one of the same weights in floating point that the reference runs."""
    torch.manual_seed(seed)
    layer = LAYERS[name]()
    openrnn.quantize(layer, quiet=True)
    plain = LAYERS[name]()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), layer.weights(), strict=True):
            parameter.copy_(value)
    plain.backend = "reference"
    return layer, plain


def results(found):
    """The tensors of what a call returns, whatever its nesting."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [tensor for each in found for tensor in results(each)]


def same(found, wanted):
    for have, want in zip(results(found), results(wanted), strict=True):
        torch.testing.assert_close(have, want, rtol=2e-4, atol=2e-4)


def bits(a, b):
    return all(map(torch.equal, results(a), results(b)))


def test_a_row_has_a_scale_of_its_own():
    weight = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-3, 2e-4, 0.0], [3.0, 0.0, 0.0]])
    panels, scale = int8_rows(weight, 2)
    assert panels.dtype is torch.int8
    assert panels.shape == (2, 1, 2, 16, 2)
    rows = panels.transpose(2, 3).reshape(2, 16, 4)
    assert rows[:, :2].tolist() == [
        [[64, -127, 32, 0], [0, 0, 0, 0]], [[127, 25, 0, 0], [127, 0, 0, 0]],
    ]  # fmt: skip
    assert not rows[:, 2:].any()
    assert scale.shape == (2, 1, 16)
    wanted = torch.tensor([[2.0, 0.0], [1e-3, 3.0]]) / 127
    torch.testing.assert_close(scale[:, 0, :2], wanted)
    assert not scale[:, 0, 2:].any()


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_and_call(name):
    """The reference with the same weights: what differs is that the kernels round inputs."""
    layer, plain = both(name)
    assert isinstance(layer, Quantized)
    assert not list(layer.parameters())
    steps, batch = 9, 5
    x = 3 * torch.randn(steps, batch, layer.input_size)
    hx = [torch.randn(layer.spec.chains, batch, size) for size in layer.spec.state_sizes]
    hx = tuple(hx) if len(hx) > 1 or type(plain) is openrnn.Recurrent else hx[0]
    lengths, reset = torch.tensor([4, 9, 0, 1, 7]), torch.rand(steps, batch) < 0.3
    x, reset = (x.transpose(0, 1), reset.T) if plain.batch_first else (x, reset)
    with torch.no_grad():
        same(layer(x), plain(x))
        same(layer(x, hx), plain(x, hx))
        same(layer(x, hx, lengths=lengths), plain(x, hx, lengths=lengths))
        more = {"reset": reset, "reset_state": hx, "return_states": True}
        same(layer(x, hx, **more), plain(x, hx, **more))
        one = x[0] if plain.batch_first else x[:, 0]
        same(layer(one), plain(one))
        if not layer.bidirectional and not layer.spec.reverse:
            same(layer.step(x[:, 0] if plain.batch_first else x[0]),
                 plain.step(x[:, 0] if plain.batch_first else x[0]))  # fmt: skip
            stepper = layer.stepper(batch)
            for t in range(3):
                x_t = x[:, t] if plain.batch_first else x[t]
                y_t = stepper(x_t)
            y, _ = plain(x[:, :3] if plain.batch_first else x[:3])
            same(y_t, y[:, -1] if plain.batch_first else y[-1])


def test_packed_and_jagged_sequences():
    layer, plain = both("gru")
    rows = [torch.randn(steps, 10) for steps in (3, 7, 1)]
    packed = nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
    with torch.no_grad():
        (found, h), (wanted, g) = layer(packed), plain(packed)
        same((found.data, h), (wanted.data, g))


@pytest.mark.parametrize("name", ["lstm", "teams", "two sides"])
def test_bits_follow_from_the_sequence_alone(name):
    """Not from threads, from other sequences, nor from how its steps are cut into calls."""
    layer, _ = both(name)
    x, before = torch.randn(40, 33, layer.input_size), torch.get_num_threads()
    with torch.no_grad():
        try:
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(layer(x))
        finally:
            torch.set_num_threads(before)
        assert bits(found[0], found[1])
        assert bits(found[0], found[2])
        y, _ = layer(x[:, 7:9])
        assert torch.equal(y, found[0][0][:, 7:9])
        first, states = layer(x[:11])
        rest, _ = layer(x[11:], states)
        assert torch.equal(torch.cat([first, rest]), found[0][0])


def test_a_row_that_is_not_finite_spoils_no_other():
    layer, plain = both("lstm")
    x = torch.randn(6, 4, 40)
    x[2, 1, 3], x[0, 2, 0] = float("nan"), float("inf")
    x[:, 3] = 0.0
    with torch.no_grad():
        y, _ = layer(x)
        assert y[2:, 1].isnan().all()
        assert y[:, 2].isnan().all()
        good, wanted = y[:, [0, 3]], plain(x)[0][:, [0, 3]]
        same((good, y[:2, 1]), (wanted, plain(x)[0][:2, 1]))


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e20, 1e37])
def test_inputs_of_any_size(scale):
    layer, plain = both("rnn")
    x = scale * torch.rand(1, 3, 1)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], plain(x)[0], rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["lstm", "peephole", "teams"])
def test_calls_that_repeat_and_bound_steps(name):
    """The same bits as the first call, of the weights as they are now."""
    layer, _ = both(name)
    other, _ = both(name, seed=1)
    x = torch.randn(1, 3, layer.input_size)
    with torch.no_grad():
        for _ in range(2):
            first, again = layer(x), [layer(x) for _ in range(3)]
            assert all(bits(first, each) for each in again)
            assert any(layer._call_cache._calls.values())
            stepper = layer.stepper(3)
            steps = [stepper(x[0]).clone() for _ in range(3)]
            assert stepper._runs
            y, state = layer.step(x[0])
            assert torch.equal(y, steps[0])
            assert torch.equal(layer.step(x[0], state)[0], steps[1])
            layer.load_state_dict(other.state_dict())
            assert bits(layer(x), other(x))
            state = stepper.state
            assert torch.equal(stepper(x[0]), layer.step(x[0], state)[0])


# calls that need floating-point weights


def test_the_gradient_of_an_input():
    layer, plain = both("lstm")
    x = torch.randn(5, 3, 40, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(each(x)[0].square().sum(), x)[0] for each in (layer, plain)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert layer(x)[0].requires_grad


def test_other_dtypes_and_autocast():
    layer, plain = both("lstm")
    x = torch.randn(5, 3, 40)
    with torch.no_grad():
        wanted = plain(x)[0]
        with pytest.raises(ValueError, match="does not match weight dtype"):
            layer(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x)[0].dtype is torch.bfloat16
        torch.testing.assert_close(layer.double()(x.double())[0].float(), wanted)
        half, _ = layer.bfloat16()(x.bfloat16())
        torch.testing.assert_close(half.float(), wanted, rtol=0.1, atol=0.1)


def test_graphs_export_and_transforms():
    layer, plain = both("gru")
    x = torch.randn(4, 3, 10)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        same(compiled(x), plain(x))
        same(torch.export.export(layer, (x,)).module()(x), plain(x))
        many = torch.func.vmap(lambda each: layer(each)[0])(torch.stack([x, 2 * x]))
        same(many[0], plain(x)[0])


def test_explain_says_what_runs(capsys):
    layer, plain = both("lstm")
    x = torch.randn(5, 3, 40)
    with torch.no_grad():
        table = openrnn.explain(layer, x)
        assert "weights are int8" in table.text
        assert table.chosen == "cpu"
        assert table.problem.precision == "int8"
        reasons = {row.backend: row.reasons for row in table.rows}
        assert "does not do int8 weights" in reasons["fused"]
        assert "does not do int8 weights" in reasons["reference"]
        layer.backend = "reference"
        same(layer(x), plain(x))
    told = capsys.readouterr().out
    assert "become floating point" not in told
    openrnn.explain(layer, x, backend="auto", grad=True)
    told = capsys.readouterr().out
    assert "int8 weights become floating point for each call: a gradient is wanted" in told


# the module


def test_state_copies_and_files(tmp_path):
    layer, _ = both("both ways")
    x = torch.randn(4, 3, 33)
    with torch.no_grad():
        wanted = layer(x)
        state = layer.state_dict()
        other, _ = both("both ways", seed=1)
        assert not bits(other(x), wanted)
        other.load_state_dict(state)
        assert bits(other(x), wanted)
        assert bits(copy.deepcopy(layer)(x), wanted)
        assert bits(pickle.loads(pickle.dumps(layer))(x), wanted)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    assert loaded["weight_ih_l0"].dtype is torch.int8
    assert loaded["weight_ih_l0"].shape == (4, 4, 17, 16, 2)
    assert loaded["weight_ih_l0_scale"].shape == (4, 4, 16)
    assert set(loaded) == {
        *(name for name, _ in LAYERS["both ways"]().named_parameters()),
        *(f"weight_{kind}_l{n}{way}_scale" for kind in ("ih", "hh") for n in (0, 1)
          for way in ("", "_reverse")),
    }  # fmt: skip
    assert "weights=int8" in repr(layer)
    with pytest.raises(RuntimeError, match="cannot be drawn anew"):
        layer.reset_parameters()


def test_the_report(capsys):
    class Own(openrnn.LSTM):
        def step(self, x_t, state=None):
            return super().step(2 * x_t, state)

    shared = nn.LSTM(64, 256)
    cut = nn.utils.parametrizations.weight_norm(openrnn.GRU(3, 4), "weight_hh_l0")
    broken = openrnn.GRU(3, 4)
    with torch.no_grad():
        broken.weight_hh_l0[0, 0] = float("inf")
    model = nn.ModuleDict({
        "a": shared, "again": shared, "cell": nn.LSTMCell(3, 4), "own": Own(3, 4), "norm": cut,
        "twice": openrnn.Recurrent(cells.gru_reset_before, 3, 4), "broken": broken,
        "meta": openrnn.GRU(3, 4, device="meta"), "fp16": openrnn.GRU(3, 4, dtype=torch.half),
    })  # fmt: skip
    done = openrnn.quantize(model)
    told = capsys.readouterr().out
    assert told.startswith("2 of 9 recurrent modules were given int8 weights: 1.3 -> 0.3 MiB\n")
    notes = {row.path: row.note for row in done.rows}
    assert notes["a"].startswith("int8, largest error of a weight 0.00")
    assert notes["again"] == f"{notes['a']} (the same module as a)"
    for path, words in {
        "cell": "left: only openrnn.LSTM, GRU, RNN and Recurrent themselves",
        "own": "left: only openrnn.LSTM", "norm": "left: its weights are computed",
        "twice": "left: cell gru_reset_before multiplies", "broken": "left: a weight is infinite",
        "meta": "left: its weights have no values",
        "fp16": "left: dtype float16, int8 kernels need float32",
    }.items():  # fmt: skip
        assert notes[path].startswith(words), path
    assert openrnn.quantize(model, quiet=True).rows[0].note == "left: it has int8 weights already"
    assert repr(done).startswith("<openrnn.convert.Quantization: 2 of 9")
    with pytest.raises(TypeError, match="must be a torch"):
        openrnn.quantize(nn.LSTM)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_torch_quantizes_by_type_leaves_ours_and_says_so():
    model = nn.Sequential(nn.Linear(3, 4), openrnn.LSTM(4, 5))
    says = "leaves LSTM of openrnn in floating point, .* openrnn.quantize"
    with pytest.warns(UserWarning, match=says):
        found = torch.ao.quantization.quantize_dynamic(model)
    assert type(found[1]) is openrnn.LSTM
    assert not hasattr(model[1], "qconfig")
    openrnn.quantize(model, quiet=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch.ao.quantization leaves")
        found = torch.ao.quantization.quantize_dynamic(model)
    x = torch.randn(2, 3, 3)
    with torch.no_grad():
        torch.testing.assert_close(found(x)[0], model(x)[0], rtol=0.1, atol=0.05)


def test_each_layer_has_its_twin():
    assert {face.__name__ for face in QUANTIZED} == {"LSTM", "GRU", "RNN", "Recurrent"}
    for face, twin in QUANTIZED.items():
        assert issubclass(twin, face)
        assert twin.__name__ == f"Quantized{face.__name__}"


# tensors that are not as the kernels read them


def test_states_and_buffers_of_another_kind():
    layer, plain = both("gru")
    x = torch.randn(2, 3, 10)
    with torch.no_grad():
        wanted = plain(x)
        for kind in (torch.int8, torch.float64):
            with pytest.raises(ValueError, match="must have one dtype"):
                layer(x, torch.ones(1, 3, 37, dtype=kind))
        layer.type(torch.float32)  # the int8 matrices, too
        same(layer(x), wanted)
        stepper = layer.stepper(3)
        steps = torch.stack([stepper(x[0]).clone() for _ in range(3)])
        same(steps, plain(x[0].expand(3, -1, -1))[0])
        layer, _ = both("gru")
        layer.bias_ih_l0 = torch.zeros(2)
        with pytest.raises(ValueError, match=r"bias_ih_l0 must have shape \(111,\), got \(2,\)"):
            layer(x)
        layer, _ = both("gru")
        for _ in range(3):
            layer(x)
        layer.weight_hh_l0.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="weight_hh_l0 must have memory for its shape"):
            layer(x)


@pytest.mark.parametrize("make", [lambda: both("gru")[0], lambda: openrnn.GRU(10, 37)])
def test_what_watches_sees_the_call(make):
    """Fake tensors and graphs of operators, also of a layer that remembers calls."""
    layer = make()
    x = torch.randn(2, 3, 10)
    with torch.no_grad():
        for _ in range(4):
            wanted = layer(2 * x)[0]
        graph = make_fx(lambda x: layer(x)[0])(x)
        torch.testing.assert_close(graph(2 * x), wanted, rtol=1e-3, atol=1e-3)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(layer(x)[0], FakeTensor)


def test_masks_that_are_lists():
    layer, _ = both("gru")
    x = torch.randn(4, 3, 10)
    with torch.no_grad():
        assert bits(layer(x, lengths=[4, 2, 1]), layer(x, lengths=torch.tensor([4, 2, 1])))
        masks = torch.tensor([[0, 1, 0]] * 4)
        assert bits(layer(x, reset=masks.tolist()), layer(x, reset=masks))


def test_quantized_in_inference_mode():
    layer, x = openrnn.GRU(10, 37), torch.randn(4, 3, 10)
    with torch.inference_mode():
        openrnn.quantize(layer, quiet=True)
    layer.load_state_dict(layer.state_dict())
    layer(x.requires_grad_())[0].sum().backward()
    assert x.grad.abs().sum() > 0


def test_names_of_torch_and_the_way_back():
    layer, plain = both("lstm")
    same(layer.all_weights, plain.all_weights)
    same(layer._flat_weights, plain._flat_weights)
    noted = nn.LSTM(3, 4)
    noted.qconfig, noted.precision = None, 16
    model = nn.Sequential(noted)
    assert openrnn.convert(model, quiet=True).rows[0].swapped
    assert noted.qconfig is None
    openrnn.quantize(model, quiet=True)
    done = openrnn.convert(model, to="torch", quiet=True)
    assert done.rows[0].note == "left: quantized: its weights are no parameters"


@pytest.mark.parametrize("strict", [True, False])
def test_weights_in_floating_point_are_to_be_loaded_first(strict):
    model = nn.ModuleDict({"a": openrnn.LSTM(3, 4), "b": nn.Linear(4, 2)})
    state = model.state_dict()
    openrnn.quantize(model, quiet=True)
    with pytest.raises(RuntimeError, match=r"a, QuantizedLSTM: .* load them first"):
        model.load_state_dict(state, strict=strict)
    model.load_state_dict(model.state_dict(), strict=strict)
