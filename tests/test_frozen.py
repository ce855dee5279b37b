"""What a cell captured at its first call is the same on every way through it, later, too."""

import forks
import pytest
import torch

import openrnn
from openrnn.frozen import frozen

SCALE, WORDS = 0.5, {"scale": 0.5}


def helper(a):
    return SCALE * torch.tanh(a)


def by_global(x, r, s):
    return SCALE * torch.tanh(x.a + r.a)


def by_helper(x, r, s):
    return helper(x.a + r.a)


def by_inner(x, r, s):
    def inner(a):
        return helper(a)

    return inner(x.a + r.a)


def by_dict(x, r, s):
    return WORDS["scale"] * torch.tanh(x.a + r.a)


def closure():
    scale = 0.5

    def change():
        nonlocal scale
        scale = 2.0

    def function(x, r, s):
        return scale * torch.tanh(x.a + r.a)

    return function, change


@pytest.mark.parametrize("function", [by_global, by_helper, by_inner, by_dict, "closure"])
def test_numbers_that_change_later_change_nothing(monkeypatch, function):
    """Kernels, the reference, second derivatives and transforms keep those of the first call."""
    change = None
    if function == "closure":
        function, change = closure()
    layer = openrnn.Recurrent(openrnn.cell(gates="a")(function), 4, 8)
    x = torch.randn(2, 3, 4, requires_grad=True)
    y, gradient = layer(x)[0], None
    gradient = torch.autograd.grad(y.sum(), x)[0]
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    monkeypatch.setitem(WORDS, "scale", 2.0)
    if change is not None:
        change()
    for backend in ("auto", "reference"):
        layer.backend = backend
        torch.testing.assert_close(layer(x)[0], y)
        for graph in (False, True):
            (found,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=graph)
            torch.testing.assert_close(found.detach(), gradient)
    torch.testing.assert_close(torch.func.functionalize(lambda x: layer(x)[0])(x), y)


def test_a_function_that_assigns_or_grows_what_it_captures_is_left_alone():
    calls, count = [], 0

    def counts(x, r, s):
        nonlocal count
        count += 1
        return x.a

    def appends(x, r, s):
        calls.append(1)
        return x.a

    def adds(x, r, s):
        several[0] += 1
        return x.a

    def sums(x, r, s):
        total = 0.0

        def add(value):
            nonlocal total
            total += SCALE * value

        add(x.a)
        return total

    assert frozen(counts) is counts
    one, several = type("Gates", (), {"a": 1.0}), [0]
    frozen(appends)(one, one, one)
    frozen(adds)(one, one, one)
    assert (calls, several) == ([1], [1])
    assert frozen(sums) is not sums  # what it assigns to is its own
    assert frozen(sums)(one, one, one) == SCALE


def test_a_captured_tensor_is_read_anew():
    gain = torch.tensor(1.0)

    def function(x, r, s):
        return gain * x.a

    assert frozen(function) is function


def test_a_first_call_that_fails_may_be_repaired(monkeypatch):
    """A helper that is defined, or repaired, in the next cell of a notebook."""
    function = eval("lambda x, r, s: later(x.a + r.a)", scope := {})
    layer = openrnn.Recurrent(openrnn.cell(gates="a", name="notebook")(function), 4, 8)
    layer.backend = "reference"
    with pytest.raises(Exception, match="later"):
        layer(torch.randn(2, 3, 4))
    scope["later"] = torch.tanh
    assert layer(torch.randn(2, 3, 4))[0].shape == (2, 3, 8)


def test_an_attribute_of_a_global_name_keeps_nothing_alive():
    """A cell reads `s.h`; a global h has nothing to do with it."""

    def function(x, r, s):
        return s.a + x.SCALE

    assert "SCALE" not in frozen(function).__globals__


PROGRAM = """
import torch, openrnn

@openrnn.cell(gates="f n", states="h")
def minimal(x, r, s):
    f = torch.sigmoid(x.f + r.f)
    return (1 - f) * s.h + f * torch.tanh(x.n + r.n)

layers = [openrnn.Recurrent(minimal, 4, 8, backend="reference")]
layers += [kind(4, 8, backend="reference") for kind in (openrnn.LSTM, openrnn.GRU, openrnn.RNN)]
for layer in layers:
    compiled = torch.compile(layer, fullgraph=True)
    assert compiled(torch.randn(5, 3, 4))[0].shape == (5, 3, 8)
"""


def test_the_reference_compiles_whole_before_any_call():
    """In one graph, also of a cell of a user's."""
    ran = forks.python(PROGRAM)
    assert ran.returncode == 0, ran.stderr


def test_recursion_and_names_bound_later():
    def even(n):
        return n == 0 or odd(n - 1)

    assert frozen(even) is even  # `odd` has no value yet

    def odd(n):
        return n != 0 and even(n - 1)

    assert frozen(even)(4)
    assert not frozen(even)(3)
    assert frozen(len) is len
    assert frozen(torch.tanh) is torch.tanh
