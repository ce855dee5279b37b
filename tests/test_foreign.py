"""Layers and one-step modules inside `torch.fx`, `torch.jit.script` and `torch.overrides`."""

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

import openrnn


class Model(nn.Module):
    """Layers and one-step modules as people combine them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.lstm = openrnn.LSTM(4, 5, 2, batch_first=True, backend="reference")
        self.inner = nn.Sequential(openrnn.RNN(5, 3, backend="reference"))
        self.cell = openrnn.LSTMCell(3, 3, backend="reference")
        self.last = openrnn.GRUCell(3, 2, backend="reference")

    def forward(self, tokens, lengths, start):
        y, (h, _) = self.lstm(self.embed(tokens), lengths=lengths)
        y, _ = self.inner(y)
        state = self.cell(y[0], start)
        a, _ = self.cell(y[1], state)
        return self.last(a), h


def test_fx_sees_a_layer_as_one_node():
    torch.manual_seed(0)
    model = Model()
    traced = fx.symbolic_trace(model)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["embed", "lstm", "inner.0", "cell", "cell", "last"]
    inputs = (
        torch.randint(9, (2, 3)),
        torch.tensor([3, 1]),
        (torch.randn(3, 3), torch.randn(3, 3)),
    )
    for ours, theirs in zip(traced(*inputs), model(*inputs), strict=True):
        assert torch.equal(ours, theirs)
    traced(*inputs)[0].sum().backward()
    assert model.lstm.weight_ih_l0.grad is not None


@pytest.mark.parametrize(
    "module",
    [openrnn.LSTM(3, 4), openrnn.GRUCell(3, 4), nn.Sequential(openrnn.RNN(3, 4))],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_script_says_what_to_do(module):
    with pytest.raises(NotImplementedError, match=r"use torch.jit.trace or torch.export, or conv"):
        torch.jit.script(module)


class Boxed:
    """An object that is no tensor and answers for torch's functions."""

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def bare(value):
            return value.inner if isinstance(value, Boxed) else value

        return function(*tree_map(bare, args), **tree_map(bare, kwargs or {}))


def test_objects_with_torch_function_are_asked():
    layer, cell, x = openrnn.LSTM(3, 4), openrnn.GRUCell(3, 4), torch.randn(5, 2, 3)
    lengths = torch.tensor([5, 1])
    assert torch.equal(layer(Boxed(x), lengths=Boxed(lengths))[0], layer(x, lengths=lengths)[0])
    h, lstm = torch.ones(2, 4), openrnn.LSTMCell(3, 4)
    assert torch.equal(cell(Boxed(x[0]), h), cell(x[0], h))
    assert torch.equal(cell(x[0], Boxed(h)), cell(x[0], h))
    assert torch.equal(lstm(x[0], (h, Boxed(h)))[1], lstm(x[0], (h, h))[1])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("sizes", [(3, 0), (0, 4), (0, 0), (np.int64(3), np.int32(4))], ids=str)
@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell", "RNNCell"])
def test_cells_without_units_or_inputs_are_torchs(name, sizes):
    ours, theirs = getattr(openrnn, name)(*sizes), getattr(nn, name)(*sizes)
    theirs.load_state_dict(ours.state_dict())
    assert (type(ours.input_size), type(ours.hidden_size)) == (int, int)
    results = []
    for cell in (ours, theirs):
        torch.manual_seed(0)
        x = torch.randn(2, sizes[0], requires_grad=True)
        out = cell(x)
        out = out if isinstance(out, tuple) else (out,)
        sum(state.sum() for state in out).backward()
        results.append([*out, x.grad, *(parameter.grad for parameter in cell.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", [openrnn.LSTM, openrnn.GRU])
def test_a_layer_that_is_the_root_is_refused_in_one_sentence(kind):
    """torch.nn's fails too; ours spoke of a padding value that nobody gave."""
    with pytest.raises(TypeError, match=r"give it a module that has the layer"):
        fx.symbolic_trace(kind(5, 7))
