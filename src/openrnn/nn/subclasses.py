"""Layers of ours that are also of a class of `torch.nn`, or of a user's class derived from one.

For libraries that ask `isinstance(layer, torch.nn.LSTM)`, and for classes whose methods are wanted.
`torch.compile` breaks the graph at any instance of `torch.nn.LSTM`, `GRU` or `RNN`, so at these.
"""

from torch import nn

from openrnn.nn import cells, layers


class _OnlyModule(nn.Module):
    """Stands before a class of `torch.nn` among the bases, so that nothing of it is inherited."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    __setattr__ = nn.Module.__setattr__
    __setstate__ = nn.Module.__setstate__
    extra_repr = nn.Module.extra_repr
    _apply = nn.Module._apply
    _replicate_for_data_parallel = nn.Module._replicate_for_data_parallel


class LSTM(layers.LSTM, _OnlyModule, nn.LSTM):  # type: ignore[misc, override]  # ours counts
    """`openrnn.LSTM` that is a `torch.nn.LSTM` to `isinstance`."""


class GRU(layers.GRU, _OnlyModule, nn.GRU):  # type: ignore[misc, override]
    """`openrnn.GRU` that is a `torch.nn.GRU` to `isinstance`."""


class RNN(layers.RNN, _OnlyModule, nn.RNN):  # type: ignore[misc, override]
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
