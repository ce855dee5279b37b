"""ONNX in: nodes as ONNX's own tests have them, beside ONNX Runtime, and what torch exports."""

import io
import logging
import warnings

import forks
import numpy as np
import pytest
import torch
from onnx_models import MARKS, assert_close, export, onnx, onnxruntime
from torch import nn

import openrnn
from openrnn import cells

pytestmark = MARKS

FORMS = ("defaults", "with_initial_bias", "batchwise", "reverse", "bidirectional")
NODE_TESTS = [
    *(f"test_{kind}_{form}" for kind in ("lstm", "gru", "simple_rnn") for form in FORMS),
    "test_lstm_with_peepholes", "test_gru_seq_length", "test_rnn_seq_length",
]  # fmt: skip


def constant(model, arrays):
    """The model with arrays in place of its inputs of these names."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.input[:]
    made.graph.input.extend(one for one in model.graph.input if one.name not in arrays)
    made.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    return made


def as_onnx(one, x, states=None):
    """Y, Y_h and Y_c in ONNX's layout, by the layer of an imported node."""
    y, finals = one.layer(x, one.initial_state if states is None else states, lengths=one.lengths)
    finals = (finals,) if isinstance(finals, torch.Tensor) else finals
    y = y.unflatten(-1, (one.layer.spec.directions, -1))  # (.., .., D, H)
    if one.layer.batch_first:
        return y, *(state.transpose(0, 1) for state in finals)
    return y.transpose(1, 2), *finals


def only(model):
    (one,) = openrnn.from_onnx(model).values()
    return one


@pytest.fixture(scope="module")
def node_tests():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other operators' tests
        # each module makes its tests when it is imported; those of all operators take 8 seconds
        from onnx.backend.test.case.node import _NodeTestCases as every
        from onnx.backend.test.case.node import gru, lstm, rnn  # noqa: F401
    kinds = {"LSTM", "GRU", "RNN"}
    return {case.name: case for case in every if case.model.graph.node[0].op_type in kinds}


def test_these_are_all_tests_of_onnx(node_tests):
    assert sorted(node_tests) == sorted(NODE_TESTS)


@pytest.mark.parametrize("name", NODE_TESTS)
def test_node_tests_of_onnx(node_tests, name):
    case = node_tests[name]
    ((given, wanted),) = case.data_sets
    names = [one.name for one in case.model.graph.input]
    feed = dict(zip(names, given, strict=True))
    x = feed.pop("X")
    one = only(constant(case.model, feed))
    assert one.inputs == {"X": "X"}
    found = dict(zip(("Y", "Y_h", "Y_c"), as_onnx(one, torch.from_numpy(x))))
    outputs = [output.name for output in case.model.graph.output]
    assert outputs == [*one.outputs]
    for output, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(found[output], torch.from_numpy(want), rtol=1e-5, atol=1e-6)


STEPS, BATCH, INPUTS, HIDDEN = 5, 4, 3, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
OPTIONS = {
    "LSTM": {}, "LSTM-P": {}, "GRU": {}, "GRU-after": {"linear_before_reset": 1}, "RNN": {},
    "RNN-relu": {"activations": ["Relu"]},
}  # fmt: skip
LENGTHS = np.array([5, 1, 3, 2], np.int32)


def arrays_of(kind, directions, dtype=np.float32):
    """Random numbers for every input of a node but X, by ONNX's names."""
    operator = kind.partition("-")[0]
    dice, gates = np.random.default_rng(0), GATES[operator] * HIDDEN
    shapes = {"W": (gates, INPUTS), "R": (gates, HIDDEN), "B": (2 * gates,)}
    shapes |= {"initial_h": (BATCH, HIDDEN)}
    shapes |= {"initial_c": (BATCH, HIDDEN)} if operator == "LSTM" else {}
    shapes |= {"P": (3 * HIDDEN,)} if kind == "LSTM-P" else {}
    made = {name: dice.normal(size=(directions, *shape)) * 0.6 for name, shape in shapes.items()}
    return {name: array.astype(dtype) for name, array in made.items()} | {"sequence_lens": LENGTHS}


def model_of(kind, arrays, name="", opset=14, **attributes):
    """A model of one node, all inputs but X initializers."""
    operator = kind.partition("-")[0]
    places = openrnn.onnx.read.INPUTS[operator]
    inputs = ["X", *(name if name in arrays else "" for name in places[1:])]
    outputs = [*openrnn.onnx.read.OUTPUTS[operator]]
    attributes = {"hidden_size": HIDDEN, **attributes}
    node = onnx.helper.make_node(operator, inputs, outputs, name=name, **attributes)
    float32 = onnx.TensorProto.FLOAT
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "one", [value("X", float32, [STEPS, BATCH, INPUTS])],
        [value(name, float32, None) for name in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", opset)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


def runtime(model, **feed):
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 4
    opened = onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    return [torch.from_numpy(value) for value in opened.run(None, feed)]


X = np.random.default_rng(1).normal(size=(STEPS, BATCH, INPUTS)).astype(np.float32)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_nodes_beside_onnx_runtime(kind, direction):
    """Random weights of every kind, lengths and initial states, all constants of the graph."""
    both = 1 + (direction == "bidirectional")
    options = {name: value * both if name == "activations" else value
               for name, value in OPTIONS[kind].items()}  # fmt: skip
    model = model_of(kind, arrays_of(kind, both), direction=direction, **options)
    one = only(model)
    assert one.layer.spec.reverse is (direction == "reverse")
    assert_close(as_onnx(one, torch.from_numpy(X)), runtime(model, X=X))


def batchwise(kind):
    """The same node in both layouts: its arrays in layout 0, and the model of layout 1."""
    arrays = arrays_of(kind, 2)
    swapped = {name: array.swapaxes(0, 1) if name in ("initial_h", "initial_c") else array
               for name, array in arrays.items()}  # fmt: skip
    return arrays, model_of(kind, swapped, direction="bidirectional", layout=1)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_layout_1_has_the_batch_first(kind):
    """ONNX Runtime does not have it: beside layout 0."""
    arrays, model = batchwise(kind)
    y, *finals = as_onnx(only(model), torch.from_numpy(X).transpose(0, 1))
    wanted = runtime(model_of(kind, arrays, direction="bidirectional"), X=X)
    turned = [y.permute(1, 2, 0, 3), *(state.transpose(0, 1) for state in finals)]
    assert_close(turned, wanted)


def test_float16_and_float64():
    for dtype in (np.float16, np.float64):
        one = only(model_of("GRU", arrays_of("GRU", 1, dtype)))
        assert one.layer.weight_hh_l0.dtype == torch.from_numpy(np.zeros(1, dtype)).dtype
        assert one.initial_state[0].dtype == one.layer.weight_hh_l0.dtype


def test_one_state_of_two_is_given():
    arrays = arrays_of("LSTM", 1)
    del arrays["initial_h"]
    model = model_of("LSTM", arrays)
    assert_close(as_onnx(only(model), torch.from_numpy(X)), runtime(model, X=X))


def test_states_and_lengths_that_the_graph_is_given():
    """They are named, and the caller passes them."""
    arrays = arrays_of("LSTM", 1)
    names = ("initial_h", "initial_c", "sequence_lens")
    model = model_of("LSTM", {n: a for n, a in arrays.items() if n not in names})
    model.graph.node[0].input[4:7] = ["n", "h", "c"]
    value, elements = onnx.helper.make_tensor_value_info, onnx.TensorProto
    model.graph.input.extend([
        value("n", elements.INT32, [BATCH]), value("h", elements.FLOAT, [1, BATCH, HIDDEN]),
        value("c", elements.FLOAT, [1, BATCH, HIDDEN]),
    ])  # fmt: skip
    one = only(model)
    assert one.inputs == {"X": "X", "sequence_lens": "n", "initial_h": "h", "initial_c": "c"}
    assert one.initial_state is None
    assert one.lengths is None
    h, c, n = (arrays[name] for name in names)
    y, finals = one.layer(
        torch.from_numpy(X), (torch.from_numpy(h), torch.from_numpy(c)),
        lengths=torch.from_numpy(n),
    )  # fmt: skip
    assert_close([y[:, None], *finals], runtime(model, X=X, n=n, h=h, c=c))


def test_names():
    """Of the node; of its first output where the node has none, or another's."""
    first = model_of("RNN", arrays_of("RNN", 1), name="mine")
    assert [*openrnn.from_onnx(first)] == ["mine"]
    again = onnx.NodeProto()
    again.CopyFrom(first.graph.node[0])
    again.output[:] = ["", "last"]
    first.graph.node.append(again)
    assert [*openrnn.from_onnx(first)] == ["Y", "last"]
    again.name = ""
    first.graph.node[1].CopyFrom(again)
    assert [*openrnn.from_onnx(first)] == ["mine", "last"]
    first.graph.node[1].output[1] = "mine"
    with pytest.raises(ValueError, match="RNN node 'mine': needs a name of its own"):
        openrnn.from_onnx(first)


class Several(nn.Module):
    """Layers beside each other over one input; each an output of its own."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for make in layers)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


OURS = {
    "LSTM": lambda: openrnn.LSTM(4, 5, bidirectional=True),
    "reverse": lambda: openrnn.LSTM(4, 5, reverse=True),
    "large": lambda: openrnn.GRU(4, 64),  # whose matrix torch's exporter does not fold
    "relu": lambda: openrnn.RNN(4, 5, nonlinearity="relu", bias=False),
    "one bias": lambda: openrnn.RNN(4, 5, bias_mode="recurrent"),
    "peephole_lstm": lambda: openrnn.Recurrent(cells.peephole_lstm, 4, 5, bidirectional=True),
    "gru_reset_before": lambda: openrnn.Recurrent(cells.gru_reset_before, 4, 5, reverse=True),
    "coupled_lstm": lambda: openrnn.Recurrent(cells.coupled_lstm, 4, 5),
}


@pytest.fixture(scope="module")
def round_trip(one_thread):
    model = Several(OURS.values()).eval()
    program = export(model, {"x": torch.randn(5, 3, 4)}, {"x": {0: "T", 1: "B"}})
    found = [*openrnn.from_onnx(program).values()]
    assert len(found) == len(OURS)
    return dict(zip(OURS, zip(model.layers, found, strict=True)))


@pytest.mark.parametrize("name", OURS)
def test_layers_of_ours_come_back(round_trip, name):
    layer, one = round_trip[name]
    x = torch.randn(7, 2, 4)
    assert [*one.inputs] == ["X"]
    torch.testing.assert_close(one.layer(x), layer(x), rtol=0, atol=1e-6)
    if name != "coupled_lstm":  # in ONNX an LSTM
        assert one.layer.spec.with_(bias_mode="double") == layer.spec.with_(bias_mode="double")


def torchs(dynamo):
    """What torch's exporters write of `torch.nn`: the model, and the file's bytes."""
    model = Several([
        lambda: nn.LSTM(4, 5, bidirectional=True), lambda: nn.GRU(4, 64),
        *([] if dynamo else [lambda: nn.RNN(4, 5, nonlinearity="relu")]),  # it has no node there
    ]).eval()  # fmt: skip
    file = io.BytesIO()
    logging.disable(logging.WARNING)  # of torchvision, which is not installed
    sizes = {} if dynamo else {"dynamic_axes": {"x": {0: "T", 1: "B"}}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the older exporter, which torch means to drop
            torch.onnx.export(
                model, (torch.randn(5, 3, 4),), file, dynamo=dynamo, verbose=False,
                input_names=["x"], **sizes,
            )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return model, file.getvalue()


@pytest.mark.parametrize("dynamo", [True, False])
def test_layers_of_torch(dynamo, tmp_path):
    """Whose weights are slices, and whose zero states the one folds and the other computes."""
    model, data = torchs(dynamo)
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    found = openrnn.from_onnx(path)
    x = torch.randn(7, 2, 4)
    for one, layer in zip(found.values(), model.layers, strict=True):
        assert one.initial_state is None
        assert ("initial_h" in one.inputs) is not dynamo
        torch.testing.assert_close(one.layer(x), layer(x), rtol=0, atol=1e-6)


def test_functions_are_inlined():
    """As some exporters write modules."""
    model = model_of("GRU", arrays_of("GRU", 1))
    node = model.graph.node[0]
    opsets = [onnx.helper.make_opsetid("", 14)]
    inner = onnx.helper.make_function(
        "mine", "Layer", [*node.input], [*node.output], [node], opsets
    )
    call = onnx.helper.make_node("Layer", [*node.input], [*node.output], domain="mine")
    wanted = as_onnx(only(model), torch.from_numpy(X))
    model.functions.append(inner)
    model.opset_import.append(onnx.helper.make_opsetid("mine", 1))
    del model.graph.node[:]
    model.graph.node.append(call)
    assert_close(as_onnx(only(model), torch.from_numpy(X)), wanted)


COUPLED = [1]  # values of input_forget


@pytest.mark.parametrize("flag", COUPLED)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_coupled_gates(direction, flag):
    """f = 1 - i, as ONNX Runtime runs `input_forget`: the rows of f may be anything."""
    arrays = arrays_of("LSTM", 2 if direction == "bidirectional" else 1)
    model = model_of("LSTM", arrays, direction=direction, input_forget=flag)
    one = only(model)
    assert one.layer.cell is openrnn.cells.coupled_lstm
    assert_close(as_onnx(one, torch.from_numpy(X)), runtime(model, X=X))


REFUSED = {
    "clip must be above 0, got -0.5": {"clip": -0.5},
    "activations must be of Affine, Elu, HardSigmoid, ": {
        "activations": ["Sigmoid", "Mish", "Tanh"]
    },
    "activations must be 3, got 2": {"activations": ["Sigmoid", "Tanh"]},
    "activation Affine needs a number in activation_beta, got none": {
        "activations": ["Sigmoid", "Affine", "Tanh"],
        "activation_alpha": [1.0],
    },
    "direction must be one of forward, reverse, bidirectional, got 'up'": {"direction": "up"},
    "W of direction bidirectional must have 2 along its first axis, got shape (1, 24, 3)": {
        "direction": "bidirectional"
    },
    "hidden_size must be 6, as R has it, got 7": {"hidden_size": 7},
    "layout must be 0 or 1, got 2": {"layout": 2},
    "attribute zoneout is not known": {"zoneout": 0.1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_layer_of_ours_does(message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # compared below
        openrnn.from_onnx(model_of("LSTM", arrays_of("LSTM", 1), name="n", **REFUSED[message]))
    assert str(caught.value).startswith(f"LSTM node 'n': {message}")


def changed(change):
    model = model_of("LSTM", arrays_of("LSTM", 1), name="n")
    change(model)
    return model


def nested(model):
    body = onnx.helper.make_graph(model.graph.node, "body", [], model.graph.output)
    model.graph.node[0].CopyFrom(
        onnx.helper.make_node(
            "If", ["yes"], ["Y"], name="maybe", then_branch=body, else_branch=body
        )
    )


def computed(model, operator, domain="", inputs=("W",)):
    """W made by an operator from the initializer of that name."""
    node = onnx.helper.make_node(operator, inputs, ["V"], domain=domain)
    model.graph.node[0].input[1] = "V"
    model.graph.node.insert(0, node)


def shorter(model, name, shape):
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))


GRAPHS = {
    "LSTM node 'n': W must be a constant, got 'X', which is an input": lambda m: m.graph.node[
        0
    ].input.__setitem__(1, "X"),
    "LSTM node 'n': W must be a constant, got 'V', which": lambda m: computed(m, "Bernoulli"),
    "LSTM node 'n': W must be a constant, got 'V', which is": lambda m: computed(
        m, "RandomNormal", inputs=()
    ),
    "LSTM node 'n': V cannot be computed by Wonder": lambda m: computed(m, "Wonder", "mine"),
    "LSTM node 'n': needs R, got none": lambda m: m.graph.node[0].input.__setitem__(2, ""),
    "LSTM node 'n' stands inside If node 'maybe'": nested,
    "LSTM node 'n': initial_h is a constant, so initial_c must be one": lambda m: m.graph.node[
        0
    ].input.__setitem__(6, "X"),
    "LSTM node 'n': initial_c must have 1 along axis 0 and 6 along the last": lambda m: shorter(
        m, "initial_c", (1, BATCH, 5)
    ),
    "LSTM node 'n': R must have shape (24, 6)": lambda m: shorter(m, "R", (1, 24, 7)),
    "the model must have an LSTM, GRU or RNN node": lambda m: m.graph.node.pop(),
}


@pytest.mark.parametrize("message", GRAPHS)
def test_graphs_that_are_not_taken(message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # compared below
        openrnn.from_onnx(changed(GRAPHS[message]))
    assert str(caught.value).startswith(message)


def test_what_is_no_model(tmp_path):
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ValueError, match=r"text.onnx cannot be read as an ONNX model"):
        openrnn.from_onnx(tmp_path / "text.onnx")
    with pytest.raises(FileNotFoundError):
        openrnn.from_onnx(str(tmp_path / "none.onnx"))
    with pytest.raises(TypeError, match=r"model must be a path or an onnx.ModelProto, got list"):
        openrnn.from_onnx([])


def test_the_package_is_asked_for():
    program = (
        "import sys, openrnn; sys.modules['onnx'] = None\n"
        "try: openrnn.from_onnx('x.onnx')\n"
        "except ImportError as error: print(error)"
    )
    said = forks.python(program).stdout
    assert said.strip().endswith("the package onnx, which is not here: pip install onnx")


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch's, of its own layer
def test_of_an_rnn_of_torch_the_exporter_leaves_no_node():
    model, x = nn.Sequential(nn.RNN(4, 5)).eval(), torch.randn(5, 3, 4)
    with pytest.raises(ValueError, match=r"dynamo=False alone: .* openrnn\.convert\(model\)"):
        openrnn.from_onnx(export(model, {"input": x}, None))
    openrnn.convert(model, quiet=True)
    layer = only(export(model, {"input": x}, None)).layer
    torch.testing.assert_close(layer(x), model(x))
