"""The configurations of kernels with multicast, see `kernels/cuda/multicast.cuh`."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from openrnn.codegen.config import (
    RESET_BYTES,
    BackwardConfig,
    FlagBuffer,
    ForwardConfig,
    KernelConfig,
    ceil_div,
)
from openrnn.codegen.trace import Traced

PRODUCT_WARPS, CELL_WARPS = 8, 4  # of a block


@dataclass(frozen=True)
class MulticastConfig(KernelConfig):
    """Loops of large batches: TMA brings the product's operand, once for all blocks of a cluster.

    Two warpgroups of a block hold its rows of R, each half of its K, four warps compute cells; of
    four more two copy the operand and one publishes it. `groups`: of a cluster, dealt out evenly to
    its blocks, which own their cells; `tiles_in_flight`: sets of rows that take turns. Operands
    have 16 bits.

    Args:
        clusters: that share R.
        buffers: of the operand, each for all of a set's.
    """

    clusters: int = 1
    buffers: int = 1

    operand: ClassVar[str]  # what the product reads, in words
    y_flags = False
    k_parts = 1  # blocks that share K; more in backward

    @abstractmethod
    def _k_size(self, cell: Traced) -> int:
        """K: values of a row of R in forward, of R^T in backward."""

    @abstractmethod
    def _sums_of_unit(self, cell: Traced) -> int:
        """Sums that the product gives for a unit."""

    @property
    def most_spilled(self) -> int:
        """Before the loop, where a float32 R is rounded in twice as many registers."""
        return 224 if self.half_operands else 16

    @property
    def groups_of_block(self) -> int:
        return self.groups // self.cluster

    def k_of_block(self, cell: Traced) -> int:
        """Values of a row that a block holds."""
        return self._k_size(cell) // self.k_parts

    def k_tiles(self, cell: Traced, dtype: str) -> int:
        return self.k_of_block(cell) // self.k_tile_size(dtype) // 2

    def _block_sums(self, cell: Traced) -> int:
        """Sums that a block computes, of 8 units each."""
        return self.groups_of_block * self.k_parts * self._sums_of_unit(cell)

    def mma_rows(self, cell: Traced) -> int:
        return ceil_div(self._block_sums(cell), 8)

    def slots(self) -> int:
        """Of a warp that computes cells."""
        groups = self.groups_of_block
        warps_of_group = max(1, CELL_WARPS // groups)
        return ceil_div(groups, CELL_WARPS) * ceil_div(self.tiles, warps_of_group)

    def _exchange_bytes(self, cell: Traced, dtype: str) -> int:
        operand = self.k_tiles(cell, dtype) * self.tiles * 1024
        return self.buffers * operand + 2 * self._block_sums(cell) * self.tiles * 512

    def shared(self, cell: Traced, dtype: str) -> int:
        sets, per_slot = self.tiles_in_flight, self.slot_bytes(cell, dtype)
        # mbarriers, row numbers
        front = ceil_div(16 * (self.buffers + 3) + 8 * sets + 4 * self.rows, 128) * 128
        per_slot += RESET_BYTES if self.reset else 0
        inputs = ceil_div(sets * CELL_WARPS * self.slots() * per_slot, 128) * 128
        matrix = PRODUCT_WARPS * 1024 * (self.fragments(cell, dtype) - self.register_fragments)
        return front + self._exchange_bytes(cell, dtype) + inputs + matrix

    def sum_parts(self, batch: int) -> int:
        return super().sum_parts(batch) * self.tiles_in_flight

    def _flag_buffer(self, batch: int, messages: int, operand: int) -> FlagBuffer:
        """Rows of 128 bytes: a counter of each set and half of K, then two steps of each set.

        Args:
            messages: bytes of a step, which are filled as counters are; operand: those after them.
        """
        sets = ceil_div(batch, self.rows) * self.tiles_in_flight
        filled = sets * 2 * self.k_parts + 2 * sets * messages // 128
        return FlagBuffer((1, filled + 2 * sets * operand // 128, 64), filled)


@dataclass(frozen=True)
class MulticastForwardConfig(MulticastConfig, ForwardConfig):
    """Forward of large batches."""

    skeleton = "multicast_forward.cuh"
    operand = "h"

    def _k_size(self, cell: Traced) -> int:
        return self.units

    def _sums_of_unit(self, cell: Traced) -> int:
        return len(cell.gates)

    def flag_buffer(self, cell: Traced, steps: int, batch: int) -> FlagBuffer:
        return self._flag_buffer(batch, 0, self.units * 8 * self.tiles * 2)


@dataclass(frozen=True)
class MulticastBackwardConfig(MulticastConfig, BackwardConfig):
    """Backward of large batches.

    Args:
        k_parts: blocks that compute the sums of the units that they own together, each over its
            part of K, and send them to each other.
    """

    k_parts: int = 1

    skeleton = "multicast_backward.cuh"
    operand = "gate gradients"

    def _k_size(self, cell: Traced) -> int:
        return len(cell.gates) * self.units

    def _sums_of_unit(self, cell: Traced) -> int:
        return 1

    def flag_buffer(self, cell: Traced, steps: int, batch: int) -> FlagBuffer:
        sent = CELL_WARPS * self.slots() * 256  # bytes from a block to another in a step
        messages = self.cluster * self.clusters * (self.k_parts - 1) * sent
        return self._flag_buffer(batch, messages, self._k_size(cell) * 8 * self.tiles * 2)
