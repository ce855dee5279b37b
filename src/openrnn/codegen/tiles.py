"""The tiles of a CUDA kernel: its constants, and the registers and shared memory that they take.

The skeletons in `kernels/` count shared memory again and do not compile where the two differ.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from openrnn.codegen.trace import Traced

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
RESET_BYTES = 32  # of a tile and step, in the ring of inputs


def kept(cell: Traced) -> tuple[str, ...]:
    """What forward keeps of each cell, in order: sides of gates, then previous states."""
    states = (f"s_{state}" for state in cell.states)
    return (*cell.kept, *(name for name in states if name in cell.derivative.reads))


def record(cell: Traced) -> int:
    """The values of a kept record: planes of four, then one, two or, where three are left, four."""
    count = len(kept(cell))
    return count + (count % 4 == 3)


def _share(count: int, among: int) -> int:
    return -(-count // among)


@dataclass(frozen=True)
class Tiles(ABC):
    """What every kernel has.

    Args:
        units: H, rounded up to a multiple of 8.
        cluster: blocks that exchange through shared memory; warps: of a block.
        per: groups of 8 units, see each kind.
        tiles: of 8 rows, that one product takes; flight: such products that take turns.
        resident: pieces of R in registers, of a warp; stages: of the ring of inputs.
        wgmma: four warps multiply together.
        frugal: fewer registers: R comes a few pieces at a time, and fewer addresses are held.
        lengths, reset, every: what the kernel knows to do.
        fresh: of resets, forward begins with states that are given, and backward gives gradients.
        padded: H is less than `units`.
    """

    units: int
    cluster: int
    warps: int
    per: int
    tiles: int
    flight: int
    resident: int
    stages: int = 4
    wgmma: bool = False
    frugal: bool = False
    lengths: bool = False
    reset: bool = False
    every: bool = False
    fresh: bool = False
    padded: bool = False

    kind: ClassVar[str]
    skeleton: ClassVar[str]
    clusters = 1  # that share R
    delay = 0  # cycles, of a grid's first step
    half = False  # products read float32 values as float16, of forward

    @property
    def built(self) -> "Tiles":
        """The tiles of the source: what is an argument of the kernel is not in it."""
        return self

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Of the batch, that one exchange serves."""
        return 8 * self.tiles * self.flight

    def multiplied(self, dtype: str) -> int:
        """The bytes of a value that products read."""
        return 2 if self.half else SIZES[dtype]

    def depth(self, dtype: str) -> int:
        """Values of K in a slice, 64 bytes."""
        return 64 // self.multiplied(dtype)

    @abstractmethod
    def slices(self, cell: Traced, dtype: str) -> int:
        """Slices of K that a warp multiplies."""

    @abstractmethod
    def mma_rows(self, cell: Traced) -> int:
        """Products of 16 rows, a warp and a slice."""

    @abstractmethod
    def slots(self) -> int:
        """Groups in a tile whose cells a warp computes."""

    def reset_tiles(self) -> int:
        """Tiles of rows whose resets a warp copies."""
        return self.slots()

    @abstractmethod
    def _exchanged(self, cell: Traced, dtype: str) -> int:
        """Bytes of what is multiplied and of its sums' parts."""

    def pieces(self, cell: Traced, dtype: str) -> int:
        """Pieces of R of a warp, each 8 registers of a lane or 1 KiB of shared memory."""
        return self.slices(cell, dtype) * self.mma_rows(cell)

    def sums(self, cell: Traced) -> int:
        """Registers of a lane for a product's sums; a short one by `mma` has several chains."""
        count = self.mma_rows(cell) * self.tiles
        return 4 * count * (1 if self.wgmma else max(1, 4 // max(1, count)))

    def stage(self, cell: Traced, dtype: str) -> int:
        """Bytes of the ring's entry of a slot."""
        values = len(cell.gates) if self.kind == "forward" else 1 + record(cell)
        return 64 * values * SIZES[dtype]

    def shared(self, cell: Traced, dtype: str) -> int:
        """The bytes of shared memory of a block."""
        front = _share(self.flight * 16 + self.rows * 4, 128) * 128  # mailboxes, row numbers
        turn = self.slots() * self.stage(cell, dtype)
        turn += self.reset_tiles() * RESET_BYTES if self.reset else 0
        ring = self.warps * self.stages * self.flight * turn
        matrix = self.warps * (self.pieces(cell, dtype) - self.resident) * 1024
        return front + self._exchanged(cell, dtype) + ring + matrix


@dataclass(frozen=True)
class Forward(Tiles):
    """A cluster that owns R; `per`: of a warp.

    Args:
        keep: for backward.
        half: products read float32 values as float16.
    """

    keep: bool = False
    half: bool = False

    kind = "forward"
    skeleton = "forward.cuh"

    def slices(self, cell: Traced, dtype: str) -> int:
        return _share(self.units, self.depth(dtype))

    def mma_rows(self, cell: Traced) -> int:
        return _share(self.per * len(cell.gates), 2)

    def slots(self) -> int:
        return self.per * self.tiles

    def reset_tiles(self) -> int:
        return self.tiles

    def _exchanged(self, cell: Traced, dtype: str) -> int:
        return self.flight * 2 * self.slices(cell, dtype) * self.tiles * 512


@dataclass(frozen=True)
class Backward(Tiles):
    """A cluster that owns R; `per`: of a block."""

    kind = "backward"
    skeleton = "backward.cuh"

    def slices(self, cell: Traced, dtype: str) -> int:
        return _share(len(cell.gates) * self.per * 8, self.depth(dtype))

    def mma_rows(self, cell: Traced) -> int:
        return _share(_share(self.units, 16), self.warps)

    def slots(self) -> int:
        return _share(self.per * self.tiles, self.warps)

    def _exchanged(self, cell: Traced, dtype: str) -> int:
        operand = self.slices(cell, dtype) * self.tiles * 512
        parts = self.cluster * self.tiles * self.per * 256
        return self.flight * (operand + 2 * parts)


@dataclass(frozen=True)
class _Grid(Tiles):
    """Clusters that share R through L2; `per`: of a cluster, whose blocks split K.

    Args:
        clusters: that share R.
        k_warps: warps of a block that split its part of K.
        delay: cycles before a block looks for what others post, in the first step: warps find their
            own from there. An argument of the kernel.
    """

    clusters: int = 1
    k_warps: int = 1
    delay: int = 0

    @property
    def built(self) -> Tiles:
        return replace(self, delay=0)

    @abstractmethod
    def _each(self, cell: Traced) -> int:
        """Sums of a unit that the matrix gives."""

    @abstractmethod
    def _depth(self, cell: Traced) -> int:
        """Values of a row of the matrix."""

    def slices(self, cell: Traced, dtype: str) -> int:
        every = _share(self._depth(cell), self.depth(dtype))
        return _share(every, self.cluster * self.k_warps)

    def feeds_all(self, cell: Traced, dtype: str) -> bool:
        """Whether every block of a cluster has a part of K: one without would wait for nobody."""
        part = self.slices(cell, dtype) * self.k_warps * self.depth(dtype)
        return (self.cluster - 1) * part < self._depth(cell)

    def mma_rows(self, cell: Traced) -> int:
        return _share(_share(self.per * self._each(cell), 2), self.warps // self.k_warps)

    def _own_slots(self) -> int:
        return _share(self.per * self.tiles, self.cluster)

    def slots(self) -> int:
        return _share(self._own_slots(), self.warps)

    def reset_tiles(self) -> int:
        return self.slots()

    def _exchanged(self, cell: Traced, dtype: str) -> int:
        operand = self.slices(cell, dtype) * self.k_warps * self.tiles * 512
        parts = self._own_slots() * self.cluster * self.k_warps * self._each(cell) * 256
        return 2 * (operand + parts)


@dataclass(frozen=True)
class GridForward(_Grid, Forward):
    """Where R fits no cluster."""

    skeleton = "grid_forward.cuh"

    def _each(self, cell: Traced) -> int:
        return len(cell.gates)

    def _depth(self, cell: Traced) -> int:
        return self.units


@dataclass(frozen=True)
class GridBackward(_Grid, Backward):
    """Where R fits no cluster."""

    skeleton = "grid_backward.cuh"

    def _each(self, cell: Traced) -> int:
        return 1

    def _depth(self, cell: Traced) -> int:
        return len(cell.gates) * self.units
