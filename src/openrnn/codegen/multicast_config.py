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

CELL_WARPS = 4  # of a set
_DEPTH = {False: 2, True: 8}  # DEPTH of multicast.cuh: of one layer, and in a stack


@dataclass(frozen=True)
class MulticastConfig(KernelConfig):
    """Loops of large batches: TMA brings an operand once for the blocks of a cluster that read it.

    Of a block's 16 warps some warpgroups multiply, each with a part of its K, others compute cells;
    of four more warps two copy the operand and one publishes it. `groups` are dealt out evenly to
    the blocks of a cluster, which own their cells; `tiles_in_flight`: sets of rows that take turns.
    Operands have 16 bits.

    Args:
        clusters: that share R; of a stack those of all layers.
        k_warpgroups: warpgroups that multiply, each with a part of K: 1 or 2. The others of three
            compute cells: two of them have every other set each.
        buffers: of the operand, each for all of a set's.
        layers: that one launch runs; of more than one K has two halves: the other layer's values
            and the layer's own.
    """

    clusters: int = 1
    buffers: int = 1
    layers: int = 1
    k_warpgroups: int = 2

    operand: ClassVar[str]  # what the product reads, in words
    groups_of = "cluster"
    y_flags = False
    k_parts = 1  # blocks that share K; more in backward

    @abstractmethod
    def _k_size(self, cell: Traced) -> int:
        """Values of a row of R in forward, of R^T in backward."""

    @abstractmethod
    def _published(self, cell: Traced) -> int:
        """Values of a unit, row and step that other blocks read."""

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
        return self._k_size(cell) * min(self.layers, 2) // self.k_parts

    def k_tiles(self, cell: Traced, dtype: str) -> int:
        return self.k_of_block(cell) // self.k_tile_size(dtype) // self.k_warpgroups

    def _block_sums(self, cell: Traced) -> int:
        """Sums that a block computes, of 8 units each."""
        return self.groups_of_block * self.k_parts * self._sums_of_unit(cell)

    def mma_rows(self, cell: Traced) -> int:
        return ceil_div(self._block_sums(cell), 8)

    def slots(self) -> int:
        """Slots of a warp that computes cells."""
        groups = self.groups_of_block
        warps_of_group = max(1, CELL_WARPS // groups)
        return ceil_div(groups, CELL_WARPS) * ceil_div(self.tiles, warps_of_group)

    def _exchange_bytes(self, cell: Traced, dtype: str) -> int:
        operand = self.k_of_block(cell) * self.tiles * 16
        shares = self._block_sums(cell) * self.tiles * self.k_warpgroups * 256
        return self.buffers * operand + 2 * shares

    def shared(self, cell: Traced, dtype: str) -> int:
        sets, per_slot = self.tiles_in_flight, self.slot_bytes(cell, dtype)
        # mbarriers, row numbers
        received = sets * 2 * CELL_WARPS if self.parts_in_cluster else 0
        mbarriers = 2 * self.buffers + 6 + sets + received
        front = ceil_div(8 * mbarriers + 4 * self.rows, 128) * 128
        per_slot += RESET_BYTES if self.reset else 0
        inputs = ceil_div(sets * CELL_WARPS * self.slots() * per_slot, 128) * 128
        matrix = self.fragments(cell, dtype) - self.register_fragments
        matrix *= 4 * self.k_warpgroups * 1024
        messages = received * (self.k_parts - 1) * self.slots() * 256
        return front + self._exchange_bytes(cell, dtype) + inputs + messages + matrix

    def sum_parts(self, batch: int) -> int:
        return super().sum_parts(batch) * self.tiles_in_flight

    def flag_buffer(self, cell: Traced, steps: int, batch: int) -> FlagBuffer:
        """Rows of 128 bytes: counters, messages, and what is published, see `Exchange`."""
        sets = ceil_div(batch, self.rows) * self.tiles_in_flight * self.layers
        splits = self.k_parts * (1 if self.layers > 1 else 2)
        blocks = self.cluster * self.clusters // self.layers
        # bytes from a block to another in a step, through memory
        sent = 0 if self.parts_in_cluster else CELL_WARPS * self.slots() * 256
        filled = sets * splits + 2 * sets * blocks * (self.k_parts - 1) * sent // 128
        step = self._published(cell) * self.units * 8 * self.tiles * 2 // 128
        return FlagBuffer((1, filled + _DEPTH[self.layers > 1] * sets * step, 64), filled)


@dataclass(frozen=True)
class MulticastForwardConfig(MulticastConfig, ForwardConfig):
    """Forward of large batches."""

    skeleton = "multicast_forward.cuh"
    operand = "h"

    def _k_size(self, cell: Traced) -> int:
        return self.units

    def _sums_of_unit(self, cell: Traced) -> int:
        return len(cell.gates)

    def _published(self, cell: Traced) -> int:
        return 1


@dataclass(frozen=True)
class MulticastBackwardConfig(MulticastConfig, BackwardConfig):
    """Backward of large batches.

    Args:
        k_parts: blocks that compute the sums of the units that they own together, each over its
            part of K, and send them to each other.
        parts_in_cluster: these blocks are of one cluster, and send through shared memory.
    """

    k_parts: int = 1
    parts_in_cluster: bool = False

    skeleton = "multicast_backward.cuh"
    operand = "gate gradients"

    def _k_size(self, cell: Traced) -> int:
        return len(cell.gates) * self.units

    def _sums_of_unit(self, cell: Traced) -> int:
        return 1

    def _published(self, cell: Traced) -> int:
        return len(cell.gates) + (len(cell.split_gates) if self.layers > 1 else 0)
