"""The configuration of a CUDA kernel: its constants, and the registers and shared memory it takes.

The skeletons in `kernels/cuda/` count shared memory again and do not compile where the two differ.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from typing_extensions import Self

from openrnn.codegen.trace import Traced

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of a stored value
RESET_BYTES = 32  # of a tile of 8 rows and a step, in the input ring


def saved_names(cell: Traced) -> tuple[str, ...]:
    """The saved activations of a cell in their order: sides of gates, then previous states."""
    states = (f"s_{state}" for state in cell.states)
    return (*cell.saved, *(name for name in states if name in cell.derivative.reads))


def saved_values(cell: Traced) -> int:
    """The values saved for a unit, row and step.

    They are stored in vectors of four, then one or two; three that are left take four.
    """
    count = len(saved_names(cell))
    return count + (count % 4 == 3)


class FlagBuffer(NamedTuple):
    """The global memory in which blocks poll for each other's values.

    Args:
        shape: (steps, rows, values) in operands.
        filled: rows of each step that are filled with ones before the launch.
    """

    shape: tuple[int, int, int]
    filled: int


def ceil_div(count: int, among: int) -> int:
    """The quotient, rounded up."""
    return -(-count // among)


@dataclass(frozen=True)
class KernelConfig(ABC):
    """What every kernel has.

    Args:
        units: at least H, a multiple of 8.
        cluster: blocks that exchange through shared memory; warps: of a block.
        groups: of 8 units, at most: of a warp, a block or a cluster, see `groups_of`.
        tiles: of 8 batch rows, the N of one product.
        tiles_in_flight: such sets of rows that take turns.
        register_fragments: fragments of R that a warp holds in registers.
        stages: of the input ring.
        wgmma: four warps multiply as one warpgroup.
        low_register: R is loaded a few fragments at a time, and fewer addresses are held.
        lengths, reset: the kernel reads these masks.
        all_states: forward writes the states of all steps; backward reads their gradients.
        reset_state: forward begins resets with given states; backward gives their gradients.
        padded: H is less than `units`.
    """

    units: int
    cluster: int
    warps: int
    groups: int
    tiles: int
    tiles_in_flight: int
    register_fragments: int
    stages: int = 4
    wgmma: bool = False
    low_register: bool = False
    lengths: bool = False
    reset: bool = False
    all_states: bool = False
    reset_state: bool = False
    padded: bool = False

    kind: ClassVar[str]
    skeleton: ClassVar[str]
    groups_of: ClassVar[str]  # what has `groups`: warp, block or cluster
    clusters = 1  # that have the same rows: in a grid they share R, of a stack each has a layer
    layers = 1  # that one launch runs; more in a stack
    delay = 0  # cycles before a grid's first poll
    stepwise = False  # steps are launches of their own, on products of GEMMs
    streamed_fragments = 0  # of R, that a warp of a grid reads from memory in each step
    half_operands = False  # forward multiplies float32 values as float16
    parts_in_cluster = False  # blocks that share K are of one cluster: with multicast, in backward
    y_flags = True  # a grid's flag buffer may be y or, in backward, the gate gradients

    @property
    def is_cooperative(self) -> bool:
        """Whether blocks wait for blocks of other clusters, so that all must be resident."""
        return self.clusters > 1

    @property
    def as_compiled(self) -> "KernelConfig":
        """The configuration without what is an argument of the kernel."""
        return self

    def delayed(self, delay: int) -> Self:
        """With so many cycles before the first poll, where the kernel has such a delay."""
        return self

    def streamed_bytes(self, blocks: int) -> int:
        """Memory of the streamed fragments of so many blocks."""
        return blocks * self.warps * self.streamed_fragments * 1024

    @property
    def reads_r(self) -> bool:
        """Whether R, or a part of it, is read from memory in each step."""
        return self.stepwise or self.streamed_fragments > 0

    def with_registers(self, fragments: int) -> Self:
        """With so many fragments in registers."""
        return replace(self, register_fragments=fragments)

    @property
    def most_spilled(self) -> int:
        """Bytes of registers that a kernel may spill and still be tried in its turn."""
        return 32 if self.streamed_fragments else 0  # little beside what it reads in each step

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Batch rows of a cluster, or in a grid of all clusters that share R."""
        return 8 * self.tiles * self.tiles_in_flight

    def operand_bytes(self, dtype: str) -> int:
        """Bytes of a value as products read it."""
        return 2 if self.half_operands else SIZES[dtype]

    def k_tile_size(self, dtype: str) -> int:
        """Values of K in a k tile, which has 64 bytes."""
        return 64 // self.operand_bytes(dtype)

    def flag_buffer(self, cell: Traced, steps: int, batch: int) -> FlagBuffer:
        """A forward grid's: h of all steps, which the next step reads where this one leaves it."""
        return FlagBuffer((steps, batch, self.units), batch)

    def sum_parts(self, batch: int) -> int:
        """Parts, by rows, of the sums that backward leaves."""
        return ceil_div(batch, self.rows) * self.tiles

    @abstractmethod
    def k_tiles(self, cell: Traced, dtype: str) -> int:
        """K tiles that a warp multiplies."""

    @abstractmethod
    def mma_rows(self, cell: Traced) -> int:
        """Fragments, of 16 rows of R each, of a warp and k tile."""

    @abstractmethod
    def slots(self) -> int:
        """Slots of a warp: a slot is a group of 8 units in a tile of 8 rows, two cells a lane."""

    def reset_tiles(self) -> int:
        """Tiles of rows whose resets a warp copies."""
        return self.slots()

    @abstractmethod
    def _exchange_bytes(self, cell: Traced, dtype: str) -> int:
        """Shared memory of the product's operand and of partial sums."""

    def fragments(self, cell: Traced, dtype: str) -> int:
        """Fragments of R of a warp: each 8 registers of a lane, or 1 KiB of shared memory."""
        return self.k_tiles(cell, dtype) * self.mma_rows(cell)

    def shared_fragments(self, cell: Traced, dtype: str) -> int:
        """Those of a warp that lie in shared memory."""
        held_elsewhere = self.register_fragments + self.streamed_fragments
        return self.fragments(cell, dtype) - held_elsewhere

    def accumulators(self, cell: Traced) -> int:
        """Accumulator registers of a lane; a short product by `mma` has several chains."""
        count = self.mma_rows(cell) * self.tiles
        return 4 * count * (1 if self.wgmma else max(1, 4 // max(1, count)))

    def slot_bytes(self, cell: Traced, dtype: str) -> int:
        """Bytes of a slot in one stage of the input ring."""
        values = len(cell.gates) if self.kind == "forward" else 1 + saved_values(cell)
        return 64 * values * SIZES[dtype]

    def _mbarrier_bytes(self) -> int:
        return self.tiles_in_flight * 16

    def shared(self, cell: Traced, dtype: str) -> int:
        """Bytes of shared memory of a block."""
        # mbarriers and row numbers
        front = ceil_div(self._mbarrier_bytes() + self.rows * 4, 128) * 128
        stage = self.slots() * self.slot_bytes(cell, dtype)
        stage += self.reset_tiles() * RESET_BYTES if self.reset else 0
        ring = self.warps * self.stages * self.tiles_in_flight * stage
        matrix = self.warps * self.shared_fragments(cell, dtype) * 1024
        return front + self._exchange_bytes(cell, dtype) + ring + matrix


@dataclass(frozen=True)
class ForwardConfig(KernelConfig):
    """Forward in a block or cluster, which holds R.

    Args:
        save: saves activations for backward.
        half_operands: products read float32 values as float16.
    """

    save: bool = False
    half_operands: bool = False

    kind = "forward"
    skeleton = "forward.cuh"
    groups_of = "warp"

    def k_tiles(self, cell: Traced, dtype: str) -> int:
        return ceil_div(self.units, self.k_tile_size(dtype))

    def mma_rows(self, cell: Traced) -> int:
        return ceil_div(self.groups * len(cell.gates), 2)

    def slots(self) -> int:
        return self.groups * self.tiles

    def reset_tiles(self) -> int:
        return self.tiles

    def _exchange_bytes(self, cell: Traced, dtype: str) -> int:
        return self.tiles_in_flight * 2 * self.k_tiles(cell, dtype) * self.tiles * 512


@dataclass(frozen=True)
class BackwardConfig(KernelConfig):
    """Backward in a block or cluster, which holds R."""

    kind = "backward"
    skeleton = "backward.cuh"
    groups_of = "block"

    def k_tiles(self, cell: Traced, dtype: str) -> int:
        return ceil_div(len(cell.gates) * self.groups * 8, self.k_tile_size(dtype))

    def mma_rows(self, cell: Traced) -> int:
        return ceil_div(ceil_div(self.units, 16), self.warps)

    def slots(self) -> int:
        return ceil_div(self.groups * self.tiles, self.warps)

    def _exchange_bytes(self, cell: Traced, dtype: str) -> int:
        operand = self.k_tiles(cell, dtype) * self.tiles * 512
        partial_sums = self.cluster * self.tiles * self.groups * 256
        return self.tiles_in_flight * (operand + 2 * partial_sums)


@dataclass(frozen=True)
class _GridConfig(KernelConfig):
    """A grid: clusters share R through L2, and the blocks of a cluster split K.

    Args:
        clusters: that share R.
        k_warps: warps of a block that split its part of K.
        delay: cycles before the first poll of the first step, from where each warp adapts its own.
            An argument of the kernel.
        streamed_fragments: of a warp, for which neither registers nor shared memory have room: it
            reads them from memory in each step.
    """

    clusters: int = 1
    k_warps: int = 1
    delay: int = 0
    streamed_fragments: int = 0

    groups_of = "cluster"

    @property
    def as_compiled(self) -> KernelConfig:
        return replace(self, delay=0)

    def with_registers(self, fragments: int) -> Self:
        """With so many fragments in registers; where some are streamed, with others of those."""
        more = fragments - self.register_fragments
        streamed = max(0, self.streamed_fragments - more) if self.streamed_fragments else 0
        return replace(self, register_fragments=fragments, streamed_fragments=streamed)

    def delayed(self, delay: int) -> Self:
        return replace(self, delay=delay)

    @abstractmethod
    def _sums_of_unit(self, cell: Traced) -> int:
        """Sums that the product gives for a unit."""

    @abstractmethod
    def _k_size(self, cell: Traced) -> int:
        """K: values of a row of R in forward, of R^T in backward."""

    def k_tiles(self, cell: Traced, dtype: str) -> int:
        whole = ceil_div(self._k_size(cell), self.k_tile_size(dtype))
        return ceil_div(whole, self.cluster * self.k_warps)

    def feeds_all(self, cell: Traced, dtype: str) -> bool:
        """Whether every block of a cluster has a part of K: one without would wait for nobody."""
        part = self.k_tiles(cell, dtype) * self.k_warps * self.k_tile_size(dtype)
        return (self.cluster - 1) * part < self._k_size(cell)

    def mma_rows(self, cell: Traced) -> int:
        rows = ceil_div(self.groups * self._sums_of_unit(cell), 2)
        return ceil_div(rows, self.warps // self.k_warps)

    def _block_slots(self) -> int:
        return ceil_div(self.groups * self.tiles, self.cluster)

    def slots(self) -> int:
        return ceil_div(self._block_slots(), self.warps)

    def reset_tiles(self) -> int:
        return self.slots()

    def _exchange_bytes(self, cell: Traced, dtype: str) -> int:
        operand = self.k_tiles(cell, dtype) * self.k_warps * self.tiles * 512
        senders = self.cluster * self.k_warps
        partial_sums = self._block_slots() * senders * self._sums_of_unit(cell) * 256
        return 2 * (operand + partial_sums)


@dataclass(frozen=True)
class GridForwardConfig(_GridConfig, ForwardConfig):
    """Forward in a grid, for an R that no cluster holds."""

    skeleton = "grid_forward.cuh"

    def _sums_of_unit(self, cell: Traced) -> int:
        return len(cell.gates)

    def _k_size(self, cell: Traced) -> int:
        return self.units


@dataclass(frozen=True)
class GridBackwardConfig(_GridConfig, BackwardConfig):
    """Backward in a grid, for an R that no cluster holds."""

    skeleton = "grid_backward.cuh"

    def _sums_of_unit(self, cell: Traced) -> int:
        return 1

    def _k_size(self, cell: Traced) -> int:
        return len(cell.gates) * self.units


@dataclass(frozen=True)
class _StepwiseConfig(KernelConfig):
    """A loop that holds no R: each step is a GEMM and a launch of this kernel.

    A warp takes 8 units in a tile of 8 rows, and a block such tiles of the same units.
    """

    stepwise = True

    def shared(self, cell: Traced, dtype: str) -> int:
        return 0

    def sum_parts(self, batch: int) -> int:
        return ceil_div(batch, 8 * self.warps)

    def blocks(self, batch: int) -> int:
        """The blocks of a launch."""
        return self.units // 8 * self.sum_parts(batch)


@dataclass(frozen=True)
class StepwiseForwardConfig(_StepwiseConfig, ForwardConfig):
    """Forward, on products of h."""

    skeleton = "stepwise_forward.cuh"


@dataclass(frozen=True)
class StepwiseBackwardConfig(_StepwiseConfig, BackwardConfig):
    """Backward, on products of the gate gradients of the step before."""

    skeleton = "stepwise_backward.cuh"
