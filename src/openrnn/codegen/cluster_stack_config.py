"""The configurations of stacks in clusters, see `kernels/cuda/stack_forward.cuh`."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from openrnn.codegen.config import SIZES, BackwardConfig, ForwardConfig, KernelConfig, ceil_div
from openrnn.codegen.trace import Traced
from openrnn.kernels.cuda.args import LOOPS


@dataclass(frozen=True)
class ClusterStackConfig(KernelConfig):
    """Loops of all layers of a stack, each in clusters of its own, in one launch.

    A block has `warps` that run the loop, and as many that multiply W_ih: input warps.

    Args:
        layers: that one launch runs.
    """

    layers: int = 2

    polled: ClassVar[str]  # what input warps poll for and multiply, in words

    @property
    def clusters(self) -> int:  # type: ignore[override]
        """Those that have the same rows of the batch: one for each layer."""
        return self.layers

    @property
    def threads(self) -> int:
        return 2 * 32 * self.warps

    def argument_bytes(self, cell: Traced) -> int:
        """Bytes of the kernel's parameter: all layers' arguments, 8 bytes each."""
        fields = LOOPS[self.kind].fields
        numbers = sum(len(cell.states) if field.array else 1 for field in fields)
        return self.layers * numbers * 8

    @abstractmethod
    def input_fragments(self, cell: Traced, dtype: str) -> int:
        """Fragments of W_ih of an input warp."""

    def input_register_fragments(self, cell: Traced, dtype: str) -> int:
        """Those of an input warp that registers hold."""
        return min(self.register_fragments, self.input_fragments(cell, dtype))

    @abstractmethod
    def _row_values(self, cell: Traced) -> int:
        """Values of a row that input warps poll for."""

    def polls(self, cell: Traced, dtype: str) -> int:
        """Polls of a thread of the input warps in each step: 16 bytes each."""
        return ceil_div(self.rows * self._row_values(cell) * SIZES[dtype], 16 * 32 * self.warps)

    @property
    def _most_in_flight(self) -> int:
        """Polls of a thread on their way at a time, each in five registers."""
        return 8

    def poll_rounds(self, cell: Traced, dtype: str) -> int:
        """Rounds of a step's polls: one begins when the one before has arrived."""
        return ceil_div(self.polls(cell, dtype), self._most_in_flight)

    def polls_in_flight(self, cell: Traced, dtype: str) -> int:
        """Polls of a round."""
        return ceil_div(self.polls(cell, dtype), self.poll_rounds(cell, dtype))

    @abstractmethod
    def _polled_bytes(self, cell: Traced, dtype: str) -> int:
        """Shared memory of the input warps' operand and partial sums."""

    def _mbarrier_bytes(self) -> int:
        ring = 2 * self.warps * self.stages * 8  # of a ring's stages, filled and empty
        return super()._mbarrier_bytes() + ring

    def shared(self, cell: Traced, dtype: str) -> int:
        held = self.input_register_fragments(cell, dtype)
        matrix = self.input_fragments(cell, dtype) - held
        of_inputs = self._polled_bytes(cell, dtype) + self.warps * matrix * 1024
        return super().shared(cell, dtype) + of_inputs


@dataclass(frozen=True)
class ClusterStackForwardConfig(ClusterStackConfig, ForwardConfig):
    """Forward of a stack."""

    skeleton = "stack_forward.cuh"
    polled = "y of the layer below"

    def input_fragments(self, cell: Traced, dtype: str) -> int:
        return self.fragments(cell, dtype)

    def _row_values(self, cell: Traced) -> int:
        return self.units

    def _polled_bytes(self, cell: Traced, dtype: str) -> int:
        return 2 * self.k_tiles(cell, dtype) * self.tiles * 512


@dataclass(frozen=True)
class ClusterStackBackwardConfig(ClusterStackConfig, BackwardConfig):
    """Backward of a stack; input warps split K."""

    skeleton = "stack_backward.cuh"
    polled = "gate gradients of the layer above"

    @property
    def _most_in_flight(self) -> int:
        return 12 if self.warps <= 4 else 8  # a thread has 255 registers, or 128

    def _row_values(self, cell: Traced) -> int:
        return len(cell.gates) * self.units

    def _input_k_tiles(self, cell: Traced, dtype: str) -> int:
        whole = ceil_div(len(cell.gates) * self.units, self.k_tile_size(dtype))
        return ceil_div(whole, self.warps)

    def input_fragments(self, cell: Traced, dtype: str) -> int:
        return self._input_k_tiles(cell, dtype) * ceil_div(self.groups, 2)

    def input_register_fragments(self, cell: Traced, dtype: str) -> int:
        """Fewer where many polls are in flight: a fragment has eight registers."""
        taken = ceil_div(5 * max(0, self.polls_in_flight(cell, dtype) - 8), 8)
        most = self.register_fragments - taken
        return max(0, min(most, self.input_fragments(cell, dtype)))

    def _polled_bytes(self, cell: Traced, dtype: str) -> int:
        operand = self._input_k_tiles(cell, dtype) * self.tiles * 512
        return self.warps * (operand + self.tiles * self.groups * 256)
