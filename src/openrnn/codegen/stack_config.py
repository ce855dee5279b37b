"""The configurations of stacks in clusters, see `kernels/cuda/stack_forward.cuh`."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from openrnn.codegen.config import BackwardConfig, ForwardConfig, KernelConfig, ceil_div
from openrnn.codegen.trace import Traced


@dataclass(frozen=True)
class StackConfig(KernelConfig):
    """Loops of all layers of a stack, each in clusters of its own, in one launch.

    A block has `warps` that run the loop, and as many that multiply W_ih: input warps. `clusters`:
    one for each layer, which have the same rows of the batch.

    Args:
        layers: that one launch runs.
    """

    clusters: int = 2
    layers: int = 2

    followed: ClassVar[str]  # what input warps multiply, in words

    @property
    def threads(self) -> int:
        return 2 * 32 * self.warps

    @abstractmethod
    def input_fragments(self, cell: Traced, dtype: str) -> int:
        """Fragments of W_ih of an input warp."""

    @abstractmethod
    def _followed_bytes(self, cell: Traced, dtype: str) -> int:
        """Shared memory of the input warps' operand and partial sums."""

    def shared(self, cell: Traced, dtype: str) -> int:
        loop = super().shared(cell, dtype)
        before, rows = self.tiles_in_flight * 16, self.rows * 4
        handover = 2 * self.warps * self.stages * 8  # mbarriers of ring buffers
        front = ceil_div(before + handover + rows, 128) - ceil_div(before + rows, 128)
        matrix = max(0, self.input_fragments(cell, dtype) - self.register_fragments)
        return loop + front * 128 + self._followed_bytes(cell, dtype) + self.warps * matrix * 1024


@dataclass(frozen=True)
class StackForwardConfig(StackConfig, ForwardConfig):
    """Forward of a stack."""

    skeleton = "stack_forward.cuh"
    followed = "y of the layer below"

    def input_fragments(self, cell: Traced, dtype: str) -> int:
        return self.fragments(cell, dtype)

    def _followed_bytes(self, cell: Traced, dtype: str) -> int:
        return 2 * self.k_tiles(cell, dtype) * self.tiles * 512


@dataclass(frozen=True)
class StackBackwardConfig(StackConfig, BackwardConfig):
    """Backward of a stack; input warps split K."""

    skeleton = "stack_backward.cuh"
    followed = "gate gradients of the layer above"

    def _input_k_tiles(self, cell: Traced, dtype: str) -> int:
        whole = ceil_div(len(cell.gates) * self.units, self.k_tile_size(dtype))
        return ceil_div(whole, self.warps)

    def input_fragments(self, cell: Traced, dtype: str) -> int:
        return self._input_k_tiles(cell, dtype) * ceil_div(self.groups, 2)

    def _followed_bytes(self, cell: Traced, dtype: str) -> int:
        operand = self._input_k_tiles(cell, dtype) * self.tiles * 512
        return self.warps * (operand + self.tiles * self.groups * 256)
