"""Layers of ours that are also of a class of `torch.nn`, or of a user's class derived from one.

For libraries that ask `isinstance(layer, torch.nn.LSTM)`, and for classes whose methods are wanted.
`torch.compile` breaks the graph at any instance of `torch.nn.LSTM`, `GRU` or `RNN`, so at these. It
would go on in the functions that such a layer calls, which are no part of that instance.
"""

from types import new_class
from typing import Any

from torch import nn

from openrnn.nn import cells, layers
from openrnn.nn.base import Layer
from openrnn.untraced import untraced


class _OnlyModule(nn.Module):
    """Stands before a class of `torch.nn` among the bases, so that nothing of it is inherited."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    __setattr__ = nn.Module.__setattr__
    __setstate__ = nn.Module.__setstate__
    extra_repr = nn.Module.extra_repr
    _apply = nn.Module._apply
    _replicate_for_data_parallel = nn.Module._replicate_for_data_parallel


class _Untraced(Layer):
    """Stands before a layer among the bases: its calls, which compiled code runs as they are."""

    forward = untraced(Layer.forward)
    step = untraced(Layer.step)


class LSTM(_Untraced, layers.LSTM, _OnlyModule, nn.LSTM):  # type: ignore[misc, override]  # ours counts
    """`openrnn.LSTM` that is a `torch.nn.LSTM` to `isinstance`."""


class GRU(_Untraced, layers.GRU, _OnlyModule, nn.GRU):  # type: ignore[misc, override]
    """`openrnn.GRU` that is a `torch.nn.GRU` to `isinstance`."""


class RNN(_Untraced, layers.RNN, _OnlyModule, nn.RNN):  # type: ignore[misc, override]
    """`openrnn.RNN` that is a `torch.nn.RNN` to `isinstance`."""


class LSTMCell(cells.LSTMCell, _OnlyModule, nn.LSTMCell):
    """`openrnn.LSTMCell` that is a `torch.nn.LSTMCell` to `isinstance`."""


class GRUCell(cells.GRUCell, _OnlyModule, nn.GRUCell):
    """`openrnn.GRUCell` that is a `torch.nn.GRUCell` to `isinstance`."""


class RNNCell(cells.RNNCell, _OnlyModule, nn.RNNCell):
    """`openrnn.RNNCell` that is a `torch.nn.RNNCell` to `isinstance`."""


# by the class of torch.nn
SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
}


def derive(kind: type[nn.Module]) -> type[nn.Module]:
    """A user's class derived from one of `torch.nn`, with our code in place of torch's.

    Its methods stay in front, and what they ask `super()` for is ours.
    """
    ours = SUBCLASSES[next(base for base in SUBCLASSES if issubclass(kind, base))]
    for made in kind.__subclasses__():
        if origin(made) is kind:
            return made
    names = {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
        "__reduce__": _reduce, "_origin": kind,
    }  # fmt: skip
    return new_class(kind.__name__, (kind, ours), exec_body=lambda space: space.update(names))


def origin(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The user's class that a class was derived from, if it was."""
    found: type[nn.Module] | None = vars(kind).get("_origin")
    return found


def _reduce(module: Any) -> tuple[Any, ...]:
    """How such a module is pickled: by the class of the user, which can be imported."""
    return _blank, (module._origin,), module.__getstate__()


def _blank(kind: type[nn.Module]) -> nn.Module:
    made = derive(kind)
    return made.__new__(made)
