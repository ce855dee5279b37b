"""ONNX in: nodes with other activations and with `clip`, as cells made for them."""

import copy

import pytest
import torch
from onnx_models import MARKS, assert_close
from test_onnx_in import X, arrays_of, as_onnx, model_of, only, runtime

import openrnn
from openrnn import cells, memo
from openrnn.onnx.activations import KINDS, activations

pytestmark = MARKS
HARD = {"activation_alpha": [0.25], "activation_beta": [0.4]}
NODES = {
    "LSTM-clip": {"clip": 0.4},
    "LSTM-P-clip": {"clip": 0.4},
    "LSTM-coupled-clip": {"clip": 0.4, "input_forget": 1},
    "LSTM-P-coupled": {"input_forget": 1},
    "LSTM-hard": {"activations": ["hardsigmoid", "Relu", "Softsign"], **HARD},
    "LSTM-P-hard": {"activations": ["HardSigmoid", "Tanh", "Elu"], **HARD, "clip": 0.7},
    "GRU-after-clip": {"linear_before_reset": 1, "clip": 0.4},
    "GRU-after-hard": {
        "linear_before_reset": 1,
        "activations": ["HardSigmoid", "Softplus"],
        "clip": 0.7,
    },
    "RNN-clip": {"clip": 0.4},
    "RNN-relu-clip": {"activations": ["Relu"], "clip": 0.4},
}


def node(name, direction="forward"):
    both = 1 + (direction == "bidirectional")
    options = {
        key: value * both if isinstance(value, list) else value
        for key, value in NODES[name].items()
    }
    kind = "LSTM-P" if name.startswith("LSTM-P") else name.partition("-")[0]
    return model_of(kind, arrays_of(kind, both), direction=direction, **options)


def on_the_reference(model):
    """Its cell as it stands: no kernel is compiled."""
    one = only(model)
    one.layer.backend = "reference"
    return one


@pytest.mark.parametrize("name", NODES)
def test_beside_onnx_runtime(name):
    """Lengths and initial states of several sequences; numbers that a bound of 0.4 reaches."""
    model = node(name)
    assert_close(as_onnx(on_the_reference(model), torch.from_numpy(X)), runtime(model, X=X))


@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_directions(direction):
    """Each of both has alpha and beta of its own in the node."""
    model = node("LSTM-hard", direction)
    assert_close(as_onnx(on_the_reference(model), torch.from_numpy(X)), runtime(model, X=X))


@pytest.mark.parametrize("name", KINDS)
def test_every_activation(name):
    """With numbers of its own; without, where ONNX Runtime and ONNX's text have the same."""
    defaults = KINDS[name].defaults
    ways = [{f"activation_{key}": [0.3] for key in defaults}]
    ways += [{}] if defaults and None not in defaults.values() else []
    for numbers in ways:
        model = model_of("RNN", arrays_of("RNN", 1), activations=[name], **numbers)
        assert_close(as_onnx(on_the_reference(model), torch.from_numpy(X)), runtime(model, X=X))


def test_they_run_by_kernels_and_are_trained():
    """Outputs and gradients of the reference, of a cell whose functions meet at bounds."""
    fast = only(node("GRU-after-hard")).layer
    fast.backend, plain = "cpu", copy.deepcopy(fast)
    plain.backend = "reference"
    found = []
    for layer in (fast, plain):
        x = torch.from_numpy(X).requires_grad_()
        y, states = layer(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        found.append((y, *states, *grads))
    assert_close(*found)


def test_gradients_far_from_zero_are_finite():
    for name, kind in KINDS.items():
        numbers = {f"{key}s": [0.5] for key in kind.defaults}
        (one,) = activations([name], **numbers)
        x = torch.tensor([-1e4, -200.0, 200.0, 1e4], requires_grad=True)
        assert torch.autograd.grad(one.function(x).sum(), x)[0].isfinite().all(), name


def test_alike_nodes_share_a_cell_and_others_do_not():
    first, again, other = (only(node(name)).layer for name in ("LSTM-clip",) * 2 + ("LSTM-hard",))
    assert first.cell is again.cell
    assert first.cell is not other.cell
    assert isinstance(first, openrnn.Recurrent)
    other.load_state_dict(first.state_dict())  # the names are those of an LSTM


def test_a_cell_is_registered_once():
    """Memos are forgotten, and the registry of cells is not."""
    made, count = only(node("LSTM-clip")).layer.cell, len(cells._CELLS)
    memo.clear()
    assert only(node("LSTM-clip")).layer.cell is made
    assert len(cells._CELLS) == count


def test_what_is_refused():
    options = {"direction": "bidirectional", "activations": ["Tanh", "Relu"]}
    with pytest.raises(ValueError, match="must be the same in both directions"):
        openrnn.from_onnx(model_of("RNN", arrays_of("RNN", 2), **options))
    for more in ({"clip": 1.0}, {"activations": ["HardSigmoid", "Tanh"]}):
        with pytest.raises(ValueError, match="a GRU with linear_before_reset=1, got 0"):
            openrnn.from_onnx(model_of("GRU", arrays_of("GRU", 1), **more))
