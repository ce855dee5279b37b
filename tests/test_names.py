"""Names of cells, how a cell reads them, what a compiler and a checkpoint make of both."""

import io
import itertools
import pickle

import pytest
import torch
from cases import ON_CPU, require, thinned
from test_backends import idle

import openrnn
from openrnn import cells
from openrnn.errors import CellError
from openrnn.spec import Spec


def plain(x, r, s):
    return torch.tanh(x.a + r.a)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"gates": "a __class__"}, "must not be words of Python itself, got '__class__'"),
        ({"gates": ["a", "b c"]}, "must be distinct identifiers"),
        ({"gates": ["a", "b,c"]}, "must be distinct identifiers"),
        ({"gates": "a ﬁ"}, "must be in Unicode's form NFKC, got 'ﬁ'"),
    ],
)
def test_names_that_are_refused(names, message):
    with pytest.raises(CellError, match=message):
        openrnn.cell(**names)


@pytest.mark.parametrize("name", [3, "two words", "line\nend", "null\0"])
def test_names_of_cells_that_are_refused(name):
    with pytest.raises(CellError, match="the name of a cell must be one word, got "):
        openrnn.cell(gates="a", name=name)(plain)


@pytest.mark.parametrize("name", ["a=b", "a,b", '"""+x+"""', "ünit", "../../up", "lstm@2"])
def test_a_name_crosses_an_operator(name):
    made = openrnn.cell(gates="a ü", name=name)(plain)
    spec = made.spec(3, 4)
    assert Spec.parse(str(spec)) == spec
    assert cells.lookup(Spec.parse(str(spec)).cell) is made


@pytest.mark.parametrize(
    ("cell", "backend"),
    thinned(itertools.product([cells.gru_reset_before, cells.lstm], ["aot_eager", "eager"]), 4),
    ids=lambda value: getattr(value, "key", value),
)
def test_the_reference_is_one_graph(cell, backend):
    """Forward and gradients are those of an eager call, without a warning."""
    torch.compiler.reset()
    layer, x = openrnn.Recurrent(cell, 3, 4, backend="reference"), torch.randn(2, 2, 3)
    wanted = torch.autograd.grad(layer(x)[0].sum(), layer.parameters())
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(x)[0].sum(), layer.parameters())
    assert torch.allclose(compiled(x)[0], layer(x)[0])
    assert all(torch.allclose(ours, theirs) for ours, theirs in zip(found, wanted))


@pytest.mark.parametrize(
    "made",
    [openrnn.LSTM(3, 4), openrnn.Recurrent(cells.slstm, 3, 4), openrnn.GRUCell(3, 4)],
    ids=lambda made: type(made).__name__,
)
def test_a_layer_is_read_where_only_weights_are_allowed(made):
    """Its class alone is to be allowed, as one of torch.nn."""
    file = io.BytesIO()
    torch.save(made, file)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(file.getvalue())) == [
        f"{type(made).__module__}.{type(made).__name__}"
    ]
    file.seek(0)
    with torch.serialization.safe_globals([type(made)]):
        again = torch.load(file, weights_only=True)
    assert again.cell is made.cell
    x = (
        torch.ones(1, 1, 3)
        if isinstance(made, openrnn.Recurrent | openrnn.LSTM)
        else torch.ones(1, 3)
    )
    assert str(again._spec) == str(made._spec)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), made.parameters()))
    assert type(again(x)) is type(made(x))


def test_a_spec_of_a_pickle_is_checked():
    spec = cells.lstm.spec(3, 4, num_layers=2)
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(ValueError, match="num_layers must be greater than zero"):
        pickle.loads(pickle.dumps(spec).replace(b"num_layers=2", b"num_layers=0"))


@pytest.mark.parametrize("steps", [2, 0])
@pytest.mark.parametrize("backend", ON_CPU)
def test_what_an_output_does_not_depend_on_has_a_gradient_of_zeros(backend, steps):
    """On every backend, where the cell never reads x and where no step is made."""
    require(backend)
    layer = openrnn.Recurrent(idle, 2, 3, backend=backend)
    x = torch.ones(steps, 1, 2, requires_grad=True)
    h0 = [torch.ones(1, 1, 3, requires_grad=True) for _ in idle.states]
    y, states = layer(x, tuple(h0))
    (y.sum() + 0.0 * states[1].sum()).backward()
    for name, tensor in (("x", x), *zip(idle.states, h0), *layer.named_parameters()):
        assert tensor.grad is not None, name
    assert not layer.weight_ih_l0.grad.any()
    assert not x.grad.any()
    assert bool(layer.weight_hh_l0.grad.any()) == (steps > 0)


@pytest.mark.parametrize("state", range(4))
def test_one_final_state_alone(state):
    """As others do, the reference gives every gradient, whatever the loss is of."""
    layer = openrnn.Recurrent(cells.slstm, 2, 3, backend="reference")
    initial = [torch.ones(1, 1, 3, requires_grad=True) for _ in range(4)]
    _, states = layer(torch.ones(2, 1, 2), tuple(initial))
    states[state].sum().backward()
    assert all(tensor.grad is not None for tensor in (*initial, *layer.parameters()))
