"""`convert` of modules with attributes that users set: exact, or left with a reason."""

import copy

import pytest
import torch
from torch import nn

import openrnn


def converted(module):
    """What `convert` says of a module, and that of its neighbours, which must be turned."""
    model = nn.ModuleList([nn.LSTM(4, 4), module, nn.GRU(4, 4)])
    first, row, last = openrnn.convert(model, backend="cpu", quiet=True).rows
    assert first.swapped
    assert last.swapped
    return row


def result(module, x):
    found = module(x)
    return found[0] if isinstance(found, tuple) else found


CELL_LACKS = ["num_layers", "proj_size", "batch_first"]
LACKING = {  # names that mean something to other modules
    "LSTM": ["nonlinearity"], "GRU": ["nonlinearity"], "RNNCell": CELL_LACKS,
    "LSTMCell": ["nonlinearity", *CELL_LACKS], "GRUCell": ["nonlinearity", *CELL_LACKS],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in LACKING.items() for name in names]
)
def test_an_attribute_of_another_class_changes_nothing(kind, name):
    module, x = getattr(nn, kind)(4, 6), torch.randn(3, 4)
    assert not hasattr(module, name)
    setattr(module, name, 3)
    want = result(module, x)
    row = converted(module)
    assert torch.allclose(result(module, x), want, atol=1e-6)
    assert getattr(module, name) == 3
    assert row.swapped


def test_an_rnn_is_turned_by_its_mode():
    module, x = nn.RNN(4, 6), torch.randn(5, 3, 4)
    module.nonlinearity = "relu"  # which torch does not read
    want, _ = module(x)
    assert converted(module).swapped
    assert torch.allclose(module(x)[0], want, atol=1e-6)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_a_cell_whose_bias_says_otherwise_is_left(kind):
    module, x = getattr(nn, kind)(4, 6), torch.randn(3, 4)
    module.bias = False  # torch adds the vectors that there are
    want = result(module, x)
    assert "it has bias_ih, though its attribute bias is False" in converted(module).note
    assert torch.equal(result(module, x), want)


def test_sizes_of_no_module_are_left():
    module = nn.GRU(4, 6)
    module.proj_size = 3
    row = converted(module)
    assert not row.swapped
    assert "proj_size argument is only supported for LSTM" in row.note


def test_a_compiled_module_is_left():
    module = nn.LSTM(4, 6)
    module.compile()
    assert "compiled by its method compile" in converted(module).note


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell", "LSTM"])
def test_a_parametrized_module_is_copied_after_calls(kind):
    module, x = getattr(openrnn, kind)(4, 6), torch.randn(3, 4)
    name = "weight_ih_l0" if kind == "LSTM" else "weight_ih"
    nn.utils.parametrizations.weight_norm(module, name)
    with torch.no_grad():
        for _ in range(3):
            want = result(module, x)
        made = copy.deepcopy(module)
        assert torch.equal(result(made, x), want)
        made.parametrizations[name].original0.mul_(2)
        assert not torch.equal(result(made, x), want)
        assert torch.equal(result(module, x), want)
