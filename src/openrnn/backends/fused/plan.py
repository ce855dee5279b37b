"""Which tiles a kernel has: what fits a block and a cluster, and a model of how long a step takes.

Never keyed on T, on B only by the number of tiles. The model's times are cycles of one
multiprocessor; what they rest on is measured in `docs/kernels.md`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from openrnn.codegen import cuda
from openrnn.codegen.cuda import Backward, Forward
from openrnn.codegen.trace import Traced

# bytes of shared memory that a block may take, and blocks of the largest cluster
_SHARED = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227,
           (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99}  # fmt: skip
_CLUSTER = {9: 16, 10: 16, 11: 8, 12: 8}
# clusters of 1, 2, 4, 8 and 16 blocks that an H200 holds at once, one block a multiprocessor
_RESIDENT = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}

# cycles
PRODUCT = 8.5  # of one mma on a quarter of a multiprocessor
LOAD = 4.0  # of 512 bytes of shared memory
BASE = 520.0  # of a step's chain of latencies within a block
EXCHANGE = 480.0  # what a cluster adds
CELL = 70.0  # of a cell function for 32 lanes


@dataclass(frozen=True)
class Limits:
    """What an architecture gives: bytes of shared memory of a block, blocks of a cluster."""

    shared: int
    cluster: int

    @classmethod
    def of(cls, capability: tuple[int, int]) -> "Limits":
        shared = _SHARED.get(capability, 99)
        return cls(shared * 1024, _CLUSTER.get(capability[0], 1))


def padded(hidden: int) -> int:
    """H as the kernels see it: a multiple of 8."""
    return -(-hidden // 8) * 8


def _registers(threads: int) -> int:
    # they are given to four warps at a time
    return min(255, 65536 // (-(-threads // 128) * 128) // 8 * 8)


def _fitting(cell: Traced, dtype: str, how: Forward, free: int, limits: Limits) -> Forward | None:
    """With as much of R in registers as `free` of them hold, if the rest fits shared memory."""
    most = max(0, min(cuda.pieces(cell, dtype, how), free // 8))
    made = replace(how, resident=most)
    return made if cuda.shared_bytes(cell, dtype, made) <= limits.shared else None


def forwards(cell: Traced, dtype: str, hidden: int, limits: Limits) -> Iterator[Forward]:
    """Every forward kernel that fits."""
    units = padded(hidden)
    groups = units // 8
    for cluster in (1, 2, 4, 8, 16):
        here = -(-groups // cluster)
        if cluster > limits.cluster or (cluster > 1 and (cluster - 1) * here >= groups):
            continue
        for split in (1, 2):
            for per_warp in (1, 2, 3, 4):
                pairs = -(-here // per_warp)
                if (pairs - 1) * per_warp >= here or pairs * split > 16:
                    continue
                for tiles in (1, 2, 4):
                    for flight in (1, 2):
                        how = Forward(units, cluster, pairs, split, per_warp, tiles, flight, 0)
                        cells = per_warp * tiles * flight * 2 // split
                        rows = cuda.mma_rows(cell, how)
                        sums = 4 * rows * tiles * max(1, 4 // max(1, rows * tiles))
                        extra = cells * (len(cell.states) + len(cell.gates) / flight / 2)
                        free = _registers(how.threads) - 62 - sums - int(extra)
                        fitting = _fitting(cell, dtype, how, free, limits)
                        if fitting is not None:
                            yield fitting


def backwards(cell: Traced, dtype: str, hidden: int, limits: Limits) -> Iterator[Backward]:
    """Every backward kernel that fits."""
    units = padded(hidden)
    groups = units // 8
    for cluster in (1, 2, 4, 8, 16):
        here = -(-groups // cluster)
        if cluster > limits.cluster or (cluster > 1 and (cluster - 1) * here >= groups):
            continue
        for warps in (4, 8, 12, 16):
            for tiles in (1, 2):
                for flight in (1, 2):
                    for parity in (1, 2):
                        how = Backward(units, cluster, warps, here, tiles, flight, parity, 0)
                        slots = -(-here * tiles * parity // warps)
                        cells = slots * 2 // parity
                        rows = cuda.mma_rows(cell, how)
                        sums = 4 * rows * tiles
                        extra = cells * (
                            len(cuda.kept(cell)) + flight * len(cell.states)
                        ) + slots * (len(cuda.planes(cell)) + 2 * len(cell.unit_params))
                        free = _registers(how.threads) - 70 - sums - extra
                        fitting = _fitting(cell, dtype, how, free, limits)  # type: ignore[arg-type]
                        if fitting is not None:
                            yield fitting  # type: ignore[misc]


def cycles(cell: Traced, dtype: str, how: Forward | Backward) -> float:
    """The model's time of one step of one cluster."""
    warps, rows = how.threads // 32, cuda.mma_rows(cell, how)
    slices = cuda.slices(cell, dtype, how)
    quarter = -(-warps // 4)
    products = quarter * rows * slices * 2 * how.tiles * PRODUCT
    others = cuda.pieces(cell, dtype, how) - how.resident
    loads = warps * slices * how.tiles * LOAD + warps * others * 2 * LOAD
    latency = BASE + (EXCHANGE if how.cluster > 1 else 0.0)
    if isinstance(how, Forward):
        cells = quarter * how.per_warp * how.tiles * 2 / how.split * CELL
        latency += 90.0 * (how.split - 1)
    else:
        slots = -(-how.block_groups * how.tiles * how.parity // warps)
        cells = quarter * slots * 2 / how.parity * CELL * 1.5
        parts = how.cluster * how.block_groups * how.tiles * 256
        latency += 100.0 + parts / 32.0
    busy = max(products, loads) + cells
    return max(latency + busy, how.flight * (busy + 150.0))


def _step(cell: Traced, dtype: str, how: Forward | Backward, batch: int) -> float:
    clusters = -(-batch // how.rows)
    together = _RESIDENT[how.cluster]
    return cycles(cell, dtype, how) * -(-clusters // together)


@lru_cache(maxsize=4096)
def forward(
    cell: Traced, dtype: str, hidden: int, batch: int, capability: tuple[int, int]
) -> tuple[Forward, ...]:
    """The forward kernels that fit, fastest by the model first."""
    fitting = forwards(cell, dtype, hidden, Limits.of(capability))
    return tuple(sorted(fitting, key=lambda how: _step(cell, dtype, how, batch)))


@lru_cache(maxsize=4096)
def backward(
    cell: Traced, dtype: str, hidden: int, batch: int, capability: tuple[int, int]
) -> tuple[Backward, ...]:
    """The backward kernels that fit, fastest by the model first."""
    fitting = backwards(cell, dtype, hidden, Limits.of(capability))
    return tuple(sorted(fitting, key=lambda how: _step(cell, dtype, how, batch)))
