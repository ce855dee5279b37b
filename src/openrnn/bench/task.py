"""What every engine is given: one row in one precision, with inputs and weights that all share."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openrnn.bench.cases import TORCH_CELLS, WHOLE, BenchRow
from openrnn.cells import lookup
from openrnn.nn import GRU, LSTM, RNN, Layer, Recurrent


@dataclass(frozen=True)
class Precision:
    """A dtype, the arithmetic of float32 products, and the relative error that is let pass."""

    dtype: torch.dtype
    products: str
    allowed: float


PRECISIONS = {
    "bfloat16": Precision(torch.bfloat16, "tf32", 3e-2),
    "float16": Precision(torch.float16, "tf32", 5e-3),
    "tf32": Precision(torch.float32, "tf32", 3e-3),
    "float32": Precision(torch.float32, "ieee", 1e-4),
    "float64": Precision(torch.float64, "ieee", 1e-9),
    # of weights; inputs and states are float32
    "int8": Precision(torch.float32, "ieee", 5e-2),
    "bf16-weights": Precision(torch.float32, "ieee", 1e-2),
}
WEIGHTS = ("int8", "bf16-weights")  # on a CPU


def precision_of(name: str, row: BenchRow, device: str) -> str:
    """The precision of a row: the named one, or what its users run (torch's float32 is tf32).

    Raises:
        ValueError: there is no such precision, or not on this device.
    """
    if name == "auto":
        name = row.dtype or "tf32"
        own = name in WEIGHTS or (row.suite in WHOLE and row.dtype is not None)
        name = "float32" if device == "cpu" and not own else name
    if name not in PRECISIONS:
        raise ValueError(f"dtype must be auto or of {', '.join(PRECISIONS)}, got {name!r}")
    if name == "tf32" and device == "cpu":
        raise ValueError("dtype tf32 needs a CUDA device")
    if name in WEIGHTS and device != "cpu":
        raise ValueError(f"dtype {name} needs device cpu, got {device}")
    return name


@contextmanager
def products(setting: str) -> Iterator[None]:
    """Float32 products by this arithmetic, in recurrent networks and matrix products alike."""
    # neither has types
    rnn: Any = torch.backends.cudnn.rnn
    matrices: Any = torch.backends.cuda.matmul
    before = rnn.fp32_precision, matrices.fp32_precision
    rnn.fp32_precision = matrices.fp32_precision = setting
    try:
        yield
    finally:
        rnn.fp32_precision, matrices.fp32_precision = before


class Task:
    """The tensors of a row: values of bfloat16, which every precision holds, unless it is `full`.

    Attributes:
        x (T, B, I), dy (T, B, D*H): input and the gradient of y.
        weights: parameters under torch's names.
        lengths (B,) on the host, falling nowhere in particular, the longest T; or None.
        reset (T, B) bool or None.
        states, fresh (L*D, B, H) each: first states, and those of a reset; empty where they are 0.
        whole: the row that is timed, of which `row` may be a part.
    """

    def __init__(self, row: BenchRow, precision: str, device: str) -> None:
        self.row, self.precision, self.device = row, precision, device
        self.whole = row
        generator = torch.Generator().manual_seed(zlib.crc32(f"{row.suite} {row.name}".encode()))
        width = row.hidden * row.directions
        self.x = self._give(torch.randn(row.steps, row.batch, row.inputs, generator=generator))
        self.dy = self._give(torch.randn(row.steps, row.batch, width, generator=generator))
        bound = row.hidden**-0.5
        self.weights = {
            name: self._give((2 * torch.rand(shape.shape, generator=generator) - 1) * bound)
            for name, shape in layer_of(row, device="meta").state_dict().items()
        }
        self.lengths: Tensor | None = None
        self.reset: Tensor | None = None
        if row.lengths:
            self.lengths = torch.randint(1, row.steps + 1, (row.batch,), generator=generator)
            self.lengths[0] = row.steps
        if row.resets:
            starts = torch.rand(row.steps, row.batch, generator=generator) < row.resets
            self.reset = starts.to(device)
        self.states: tuple[Tensor, ...] = ()
        self.fresh: tuple[Tensor, ...] = ()
        if row.states:
            count = len(row.definition.states)
            shape = row.layers * row.directions, row.batch, row.hidden
            drawn = [
                self._give(row.states * torch.randn(shape, generator=generator))
                for _ in range(2 * count)
            ]
            self.states = tuple(drawn[:count])
            self.fresh = tuple(drawn[count:]) if row.resets else ()

    def _give(self, tensor: Tensor) -> Tensor:
        held = tensor if self.row.full else tensor.bfloat16()
        return held.to(self.device, PRECISIONS[self.precision].dtype)

    def part(self, steps: int, batch: int) -> "Task":
        """The first steps of the first sequences."""
        if (steps, batch) == (self.row.steps, self.row.batch):
            return self
        made = object.__new__(Task)
        made.row, made.whole = replace(self.row, steps=steps, batch=batch), self.whole
        made.precision, made.device, made.weights = self.precision, self.device, self.weights
        made.x, made.dy = (t[:steps, :batch].contiguous() for t in (self.x, self.dy))
        made.lengths = None if self.lengths is None else self.lengths[:batch].clamp(max=steps)
        made.reset = None if self.reset is None else self.reset[:steps, :batch].contiguous()
        made.states, made.fresh = (
            tuple(state[:, :batch].contiguous() for state in states)
            for states in (self.states, self.fresh)
        )
        return made

    def exact(self) -> "Task":
        """The same numbers in float64."""
        made = object.__new__(Task)
        made.row, made.precision, made.device = self.row, "float64", self.device
        made.whole = self.whole
        made.x, made.dy = self.x.double(), self.dy.double()
        made.weights = {name: weight.double() for name, weight in self.weights.items()}
        made.lengths, made.reset = self.lengths, self.reset
        made.states, made.fresh = (
            tuple(state.double() for state in states) for states in (self.states, self.fresh)
        )
        return made


def layer_of(row: BenchRow, **options: Any) -> Layer:
    """Our layer of a row."""
    common = {"num_layers": row.layers, "bidirectional": row.bidirectional, **options}
    sizes = row.inputs, row.hidden
    if row.cell == "lstm":
        return LSTM(*sizes, **common)
    if row.cell == "gru":
        return GRU(*sizes, **common)
    if row.cell in TORCH_CELLS:
        return RNN(*sizes, nonlinearity=row.cell.removeprefix("rnn_"), **common)
    return Recurrent(lookup(row.cell), *sizes, **common)
