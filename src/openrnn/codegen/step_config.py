"""The configuration of a CUDA kernel of a single step, T = 1."""

from dataclasses import dataclass

from openrnn.codegen.config import ceil_div
from openrnn.codegen.trace import Traced


@dataclass(frozen=True)
class StepConfig:
    """A kernel of a single step, forward or backward; H, I and B are arguments of it.

    Args:
        kind: "step_forward", "step_cell", which leaves products to GEMMs, or "step_backward".
        tiles: of 8 batch rows that a block takes; backward takes all rows in turn.
        warps: of a block; in `step_forward` they split K.
    """

    kind: str
    tiles: int
    warps: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared(self, cell: Traced) -> int:
        """Bytes of shared memory of a block that its launch asks for: partial sums of warps."""
        if self.kind != "step_forward":
            return 0
        return self.warps * ceil_div(len(cell.gates), 2) * self.tiles * 512
