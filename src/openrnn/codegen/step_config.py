"""The configuration of a CUDA kernel of a single step, T = 1."""

from dataclasses import dataclass

from openrnn.codegen.config import ceil_div

WARPS = 8  # of a block; 16 were mostly slower on an H200, and 4% faster at most
PLACE_BYTES = 512  # 16 for each lane of a warp


@dataclass(frozen=True)
class StepConfig:
    """A kernel of a single step, forward or backward; H, I and B are arguments of it.

    Args:
        kind: "step_forward", "step_cell", which leaves products to GEMMs, or "step_backward".
        tiles: of 8 batch rows that a block takes; backward takes all rows in turn.
        unit_groups: of 8 units that a block takes, all gates of them.
        stages: K tiles that a warp of `step_forward` has in shared memory at once.
    """

    kind: str
    tiles: int
    unit_groups: int = 1
    stages: int = 1

    @property
    def threads(self) -> int:
        return 32 * WARPS

    def stage_bytes(self, gates: int) -> int:
        """Shared memory of a K tile of all warps: their parts of the matrices and of the rows."""
        return WARPS * (self.unit_groups * gates + self.tiles) * PLACE_BYTES

    def shared(self, gates: int) -> int:
        """Bytes of shared memory of a block.

        In `step_forward` each warp has a ring of K tiles, where it also leaves its partial sums.
        """
        if self.kind != "step_forward":
            return 0
        sums = self.unit_groups * ceil_div(gates, 2) * self.tiles
        return max(self.stages * self.stage_bytes(gates), WARPS * sums * PLACE_BYTES)
