"""The model: an embedding of symbols, recurrent layers of any cell, a linear layer to symbols."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from openrnn import cells
from openrnn.cells import Cell
from openrnn.errors import CellError
from openrnn.explain import explain
from openrnn.lm.config import own_cell
from openrnn.lm.segments import apart
from openrnn.nn import GRU, LSTM, RNN, Layer, Recurrent

State = tuple[Tensor, ...]  # each (L, B, H)
Stack = Layer | nn.RNNBase
ONE_STATE = (GRU, RNN, nn.GRU, nn.RNN)


class LanguageModel(nn.Module):
    """What the next symbol will be, from the symbols so far.

    Args:
        rnn: layers in one module, or a list of modules, each on top of the one before.
        embedding: of S symbols.
        vocabulary: the symbols as words; empty for bytes.

    Shapes:
        x (T, B) int64, state a tuple of (L, B, H) or None for zeros, reset (T, B) bool
        -> logits (T, B, S), state: that of each module, one after the other
    """

    def __init__(
        self,
        rnn: Stack | nn.ModuleList,
        embedding: nn.Embedding,
        output: nn.Module,
        vocabulary: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.rnn = rnn
        self.output = output
        self.vocabulary = vocabulary
        self._cuts: dict[tuple[object, ...], bool] = {}

    @property
    def stacks(self) -> list[Stack]:
        """The recurrent modules, from the bottom up."""
        if isinstance(self.rnn, nn.ModuleList):
            return cast("list[Stack]", list(self.rnn))
        return [self.rnn]

    def forward(
        self, x: Tensor, state: State | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Logits and the state after x."""
        after: State = ()
        y = self.embedding(x)
        for index, given in enumerate(self.split(state)):
            y, more = self.through(index, y, given, reset)
            after += more
        return self.scores(y), after

    def scores(self, y: Tensor) -> Tensor:
        """The logits of outputs of the last layer."""
        logits: Tensor = self.output(y)
        return logits

    def through(
        self, index: int, x: Tensor, state: State | None, reset: Tensor | None
    ) -> tuple[Tensor, State]:
        """One of the recurrent modules: its output and state after x."""
        stack = self.stacks[index]
        if isinstance(stack, nn.RNNBase):  # which has no resets: its state runs on across files
            return self.call(stack, x, state)
        if reset is None or not self.cuts(x.device, index):
            return self.call(stack, x, state, reset=reset)

        def run(x: Tensor, state: State | None, lengths: Tensor | None) -> tuple[Tensor, State]:
            return self.call(stack, x, state, lengths=lengths)

        return apart(run, x, state, reset)

    def call(
        self, stack: Stack, x: Tensor, state: State | None, **masks: Tensor | None
    ) -> tuple[Tensor, State]:
        """A recurrent module's output and state."""
        y, after = stack(x, given(stack, state), **masks)
        return y, as_tuple(after)

    def cuts(self, device: torch.device, index: int = 0) -> bool:
        """Whether our layer runs faster in segments between resets than with resets inside.

        So it is where a fast backend has no resets, as cuDNN has none.
        """
        stack = self.stacks[index]
        casts = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if casts else self.embedding.weight.dtype
        if isinstance(stack, nn.RNNBase):
            return False
        key = index, device, dtype, torch.is_grad_enabled(), self.training
        if key not in self._cuts:
            with_resets, without = (
                explain(
                    stack, dtype=dtype, device=device, reset=reset, lengths=not reset, quiet=True
                ).chosen
                for reset in (True, False)
            )
            slow = (None, "reference")
            self._cuts[key] = with_resets in slow and without not in slow
        return self._cuts[key]

    def stepper(self, batch: int) -> Callable[[Tensor], Tensor]:
        """A function x_t (B,) -> logits (B, S) that keeps the states from call to call.

        Our layers step by `openrnn.nn.Stepper`, on a GPU from a CUDA graph. It records no gradient.
        """
        layers = [
            _torch_stepper(stack) if isinstance(stack, nn.RNNBase) else stack.stepper(batch)
            for stack in self.stacks
        ]

        @torch.no_grad()
        def step(x_t: Tensor) -> Tensor:
            y_t = self.embedding(x_t)
            for step_layer in layers:
                y_t = step_layer(y_t)
            return self.scores(y_t)

        return step

    def split(self, state: State | None) -> list[State] | list[None]:
        """The state of each recurrent module."""
        count = len(self.stacks)
        if not state:
            return [None] * count
        size = len(state) // count
        return [state[size * index : size * (index + 1)] for index in range(count)]


def _torch_stepper(stack: nn.RNNBase) -> Callable[[Tensor], Tensor]:
    """What a stepper is to our layers: a function x_t (B, I) -> y_t (B, H)."""
    state: Tensor | State | None = None

    def step(x_t: Tensor) -> Tensor:
        nonlocal state
        y, state = stack(x_t[None], state)
        return cast("Tensor", y[0])

    return step


def given(stack: Stack, state: State | None) -> State | Tensor | None:
    """A state in the form that a layer takes: for GRU and RNN a tensor, not a tuple."""
    return state[0] if state and isinstance(stack, ONE_STATE) else state


def as_tuple(state: Tensor | State | None) -> State:
    """What a layer returns as its state, as a tuple."""
    return (state,) if isinstance(state, Tensor) else tuple(state or ())


def layer(cell: str | Cell, *args: int, **options: object) -> Layer:
    """The public layer of a cell, or of a cell's name."""
    if isinstance(cell, Cell):
        return Recurrent(cell, *args, **options)
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
