"""A stack: layers of one size, their loop, their products' times, and all times in turn.

`wavefront.py` and `one_launch.py` compare with these.
"""

from typing import NamedTuple

from openrnn.codegen.config import SIZES
from openrnn.codegen.trace import Traced
from openrnn.tuning import overlap, plan

CHUNK_COST = 13.0  # us of a chunk beyond its steps and products: launches, waits, R loaded anew
# Bytes a us at which the output of a layer is copied to rows of whole 16 bytes, where its own are
# not: 8 x 250, B 64, on an H200
COPIED_PER_US = 0.6e6


class Stack(NamedTuple):
    """Layers of one size.

    Attributes:
        kind, option_names: of the loops.
        units: at least `hidden`, see `units.units_of`.
        columns: of the matrix, of G*H rows, that is multiplied with each chunk; after: of those
            that are multiplied with all steps of a layer when its loops have run.
        by_chunk: see `Chunking`; then `after` is 0, and `columns` are of all matrices.
        processors: multiprocessors; None where they are not known.
    """

    kind: str
    option_names: plan.OptionNames
    cell: Traced
    dtype: str
    hidden: int
    units: int
    layers: int
    columns: int
    after: int
    by_chunk: bool
    capability: tuple[int, int]
    processors: int | None

    def loop(self, batch: int) -> plan.LoopRequest:
        """The loop of one of its layers."""
        return plan.LoopRequest(
            kind=self.kind, option_names=self.option_names, cell=self.cell, dtype=self.dtype,
            hidden=self.hidden, batch=batch, capability=self.capability,
            processors=self.processors, padded_to=self.units,
        )  # fmt: skip

    def products_us(self, steps: int, batch: int) -> tuple[float, float]:
        """Microseconds of a layer's products of `columns` and of `after`."""
        rows, size = len(self.cell.gates) * self.units, SIZES[self.dtype]
        return (
            overlap.products_time(steps, batch, rows, self.columns, size),
            overlap.products_time(steps, batch, rows, self.after, size),
        )

    def copy_us(self, steps: int, batch: int) -> float:
        """Microseconds of the copy that an upper layer's input product reads, 0 for none."""
        row = self.hidden * SIZES[self.dtype]
        return steps * batch * row / COPIED_PER_US if self.kind == "forward" and row % 16 else 0.0

    def in_turn_us(self, loop_us: float, products_us: float) -> float:
        """All layers one after the other, from the times of a layer's loop and products."""
        return self.layers * (loop_us + products_us + CHUNK_COST)
