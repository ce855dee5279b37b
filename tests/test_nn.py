"""The modules as drop-ins: torch.nn runs the same lines beside them, errors and all."""

import copy
import inspect
import io
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import CLIP, ON_CPU, distance, require
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import openrnn
from openrnn import cells
from openrnn.nn import Layer

F64 = torch.float64
KINDS = ["LSTM", "GRU", "RNN"]
CELLS = ["LSTMCell", "GRUCell", "RNNCell"]
CONSTRUCTORS = [
    "LSTM(3, 4)",
    "LSTM(3, 4, 2, False, True, 0.5, True, 2)",
    "LSTM(3, 4, 1, True, False, 0.0, False, 0, 'cpu', torch.float64)",
    "LSTM(input_size=3, hidden_size=4, num_layers=3, dropout=1)",
    "LSTM(3, 4, proj_size=2, bias=False)",
    "GRU(3, 4)",
    "GRU(3, 4, 2, False, True, 0.25, True)",
    "GRU(3, 4, device='cpu', dtype=torch.bfloat16)",
    "RNN(3, 4)",
    "RNN(3, 4, 2, 'relu', False, True, 0.5, True)",
    "RNN(3, 4, nonlinearity='relu', bidirectional=True)",
    "LSTMCell(3, 4)",
    "LSTMCell(3, 4, False, 'cpu', torch.float64)",
    "GRUCell(3, 4, bias=False)",
    "RNNCell(3, 4, True, 'relu')",
    "RNNCell(3, 4, nonlinearity='relu', dtype=torch.float64)",
]
ATTRIBUTES = (
    "input_size hidden_size num_layers bias batch_first dropout bidirectional proj_size mode "
    "nonlinearity training"
).split()


def build(text, seed=0):
    """(torch's, ours) from one constructor and one seed."""
    made = []
    for house in nn, openrnn:
        torch.manual_seed(seed)
        made.append(call(house, text))
    return made


def call(house, text):
    """`LSTM(3, 4)` of torch.nn or of ours."""
    return eval(f"house.{text}", {"house": house, "torch": torch, "F64": F64})


def outcome(function):
    """What a call raises, as type and text, or None."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None


def tensors(result):
    """The tensors of a nested result, in order."""
    if isinstance(result, PackedSequence):
        return [result.data]
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors(part)]


def assert_same(ours, theirs):
    """One structure of shapes and dtypes; float64 to rounding, others as near as their dtype."""
    ours, theirs = tensors(ours), tensors(theirs)
    assert [a.shape for a in ours] == [a.shape for a in theirs]
    assert [a.dtype for a in ours] == [a.dtype for a in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a, b) <= 100 * torch.finfo(a.dtype).eps * max(1, b.abs().max().item())


@pytest.mark.parametrize("text", CONSTRUCTORS)
def test_constructor(text):
    """The same positions, attributes, printed form, parameters and initial numbers."""
    theirs, ours = build(text)
    for name in ATTRIBUTES:
        if hasattr(theirs, name):
            assert getattr(ours, name) == getattr(theirs, name), name
            assert type(getattr(ours, name)) is type(getattr(theirs, name)), name
    assert repr(ours) == repr(theirs)
    wanted, found = theirs.state_dict(), ours.state_dict()
    assert [*found] == [*wanted]
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    if hasattr(theirs, "all_weights"):
        for row, other in zip(ours.all_weights, theirs.all_weights, strict=True):
            assert all(map(torch.equal, row, other))


@pytest.mark.parametrize("text", CONSTRUCTORS)
def test_state_dicts_load_both_ways(text):
    theirs, ours = build(text)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    for source, target in (ours, theirs), (theirs, ours):
        assert str(target.load_state_dict(source.state_dict(), strict=True)) == (
            "<All keys matched successfully>"
        )
        for name, value in source.state_dict().items():
            assert torch.equal(target.state_dict()[name], value)


def test_our_layers_are_not_torchs():
    """Dynamo refuses those by isinstance."""
    for kind in KINDS:
        assert not isinstance(getattr(openrnn, kind)(1, 1), nn.RNNBase)
        assert isinstance(getattr(openrnn, kind)(1, 1), Layer)


WRONG = [
    "LSTM(3, 4, 0)",
    "LSTM(0, 4)",
    "LSTM(3, 0)",
    "LSTM(3, -4)",
    "LSTM('3', 4)",
    "GRU(3, 4.0)",
    "LSTM(3, 4, bias=1)",
    "LSTM(3, 4, batch_first=None)",
    "GRU(3, 4, dropout=2)",
    "GRU(3, 4, dropout=-0.5)",
    "LSTM(3, 4, dropout=True)",
    "LSTM(3, 4, proj_size=-1)",
    "LSTM(3, 4, proj_size=4)",
    "GRU(3, 4, proj_size=2)",
    "RNN(3, 4, proj_size=2)",
    "RNN(3, 4, nonlinearity='gelu')",
    "RNN(3, 4, 1, True)",
]


@pytest.mark.filterwarnings("ignore:dropout option")
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_constructor_raises_what_torch_raises(text):
    theirs, ours = (outcome(lambda: eval(f"house.{text}")) for house in (nn, openrnn))
    assert theirs is not None
    assert ours == theirs


z = torch.zeros
WRONG_CALLS = [
    ("LSTM", lambda layer: layer(z(3))),
    ("LSTM", lambda layer: layer(z(2, 2, 2, 3))),
    ("GRU", lambda layer: layer(z(2, 2, 2, 3))),
    ("RNN", lambda layer: layer(z(3))),
    ("LSTM", lambda layer: layer(z(5, 2, 4))),
    ("LSTM", lambda layer: layer(z(5, 4))),
    ("LSTM", lambda layer: layer(z(5, 2, 3, dtype=F64))),
    ("GRU", lambda layer: layer(z(5, 2, 3, dtype=torch.int64))),
    ("LSTM", lambda layer: layer(z(5, 2, 3), (z(2, 4), z(2, 4)))),
    ("LSTM", lambda layer: layer(z(5, 2, 3), (z(1, 2, 4), z(2, 4)))),
    ("LSTM", lambda layer: layer(z(5, 2, 3), (z(1, 3, 4), z(1, 2, 4)))),
    ("LSTM", lambda layer: layer(z(5, 2, 3), (z(1, 2, 4), z(1, 2, 5)))),
    ("LSTM", lambda layer: layer(z(5, 2, 3), (z(2, 2, 4), z(2, 2, 4)))),
    ("LSTM", lambda layer: layer(z(5, 3), (z(1, 2, 4), z(1, 2, 4)))),
    ("LSTM", lambda layer: layer(z(5, 3), (z(1, 4), z(1, 5)))),
    ("GRU", lambda layer: layer(z(5, 2, 3), z(2, 4))),
    ("GRU", lambda layer: layer(z(5, 3), z(1, 2, 4))),
    ("GRU", lambda layer: layer(z(5, 2, 3), z(1, 3, 4))),
    ("RNN", lambda layer: layer(z(5, 2, 3), z(1, 2, 5))),
    ("GRU", lambda layer: layer(pack_padded_sequence(z(5, 2, 3), [5, 2]), z(1, 3, 4))),
    ("LSTMCell", lambda cell: cell(z(2, 2, 3))),
    ("LSTMCell", lambda cell: cell(z(2, 4))),
    ("LSTMCell", lambda cell: cell(z(2, 3), (z(3, 4), z(3, 4)))),
    ("LSTMCell", lambda cell: cell(z(2, 3), (z(2, 4), z(3, 4)))),
    ("LSTMCell", lambda cell: cell(z(2, 3), (z(2, 5), z(2, 5)))),
    ("LSTMCell", lambda cell: cell(z(3), (z(5), z(4)))),
    ("LSTMCell", lambda cell: cell(z(2, 3), (z(2, 4),))),
    ("LSTMCell", lambda cell: cell(z(2, 3), (z(2, 4),) * 3)),
    ("LSTMCell", lambda cell: cell(z(2, 3), z(2, 4))),
    ("GRUCell", lambda cell: cell(z(2, 2, 3))),
    ("GRUCell", lambda cell: cell(z(2, 3), z(3, 4))),
    ("GRUCell", lambda cell: cell(z(2, 3), z(2, 5))),
    ("RNNCell", lambda cell: cell(z(2, 2, 3))),
    ("RNNCell", lambda cell: cell(z(5))),
]


@pytest.mark.parametrize("place", range(len(WRONG_CALLS)))
def test_a_wrong_call_raises_what_torch_raises(place):
    kind, ask = WRONG_CALLS[place]
    theirs, ours = (outcome(lambda: ask(layer)) for layer in build(f"{kind}(3, 4)"))  # noqa: B023
    assert theirs is not None
    assert ours == theirs


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda o: o(z(5, 2, 3), z(1, 2, 4)), RuntimeError, "LSTM expects 2 states (h, c), got 1"),
        (
            lambda o: openrnn.GRU(3, 4)(z(5, 2, 3), (z(1, 2, 4), z(1, 2, 4))),
            RuntimeError,
            "GRU expects 1 state (h), got 2",
        ),
        (lambda o: o(z(5, 3), lengths=torch.tensor([5])), ValueError, "lengths need a batch"),
        (
            lambda o: o(z(5, 2, 3), lengths=torch.tensor([5, 6])),
            ValueError,
            "lengths must be in [0, 5], got values from 5 to 6",
        ),
        (
            lambda o: o(z(5, 2, 3), lengths=torch.tensor([-1, 5])),
            ValueError,
            "lengths must be in [0, 5], got values from -1 to 5",
        ),
        (
            lambda o: o(z(5, 2, 3), lengths=torch.tensor([5.0, 5.0])),
            ValueError,
            "lengths must be integers of shape (2,), got torch.float32 of shape (2,)",
        ),
        (
            lambda o: o(z(5, 2, 3), lengths=torch.tensor([5])),
            ValueError,
            "lengths must be integers of shape (2,), got torch.int64 of shape (1,)",
        ),
        (
            lambda o: o(z(5, 2, 3), reset=z(2, 5)),
            ValueError,
            "reset must have shape (5, 2) (steps, batch), got (2, 5)",
        ),
        (
            lambda o: o(z(5, 2, 3), reset=z(5, 2), reset_state=(z(1, 2, 4), z(1, 3, 4))),
            ValueError,
            "reset_state must have shape (1, 2, 4), or 1 in place of a size, got (1, 3, 4)",
        ),
        (
            lambda o: o(z(5, 2, 3), reset=z(5, 2), reset_state=(z(1, 2, 4),)),
            ValueError,
            "reset_state needs 2 states, got 1",
        ),
        (
            lambda o: openrnn.RNN(3, 4)(
                z(5, 2, 3), reset=z(5, 2), reset_state=(z(1, 2, 4), z(1, 2, 4))
            ),
            ValueError,
            "reset_state needs 1 state, got 2",
        ),
        (
            lambda o: o(PackedSequence(z(0, 3), torch.zeros(0, dtype=torch.int64))),
            ValueError,
            "batch_sizes of a PackedSequence must have at least one step, got none",
        ),
        (
            lambda o: o(pack_padded_sequence(z(5, 2, 3), [5, 2]), reset=z(5, 2)),
            ValueError,
            "a PackedSequence takes no lengths, reset, return_states or padding_value",
        ),
        (
            lambda o: o(z(5, 2, 3), reset_state=(z(1, 2, 4), z(1, 2, 4))),
            ValueError,
            "reset_state is what reset puts in place: needs reset, got None",
        ),
        (
            lambda o: o(
                pack_padded_sequence(z(5, 2, 3), [5, 2]), reset_state=(z(1, 2, 4), z(1, 2, 4))
            ),
            ValueError,
            "reset_state is what reset puts in place: needs reset, got None",
        ),
        (
            lambda o: o.step(z(2, 3), reset_state=(z(1, 2, 4), z(1, 2, 4))),
            ValueError,
            "reset_state is what reset puts in place: needs reset, got None",
        ),
        (
            lambda o: openrnn.LSTM(3, 4, batch_first=True)(z(5, 2, 3), reset=[[0, 1]]),
            ValueError,
            "reset must have shape (2, 5) (steps, batch), got (2, 1)",
        ),
        (
            lambda o: openrnn.LSTM(3, 4)(z(5, 3), reset=z(5, 1)),
            ValueError,
            "reset must have shape (T,) where the input has no batch, got (5, 1)",
        ),
        (
            lambda o: o(z(5, 2, 3), lengths=[5, 2], padding_value="a"),
            TypeError,
            "padding_value must be a number, got 'a'",
        ),
        (
            lambda o: o(z(5, 2, 3), lengths=[5, 2], padding_value=torch.zeros(2)),
            TypeError,
            "padding_value must be a number, got a Tensor",
        ),
        (
            lambda o: openrnn.LSTM(3, 4).half()(
                z(5, 2, 3).half(), lengths=[5, 2], padding_value=1e9
            ),
            ValueError,
            "padding_value must be at most 65504, as torch.float16 holds, got 1000000000.0",
        ),
        (lambda o: o.step(z(5, 2, 3)), ValueError, "step needs x_t (batch, features)"),
        (
            lambda o: openrnn.LSTM(3, 4, bidirectional=True).step(z(2, 3)),
            ValueError,
            "step needs one direction",
        ),
        (
            lambda o: openrnn.LSTM(3, 4, backend="gpu"),
            ValueError,
            "backend must be auto or one of cpu, ",
        ),
        (
            lambda o: openrnn.LSTM(3, 4, bias=False, bias_mode="input"),
            ValueError,
            "bias=False needs bias_mode 'none' or None, got 'input'",
        ),
        (lambda o: openrnn.LSTM(3, 4, bias_mode="two"), ValueError, "bias_mode must be one of"),
        (lambda o: openrnn.LSTM(3, 4, precision="fp16"), ValueError, "precision must be one of"),
        (lambda o: openrnn.LSTM(3, 4, input_mode="skip"), ValueError, "input_size == hidden_size"),
        (
            lambda o: openrnn.LSTM(3, 4, cell_clip=(1, -1)),
            ValueError,
            "needs low <= high",
        ),
        (
            lambda o: openrnn.LSTM(3, 4, cell_clip=(1, 2, 3)),
            ValueError,
            "cell_clip must be a number or a pair (low, high), got (1, 2, 3)",
        ),
        (lambda o: openrnn.LSTM(3, 4, cell_clip="12"), ValueError, "low, high), got '12'"),
        (lambda o: openrnn.LSTM(3, 4, cell_clip=True), ValueError, "low, high), got True"),
        (lambda o: openrnn.LSTM(3, 4, cell_clip=("a", 1)), ValueError, "got ('a', 1)"),
        (
            lambda o: openrnn.LSTMCell(3.0, 4),
            TypeError,
            "input_size should be of type int, got: float",
        ),
        (lambda o: openrnn.GRUCell(3, -1), ValueError, "hidden_size must not be negative, got -1"),
        (
            lambda o: openrnn.LSTMCell(3, 4)(z(2, 3), (z(2, 4), None)),
            TypeError,
            "LSTMCell: c of hx must be a Tensor, got NoneType",
        ),
        (
            lambda o: openrnn.LSTMCell(3, 4)(z(2, 3), 1),
            TypeError,
            "LSTMCell: hx must be a tuple (h, c), got int",
        ),
        (
            lambda o: openrnn.GRUCell(3, 4)(z(2, 3), (z(2, 4),)),
            TypeError,
            "GRUCell: hx must be a Tensor, got tuple",
        ),
        (
            lambda o: openrnn.RNNCell(3, 4)(z(2, 3), 0.0),
            TypeError,
            "RNNCell: hx must be a Tensor, got float",
        ),
        (lambda o: openrnn.GRU(3, 4, cell_clip=1.0), ValueError, "cell_clip needs a cell that"),
        (lambda o: openrnn.Recurrent("lstm", 3, 4), TypeError, "made by openrnn.cell, got str"),
    ],
)
def test_errors_beyond_torch(ask, error, text):
    with pytest.raises(error, match=re.escape(text)):
        ask(openrnn.LSTM(3, 4))


@pytest.mark.parametrize("text", ["LSTM(3, 4, dropout=0.5)", "GRU(3, 4, 1, dropout=1.0)"])
def test_the_dropout_warning(text):
    """Torch's text, shown at the user's line."""
    caught = []
    for house in nn, openrnn:
        with pytest.warns(UserWarning, match="dropout option") as found:
            call(house, text)
        caught.append(found)
    assert [str(one.message) for one in caught[0]] == [str(one.message) for one in caught[1]]


@pytest.mark.parametrize("layout", ["time", "batch", "unbatched", "packed", "packed_sorted"])
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind, states, layout):
    """Each way to pass a sequence gives torch's shapes and numbers, gradients of parameters too."""
    proj = ", proj_size=2" if kind == "LSTM" else ""
    first = layout in ("batch", "packed")
    theirs, ours = build(
        f"{kind}(3, 4, 2, bidirectional=True, batch_first={first}, dtype=F64{proj})"
    )
    rows = () if layout == "unbatched" else (5,)
    x = torch.randn(5, 6, 3, dtype=F64) if first else torch.randn(6, *rows, 3, dtype=F64)
    if "packed" in layout:
        lengths = [6, 5, 5, 2, 1] if layout == "packed_sorted" else torch.tensor([5, 1, 6, 2, 5])
        x = pack_padded_sequence(x, lengths, first, enforce_sorted=layout == "packed_sorted")
    hx = torch.randn(4, *rows, 2 if proj else 4, dtype=F64)
    hx = (hx, torch.randn(4, *rows, 4, dtype=F64)) if kind == "LSTM" else hx
    results = [layer(x, hx) if states else layer(x) for layer in (ours, theirs)]
    assert type(results[0]) is type(results[1])
    assert type(results[0][1]) is type(results[1][1])
    assert_same(*results)
    for (y, _), layer in zip(results, (ours, theirs)):
        (y.data if "packed" in layout else y).sin().sum().backward()
        del layer
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
        assert distance(a.grad, b.grad) <= 1e-12 * max(1, b.grad.abs().max().item()), name


def test_a_packed_sequence_comes_back_packed():
    """The same order and batch sizes, whether sorted by us or by the caller."""
    sequences = [torch.randn(n, 3) for n in (2, 5, 3)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    theirs, ours = build("GRU(3, 4)")
    (y, h_n), (wanted, _) = ours(packed), theirs(packed)
    for name in "batch_sizes", "sorted_indices", "unsorted_indices":
        assert torch.equal(getattr(y, name), getattr(wanted, name))
    padded, lengths = pad_packed_sequence(y)
    assert lengths.tolist() == [2, 5, 3]
    for place, sequence in enumerate(sequences):
        alone, last = ours(sequence)
        assert_same([padded[: len(sequence), place], h_n[:, place]], [alone, last])


@pytest.mark.parametrize("kind", [*KINDS, "peephole"])
def test_extras_in_every_layout(kind):
    """lengths, reset and return_states follow batch_first; unbatched resets are one row."""
    options = {"num_layers": 2, "bidirectional": True, "dtype": F64}

    def make(**more):
        torch.manual_seed(0)
        if kind == "peephole":
            return openrnn.Recurrent(cells.peephole_lstm, 3, 4, **options, **more)
        return getattr(openrnn, kind)(3, 4, **options, **more)

    time, batch = make(), make(batch_first=True)
    x, lengths = torch.randn(6, 2, 3, dtype=F64), torch.tensor([6, 4])
    reset = torch.rand(6, 2) < 0.4
    y, finals, every = time(x, lengths=lengths, reset=reset, return_states=True)
    y2, finals2, every2 = batch(
        x.transpose(0, 1), lengths=lengths, reset=reset.T, return_states=True
    )
    assert torch.equal(y2.transpose(0, 1), y)
    assert all(map(torch.equal, tensors(finals2), tensors(finals)))
    assert [a.shape for a in tensors(every)] == [(4, 6, 2, 4)] * len(tensors(every))
    for a, b in zip(tensors(every2), tensors(every), strict=True):
        assert torch.equal(a.transpose(1, 2), b)
    alone, last, history = time(x[:, 0], reset=reset[:, 0], return_states=True)
    assert_same(alone, y[:, 0])
    for a, b in zip(tensors(last), tensors(finals), strict=True):
        assert_same(a, b[:, 0])
    for a, b in zip(tensors(history), tensors(every), strict=True):
        assert_same(a, b[:, :, 0])


def test_reset_state_is_expanded():
    """A learned (L*D, 1, H) start serves every row and gets the gradient of all."""
    layer = openrnn.LSTM(3, 4, dtype=F64)
    learned = [torch.randn(1, 1, 4, dtype=F64, requires_grad=True) for _ in range(2)]
    x, reset = torch.randn(5, 2, 3, dtype=F64), torch.rand(5, 2) < 0.5
    wide = [state.detach().expand(1, 2, 4).clone().requires_grad_() for state in learned]
    for states in learned, wide:
        layer(x, reset=reset, reset_state=states)[0].sin().sum().backward()
    for one, two in zip(learned, wide):
        assert distance(one.grad, two.grad.sum(1, keepdim=True)) < 1e-14
        assert one.grad.any()


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("kind", KINDS)
def test_step_is_forward(kind, backend):
    """Stepwise, batched and not, with a reset on the way."""
    require(backend)
    layer = getattr(openrnn, kind)(3, 4, 2, dtype=F64, backend=backend)
    x, reset = torch.randn(6, 2, 3, dtype=F64), torch.zeros(6, 2, dtype=torch.bool)
    reset[3, 1] = True
    y, finals = layer(x, reset=reset)
    state, alone = None, None
    for x_t, y_t, mask in zip(x, y, reset):
        out, state = layer.step(x_t, state, reset=mask if mask.any() else None)
        assert_same(out, y_t)
        single, alone = layer.step(x_t[0], alone)
        assert_same(single, y_t[0])
    assert_same(state, finals)
    for a, b in zip(tensors(alone), tensors(finals), strict=True):
        assert_same(a, b[:, 0])


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_step_takes_a_reset_state(kind, batched):
    """Where the mask is set, the step starts from reset_state; elsewhere from the state given."""
    layer = getattr(openrnn, kind)(3, 4, 2, dtype=F64)
    count, rows = len(layer.cell.states), (2,) if batched else ()
    x, states = torch.randn(*rows, 3, dtype=F64), torch.randn(2, count, 2, *rows, 4, dtype=F64)
    start, fresh = (pair[0] if count == 1 else tuple(pair) for pair in states)
    one, other = layer.step(x, start), layer.step(x, fresh)
    masks = [[0, 0], [1, 1], [0, 1]] if batched else [[0], [1]]
    for mask in masks:
        found = tensors(layer.step(x, start, reset=torch.tensor(mask), reset_state=fresh))
        for got, a, b in zip(found, tensors(one), tensors(other), strict=True):
            row = torch.tensor(mask if batched else mask[0], dtype=torch.bool)
            assert_same(got, torch.where(row[:, None] if batched else row, b, a))


def test_a_reset_may_be_a_list():
    for options in {}, {"batch_first": True}:
        layer, mask = openrnn.LSTM(3, 4, **options), torch.tensor([[0, 1], [1, 0]])
        x = torch.randn(2, 2, 3)
        assert_same(layer(x, reset=mask.tolist()), layer(x, reset=mask))
        assert_same(layer(x[0], reset=[0, 1]), layer(x[0], reset=mask[0]))
    assert_same(layer.step(x[0], reset=[0, 1]), layer.step(x[0], reset=mask[0]))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("text", [t for t in CONSTRUCTORS if "Cell" in t] + ["RNNCell(3, 4)"])
def test_cells(text, states, batched):
    """One step as torch.nn's, gradients included."""
    theirs, ours = build(text)
    dtype, rows = ours.weight_ih.dtype, (2,) if batched else ()
    x, h, c = (torch.randn(*rows, n, dtype=dtype) for n in (3, 4, 4))
    found = []
    for cell in ours, theirs:
        leaf = x.clone().requires_grad_()
        result = cell(leaf, *([(h, c) if "LSTM" in text else h] if states else []))
        grads = torch.autograd.grad(
            sum(part.sin().sum() for part in tensors(result)), [leaf, *cell.parameters()]
        )
        found.append([*tensors(result), *grads])
    assert_same(*found)


@pytest.mark.parametrize(("inputs", "mode"), [(3, "linear"), (4, "skip"), (16, "gates")], ids=str)
def test_a_layer_is_its_cell_over_time(inputs, mode):
    layer, cell = (
        kind(inputs, 4, dtype=F64, input_mode=mode) for kind in (openrnn.LSTM, openrnn.LSTMCell)
    )
    cell.load_state_dict({n.removesuffix("_l0"): v for n, v in layer.state_dict().items()})
    x, state = torch.randn(5, 2, inputs, dtype=F64), None
    y, _ = layer(x)
    for x_t, y_t in zip(x, y):
        state = cell(x_t, state)
        assert_same(state[0], y_t)


ALIKE = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "whole": lambda layer: _saved(layer, weights_only=False),
}


def _saved(what, **options):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("how", ALIKE)
@pytest.mark.parametrize("kind", [*KINDS, *CELLS, "Recurrent"])
def test_copies(kind, how):
    """A copy has the same settings and numbers, and parameters of its own."""
    x = torch.randn(2, 3)
    if kind == "Recurrent":
        layer = openrnn.Recurrent(cells.coupled_lstm, 3, 4, cell_clip=CLIP)
    else:
        layer = getattr(openrnn, kind)(3, 4)
    copied = ALIKE[how](layer)
    assert repr(copied) == repr(layer)
    assert all(map(torch.equal, tensors(copied(x)), tensors(layer(x))))
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert next(layer.parameters()).any()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_only(kind):
    """torch.save of a state dict, safely loaded, into ours and torch's."""
    theirs, ours = build(f"{kind}(3, 4, 2)")
    state = _saved(ours.state_dict(), weights_only=True)
    theirs.load_state_dict(state)
    assert all(map(torch.equal, theirs.state_dict().values(), ours.state_dict().values()))


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_meta_device(kind):
    """Built without memory, shapes answered, then filled in place."""
    layer = getattr(openrnn, kind)(3, 4, device="meta")
    result = layer(torch.zeros(5, 3, device="meta"))
    assert {tensor.device.type for tensor in tensors(result)} == {"meta"}
    with torch.device("meta"):
        assert next(getattr(openrnn, kind)(3, 4).parameters()).is_meta
    real = layer.to_empty(device="cpu")
    torch.manual_seed(0)
    real.reset_parameters()
    torch.manual_seed(0)
    wanted = getattr(nn, kind)(3, 4)
    assert_same(real(torch.ones(5, 3)), wanted(torch.ones(5, 3)))


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_skip_init(kind):
    layer = nn.utils.skip_init(getattr(openrnn, kind), 3, 4)
    assert not any(parameter.is_meta for parameter in layer.parameters())
    assert next(layer.parameters()).isnan().all(), "poisoned memory, not drawn"


@pytest.mark.parametrize("kind", ["LSTM", "RNN", "LSTMCell", "RNNCell"])
def test_signatures(kind):
    """What an editor shows, in torch's order."""
    names = [*inspect.signature(getattr(openrnn, kind)).parameters]
    wanted = "input_size hidden_size num_layers bias batch_first dropout bidirectional proj_size"
    if kind.startswith("RNN"):
        wanted = wanted.replace("layers", "layers nonlinearity")
    if "Cell" in kind:
        wanted = "input_size hidden_size bias" + (" nonlinearity" if kind == "RNNCell" else "")
    assert names[: len(wanted.split())] == wanted.split()
    assert "device" in names
    assert "self" not in names
    assert "cell" not in names


def test_moves_and_casts():
    layer = openrnn.LSTM(3, 4)
    assert layer.double()(torch.zeros(5, 2, 3, dtype=F64))[0].dtype == F64
    assert layer.to(torch.bfloat16)(torch.zeros(5, 2, 3).bfloat16())[0].dtype == torch.bfloat16
    assert layer.half()(torch.zeros(5, 2, 3).half())[0].dtype == torch.half


def both(text):
    """Torch's and ours in float64 with the same parameters."""
    return build(text[:-1] + ", dtype=F64)")


def both_trained(pair, steps=3):
    """Losses and gradients of some optimizer steps of each."""
    x = torch.randn(5, 2, 3, dtype=F64, generator=torch.Generator().manual_seed(3))
    traces = []
    for layer in pair:
        optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.5)
        trace = []
        for _ in range(steps):
            loss = layer(x)[0].square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        traces.append([*trace, *(p.detach() for p in layer.parameters())])
    assert traces[0][0] != traces[0][-1 - len([*pair[0].parameters()])], "it learns"
    return traces


@pytest.mark.parametrize("name", ["weight_hh_l0", "weight_ih_l1", "bias_hh_l0"])
def test_parametrized_weights(name):
    """pytorch#39311: spectral and weight norm through torch.nn.utils.parametrize."""
    pair = both("LSTM(3, 4, 2)")
    for layer in pair:
        torch.manual_seed(1)
        how = parametrizations.weight_norm
        how(layer, name, **({"dim": None} if "bias" in name else {}))
        assert parametrize.is_parametrized(layer, name)
    assert_same(*both_trained(pair))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_old_weight_norm():
    """pytorch#86457: a weight that is a plain attribute, computed by a hook before each call."""
    pair = both("GRU(3, 4)")
    for layer in pair:
        nn.utils.weight_norm(layer, "weight_hh_l0")
        assert "weight_hh_l0" not in layer._parameters
    assert_same(*both_trained(pair))


class Square(nn.Module):
    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * weight


def test_a_parametrization_runs_once_a_call():
    """It may count, or draw: a mask drawn twice would not be the mask that is differentiated."""
    layer = openrnn.LSTM(3, 4)
    square = Square()
    parametrize.register_parametrization(layer, "weight_ih_l0", square)
    square.calls = 0
    layer(torch.zeros(5, 2, 3))
    assert square.calls == 1


def test_tied_weights():
    """One Parameter in two places gets the sum of two gradients."""
    pair = both("GRU(4, 4, 2)")
    for layer in pair:
        layer.weight_hh_l1 = layer.weight_hh_l0
        layer.weight_ih_l1 = layer.weight_hh_l0
        assert len([*layer.parameters()]) == 6
    x = torch.randn(5, 2, 4, dtype=F64)
    for layer in pair:
        layer(x)[0].sin().sum().backward()
    assert_same([p.grad for p in pair[1].parameters()], [p.grad for p in pair[0].parameters()])


def test_frozen_weights_stay():
    pair = both("LSTM(3, 4, 2, bidirectional=True)")
    for layer in pair:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("l1" in name and "bias" not in name)
    assert_same(*both_trained(pair))
    assert pair[1].weight_ih_l0.grad is None


def test_replaced_parameters_are_seen():
    """Assigned, swapped through .data, changed in place: the next call reads what is there."""
    layer, x = openrnn.LSTM(3, 4, dtype=F64), torch.randn(5, 2, 3, dtype=F64)
    for change in (
        lambda: layer.weight_ih_l0.data.mul_(2),
        lambda: setattr(layer.weight_hh_l0, "data", torch.randn(16, 4, dtype=F64)),
        lambda: setattr(layer, "bias_ih_l0", nn.Parameter(torch.randn(16, dtype=F64))),
        lambda: nn.init.ones_(layer.bias_hh_l0),
    ):
        before = layer(x)[0]
        change()
        theirs = nn.LSTM(3, 4, dtype=F64)
        theirs.load_state_dict(layer.state_dict())
        assert_same(layer(x), theirs(x))
        assert distance(layer(x)[0], before) > 1e-3


def test_functional_call():
    """pytorch#90500: other parameters for one call, with their gradients."""
    layer, x = openrnn.LSTM(3, 4, dtype=F64), torch.randn(5, 2, 3, dtype=F64)
    other = {n: torch.randn_like(p).requires_grad_() for n, p in layer.named_parameters()}
    y = functional_call(layer, other, (x,))[0]
    y.sum().backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
    theirs = nn.LSTM(3, 4, dtype=F64)
    theirs.load_state_dict(other)
    wanted = theirs(x)[0]
    wanted.sum().backward()
    assert_same(
        [y, *(v.grad for v in other.values())], [wanted, *(p.grad for p in theirs.parameters())]
    )


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_autocast(kind):
    """bfloat16 on a CPU: outputs and numbers of a bfloat16 layer, gradients in float32."""
    layer = getattr(openrnn, kind)(3, 4)
    lower = copy.deepcopy(layer).bfloat16()
    x = torch.randn(2, 3)
    for given in x, x.bfloat16():
        with torch.autocast("cpu", torch.bfloat16):
            result = layer(given)
            again = layer(given, result[1] if kind in KINDS else result)
        assert {tensor.dtype for tensor in tensors((result, again))} == {torch.bfloat16}
        assert all(map(torch.equal, tensors(result), tensors(lower(x.bfloat16()))))
    tensors(result)[0].sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


def test_autocast_leaves_float64_alone():
    layer = openrnn.LSTM(3, 4, dtype=F64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(5, 2, 3, dtype=F64))[0].dtype == F64


def test_flatten_parameters_does_nothing_on_a_cpu():
    layer = openrnn.LSTM(3, 4)
    places = [parameter.data_ptr() for parameter in layer.parameters()]
    assert layer.flatten_parameters() is None
    assert [parameter.data_ptr() for parameter in layer.parameters()] == places


def test_dropout_may_be_changed_later():
    layer = openrnn.LSTM(3, 4, 2)
    x = torch.ones(5, 2, 3)
    assert torch.equal(layer(x)[0], layer(x)[0])
    layer.dropout = 0.5
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], layer(x)[0])


def test_a_generator_of_ones_own():
    """The same seed, the same masks; torch's own generator is not touched."""
    layer, x = openrnn.LSTM(3, 4, 2, dropout=0.5), torch.ones(5, 2, 3)
    before = torch.get_rng_state()
    first, second, other = (
        layer(x, generator=torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", ["double", "input", "recurrent", "none"])
def test_bias_modes_by_name(mode):
    layer = openrnn.GRU(3, 4, bias_mode=mode)
    names = {name for name, _ in layer.named_parameters()}
    assert ("bias_ih_l0" in names) == (mode in ("double", "input"))
    assert ("bias_hh_l0" in names) == (mode in ("double", "recurrent"))
    assert layer.bias == (mode != "none")
    assert (f"bias_mode='{mode}'" in repr(layer)) == (mode in ("input", "recurrent"))


def test_what_is_ours_is_printed():
    layer = openrnn.LSTM(
        4, 4, backend="reference", input_mode="skip", cell_clip=2, precision="ieee"
    )
    assert repr(layer) == (
        "LSTM(4, 4, backend=reference, input_mode='skip', cell_clip=(-2.0, 2.0), precision='ieee')"
    )
    assert "weight_ih_l0" not in layer.state_dict()
    assert repr(openrnn.Recurrent(cells.mgu, 3, 4)) == "Recurrent(mgu, 3, 4)"


@pytest.mark.parametrize(
    "bound", [1, 1.0, np.float32(1), Fraction(1), (-1, 1), [-1.0, np.float64(1)]]
)
def test_cell_clip_is_any_number_or_pair(bound):
    assert openrnn.LSTM(3, 4, cell_clip=bound).spec.cell_clip == (-1.0, 1.0)


def test_recurrent_is_the_named_layers():
    """The same parameters and numbers as LSTM, GRU and RNN; states come as a tuple."""
    x = torch.randn(5, 2, 3)
    for kind, cell in ("LSTM", cells.lstm), ("GRU", cells.gru), ("RNN", cells.rnn_tanh):
        named = getattr(openrnn, kind)(3, 4, 2, batch_first=True, bidirectional=True)
        layer = openrnn.Recurrent(cell, 3, 4, 2, True, True, 0.0, True)
        layer.load_state_dict(named.state_dict())
        (y, states), (wanted, final) = layer(x), named(x)
        assert torch.equal(y, wanted)
        assert isinstance(states, tuple)
        assert all(map(torch.equal, tensors(states), tensors(final)))
        assert_same(layer(x, states)[0], named(x, final)[0])


@pytest.mark.parametrize("batch_first", [False, True])
def test_padding_value(batch_first):
    """Past the end it stands in y, as `pad_packed_sequence` puts it, and passes no gradient."""
    torch.manual_seed(0)
    layer = openrnn.GRU(3, 4, 2, batch_first=batch_first, bidirectional=True)
    x, lengths = torch.randn(5, 5, 3, requires_grad=True), torch.tensor([3, 0, 5, 1, 5])
    plain, final = layer(x, lengths=lengths)
    y, same = layer(x, lengths=lengths, padding_value=-7.5)
    ended = torch.arange(5)[:, None] >= lengths
    ended = ended.T if batch_first else ended
    assert (y[ended] == -7.5).all()
    assert torch.equal(y[~ended], plain[~ended])
    assert torch.equal(same, final)
    weights = torch.randn_like(y)
    (found,) = torch.autograd.grad((y * weights).sum(), x)
    (wanted,) = torch.autograd.grad((plain * weights).sum(), x)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match=r"padding_value 1\.0 needs lengths"):
        layer(x, padding_value=1.0)


@pytest.mark.parametrize("mask", [torch.zeros(2), torch.zeros(3, 1), torch.zeros(1, 3)])
def test_resets_of_a_step_have_a_row_each(mask):
    layer, x = openrnn.LSTM(4, 8), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"reset must have shape \(3,\) \(batch\), got"):
        layer.step(x, reset=mask)
    for alone in (True, [True], torch.tensor(True)):
        assert torch.equal(layer.step(x[0], reset=alone)[0], layer.step(x[0])[0])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_generator_that_is_none(dropout):
    layer = openrnn.LSTM(4, 8, 2, dropout=dropout)
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator, got int"):
        layer(torch.randn(5, 3, 4), generator=3)


@pytest.mark.parametrize(
    "kind", ["LSTM", "GRU", "RNN", "Recurrent", "LSTMCell", "GRUCell", "RNNCell"]
)
def test_arguments_that_do_not_fit_are_refused_in_the_name_of_the_class(kind):
    cell = (openrnn.cells.gru,) * (kind == "Recurrent")
    for args, options, message in (
        ((3, 4), {"hidden": 3}, "unexpected keyword argument 'hidden'"),
        ((3,), {"hiden_size": 3}, "unexpected keyword argument 'hiden_size'"),
        ((3,), {}, "missing .* 'hidden_size'"),
        ((3, 4), {"input_size": 3}, "multiple values for argument 'input_size'"),
    ):
        with pytest.raises(TypeError, match=f"^{kind}(: |.__init__).*{message}"):
            getattr(openrnn, kind)(*cell, *args, **options)
