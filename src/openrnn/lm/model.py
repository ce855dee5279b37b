"""The model: an embedding of bytes, recurrent layers of any cell, a linear layer to bytes."""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn

from openrnn import cells
from openrnn.cells import Cell
from openrnn.errors import CellError
from openrnn.explain import explain
from openrnn.lm.config import Config, own_cell
from openrnn.lm.segments import apart
from openrnn.nn import GRU, LSTM, RNN, Layer, Recurrent

BYTES = 256
State = tuple[Tensor, ...]  # each (L, B, H)
ONE_STATE = (GRU, RNN, nn.GRU, nn.RNN)


class LanguageModel(nn.Module):
    """What the next byte will be, from the bytes so far.

    Shapes:
        x (T, B) int64, state a tuple of (L, B, H) or None for zeros, reset (T, B) bool
        -> logits (T, B, 256), state
    """

    def __init__(self, rnn: Layer | nn.RNNBase, embed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, embed)
        self.rnn = rnn
        self.output = nn.Linear(rnn.hidden_size, BYTES)
        self._cuts: dict[tuple[torch.device, torch.dtype, bool, bool], bool] = {}

    def forward(
        self, x: Tensor, state: State | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Logits and the state after x."""
        embedded = self.embedding(x)
        if isinstance(self.rnn, nn.RNNBase):  # which has no resets: its state runs on across files
            y, state = self.rnn(embedded, self._given(state))
        elif reset is not None and self.cuts(x.device):
            y, state = apart(self._without_resets, embedded, state, reset)
        else:
            y, state = self.rnn(embedded, self._given(state), reset=reset)
        return self.output(y), _as_tuple(state)

    def cuts(self, device: torch.device) -> bool:
        """Whether our layer runs faster in segments between resets than with resets inside.

        So it is where a fast backend has no resets, as cuDNN has none.
        """
        cast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if cast else self.output.weight.dtype
        if isinstance(self.rnn, nn.RNNBase):
            return False
        key = device, dtype, torch.is_grad_enabled(), self.training
        if key not in self._cuts:
            with_resets, without = (
                explain(
                    self.rnn, dtype=dtype, device=device, reset=reset, lengths=not reset, quiet=True
                ).chosen
                for reset in (True, False)
            )
            slow = (None, "reference")
            self._cuts[key] = with_resets in slow and without not in slow
        return self._cuts[key]

    def _without_resets(
        self, x: Tensor, state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        y, state = self.rnn(x, self._given(state), lengths=lengths)
        return y, _as_tuple(state)

    def step(self, x_t: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The same for one byte of each stream: x_t (B,) -> logits (B, 256), state."""
        embedded, given = self.embedding(x_t), self._given(state)
        if isinstance(self.rnn, nn.RNNBase):
            y, state = self.rnn(embedded[None], given)
            return self.output(y[0]), _as_tuple(state)
        y_t, state = self.rnn.step(embedded, given)
        return self.output(y_t), _as_tuple(state)

    def _given(self, state: State | None) -> State | Tensor | None:
        """The state in the form that the layer takes: for GRU and RNN a tensor, not a tuple."""
        return state[0] if state and isinstance(self.rnn, ONE_STATE) else state


def _as_tuple(state: Tensor | State | None) -> State:
    return (state,) if isinstance(state, Tensor) else tuple(state or ())


def build(config: Config) -> LanguageModel:
    """The model of a config, drawn from torch's default generator.

    Raises:
        CellError: there is no such cell.
    """
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    sizes = config.embed, config.hidden, config.layers
    rnn: Layer | nn.RNNBase
    if config.model == "torch":
        rnn = torch_layer(config.cell, *sizes, dropout=config.dropout)
    else:
        rnn = layer(config.cell, *sizes, dropout=config.dropout, backend=config.backend)
    return LanguageModel(rnn, config.embed).to(dtype)


def layer(cell: str, *args: int, **options: object) -> Layer:
    """The public layer of a cell's name."""
    if cell == "lstm":
        return LSTM(*args, **options)
    if cell == "gru":
        return GRU(*args, **options)
    if cell in ("rnn_tanh", "rnn_relu"):
        return RNN(*args, nonlinearity=cell.removeprefix("rnn_"), **options)
    return Recurrent(find(cell), *args, **options)


def torch_layer(cell: str, *args: int, dropout: float) -> nn.RNNBase:
    """torch.nn's layer of a cell's name."""
    if cell in ("lstm", "gru"):
        made: nn.RNNBase = (nn.LSTM if cell == "lstm" else nn.GRU)(*args, dropout=dropout)
        return made
    return nn.RNN(*args, nonlinearity=cell.removeprefix("rnn_"), dropout=dropout)


def find(cell: str) -> Cell:
    """A cell that ships, by its key, or one of the user's, by "path.py:name".

    Raises:
        CellError: there is no such cell, or its file fails.
    """
    if not own_cell(cell):
        if cell.endswith(".py"):
            raise CellError(f"a cell of a file is asked for as path.py:name, got {cell}")
        return cells.lookup(cell)
    file, _, name = cell.rpartition(":")
    if not Path(file).is_file():
        raise CellError(f"the file of the cell {cell} does not exist")
    source = importlib.util.spec_from_file_location(f"openrnn_cell_{Path(file).stem}", file)
    if source is None or source.loader is None:
        raise CellError(f"the file of a cell must end in .py, got {file}")
    module = importlib.util.module_from_spec(source)
    try:
        source.loader.exec_module(module)
    except Exception as error:
        raise CellError(f"{file} fails: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, Cell):
        raise CellError(f"{file} has no cell named {name!r}: make one with @openrnn.cell")
    return found
