"""What an architecture gives a kernel: registers, shared memory, clusters of blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from openrnn.codegen.config import KernelConfig, ceil_div
from openrnn.codegen.trace import Traced

Config = TypeVar("Config", bound=KernelConfig)

# KiB of shared memory that a block may take; blocks of the largest cluster
_SHARED = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227,
           (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99}  # fmt: skip
_CLUSTER = {9: 16, 10: 16, 11: 8, 12: 8}
# Blocks of a cluster, and how many such clusters an H200 holds at once, one block a multiprocessor.
# Not planned: 9 blocks, of which it holds 9, and 11, 13 and 15, of which it holds as many as of 16.
_H200 = (
    (1, 132), (2, 66), (3, 39), (4, 30), (5, 22), (6, 17), (7, 15), (8, 15),
    (10, 7), (12, 7), (14, 7), (16, 7),
)  # fmt: skip
_SIZES = tuple(size for size, _ in _H200)
POWERS_OF_TWO = (1, 2, 4, 8, 16)  # the sizes that are planned where no others were measured
# All clusters of a grid must be resident, so grids need this count. It was made on H200s; devices
# of 10.0 and 10.3 are assumed to hold as many.
_RESIDENT = {(8, 0): ((1, 108),), (9, 0): _H200, (10, 0): _H200, (10, 3): _H200}


@dataclass(frozen=True)
class Limits:
    """What a compute capability gives.

    Args:
        shared: bytes of shared memory of a block.
        cluster: blocks of the largest cluster.
        resident: blocks of a cluster, and how many such clusters a grid may have.
        wgmma: four warps may multiply as one warpgroup.
    """

    shared: int
    cluster: int
    resident: tuple[tuple[int, int], ...]
    wgmma: bool

    @classmethod
    def of(cls, capability: tuple[int, int], processors: int | None = None) -> "Limits":
        """`processors`: multiprocessors of the device, where it is known; a MIG slice has fewer."""
        shared, resident = _SHARED.get(capability, 99), _RESIDENT.get(capability, ())
        if processors is not None and resident:
            whole = resident[0][1]
            resident = tuple((size, count * processors // whole) for size, count in resident)
        cluster = _CLUSTER.get(capability[0], 1)
        return cls(shared * 1024, cluster, resident, capability == (9, 0))

    def clusters(self, size: int) -> int:
        """How many clusters of so many blocks the device holds at once; 0 where it is not known."""
        return dict(self.resident).get(size, 0)

    def expected_clusters(self, size: int) -> int:
        """The same for models of kernels that need not be resident; at least 1.

        Where it is not known, an H200's.
        """
        return max(1, dict(self.resident or _H200)[size])

    def copies(self, config: KernelConfig) -> int:
        """How many copies of R a kernel whose blocks are resident has at once."""
        return self.clusters(config.cluster) // config.clusters

    def rounds(self, config: KernelConfig, batch: int) -> int:
        """How many times, one after the other, all of its blocks run for a batch."""
        return ceil_div(batch, config.rows * self.copies(config))

    @property
    def has_h200_clusters(self) -> bool:
        """Whether this is a whole device of 9.0 with as many multiprocessors as an H200."""
        return self.wgmma and self.resident == _H200

    def splits(self, units: int) -> Iterator[tuple[int, int]]:
        """Blocks of a cluster that holds all of R, and the most groups that one of them owns."""
        groups = units // 8
        for cluster in _SIZES if self.has_h200_clusters else POWERS_OF_TWO:
            if cluster <= min(self.cluster, groups):
                yield cluster, -(-groups // cluster)


def registers_of_thread(threads: int) -> int:
    """Registers of a thread in such a block; the device gives them to four warps at a time."""
    return min(255, 65536 // (-(-threads // 128) * 128) // 8 * 8)


def filled(cell: Traced, dtype: str, config: Config, free: int, limits: Limits) -> Iterator[Config]:
    """The configuration with as many fragments of R in registers as `free` registers hold.

    Nothing, where shared memory does not hold the rest.
    """
    most = max(0, min(config.fragments(cell, dtype), free // 8))
    for stages in (4, 2):
        made = replace(config, register_fragments=most, stages=stages)
        if made.shared(cell, dtype) <= limits.shared:
            yield made
            return
