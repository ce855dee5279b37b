"""Tiles of kernels whose clusters share R through L2: what fits, and a model of a step's time."""

from collections.abc import Iterator
from typing import TypeVar

from openrnn.codegen.bounds import halved
from openrnn.codegen.tiles import GridBackward, GridForward
from openrnn.codegen.trace import Traced
from openrnn.tuning.limits import Limits, filled, registers

How = TypeVar("How", GridForward, GridBackward)

# Cycles of an H200's multiprocessor, fitted to 298 kernels timed alone (median errors 4% and 8%):
# of a step with its way through L2, what a cluster adds and each doubling of it; then for each mma
# of a quarter of a multiprocessor, 128 bytes of shared memory, look at L2 a thread, byte that all
# blocks fetch, byte of sums' parts in shared memory and between blocks, slot of a warp and quarter;
# with wgmma, all of it by a factor.
_FORWARD = {"step": 1909, "cluster": 137, "double": 0, "mma": 0.33, "load": 1.09, "look": 98.7,
            "l2": 0, "part": 0.057, "byte": 0.039, "slot": 217, "cell": 0,
            "wgmma": 1.32}  # fmt: skip
_BACKWARD = {"step": 903, "cluster": 903, "double": 189, "mma": 1.4, "load": 1.6, "look": 97.6,
             "l2": 0.00004, "part": 0.056, "byte": 0.056, "slot": 0, "cell": 8.6,
             "wgmma": 1.28}  # fmt: skip


def _splits(groups: int, limits: Limits) -> Iterator[tuple[int, int, int]]:
    """Blocks of a cluster, clusters, and groups of each."""
    for cluster, places in limits.places:
        found = set()
        for share in (1, 2, 4):  # of the device, for one copy of R
            if places // share < 2:
                continue
            per = -(-groups // (places // share))
            clusters = -(-groups // per)
            if clusters > 1 and per not in found:
                found.add(per)
                yield cluster, clusters, per


def fitting(kind: type[How], cell: Traced, dtype: str, units: int, limits: Limits) -> Iterator[How]:
    """Every kernel of a kind that fits."""
    forward = kind.kind == "forward"
    each = len(cell.gates) if forward else 1  # sums of a unit
    more = {"half": True} if forward and halved(cell, dtype) else {}
    for cluster, clusters, per in _splits(units // 8, limits):
        blocks = (per * each + 1) // 2  # of 16 rows
        for k_warps in (1, 2, 4, 8):
            sizes = {-(-blocks // rows) for rows in (1, 2, 3, 4)}
            if limits.wgmma:
                sizes |= {-(-warps // 4) * 4 for warps in sizes}
            for m_warps in sorted(sizes):
                warps = m_warps * k_warps
                if not 4 <= warps <= 16:
                    continue
                kinds = [(tiles, False) for tiles in (1, 2, 4, 8)]
                if limits.wgmma and m_warps % 4 == 0:
                    kinds += [(tiles, True) for tiles in (2, 3, 4, 8)]
                for tiles, together in kinds:
                    how = kind(
                        units, cluster, warps, per, tiles, 1, 0, clusters=clusters,
                        k_warps=k_warps, wgmma=together, delay=_delay(kind, tiles), **more,
                    )  # fmt: skip
                    if how.feeds_all(cell, dtype):
                        yield from filled(cell, dtype, how, _free(cell, how), limits)


def _delay(kind: type[GridForward] | type[GridBackward], tiles: int) -> int:
    """Cycles before the first look: about the best constants, as more rows take others longer."""
    return min(200 * tiles, 600) if kind.kind == "forward" else min(300 * tiles, 800)


def _free(cell: Traced, how: GridForward | GridBackward) -> int:
    """Registers of a thread that are left for R."""
    return registers(how.threads) - 66 - how.sums(cell) - 4 * how.tiles - 24 * (how.slots() - 1)


def step_time(
    cell: Traced, dtype: str, how: GridForward | GridBackward, batch: int, limits: Limits
) -> float:
    """The model's time of one step of the whole batch, in cycles."""
    cost, each = (_FORWARD, len(cell.gates)) if how.kind == "forward" else (_BACKWARD, 1)
    quarter = -(-how.warps // 4)
    pieces, slices = how.pieces(cell, dtype), how.slices(cell, dtype)
    groups = dict(limits.places)[how.cluster] // how.clusters  # of rows at once
    fetched = min(how.rows, batch) * slices * how.k_warps * 64
    blocks = how.cluster * how.clusters * min(groups, -(-batch // how.rows))
    parts = -(-how.per * how.tiles // how.cluster) * how.cluster * how.k_warps * each * 256
    readers = how.warps / 4 if how.wgmma else how.warps  # four that multiply together read once
    loads = readers * slices * how.tiles * 4 + how.warps * (pieces - how.resident) * 8
    loads += fetched / 32
    found = (
        cost["step"] + pieces * how.tiles * 2 * quarter * cost["mma"] + loads * cost["load"]
        + fetched / 16 / how.threads * cost["look"] + fetched * blocks * cost["l2"]
        + parts * cost["part"] + how.slots() * (cost["slot"] + quarter * cost["cell"])
    )  # fmt: skip
    if how.cluster > 1:
        found += cost["cluster"] + cost["double"] * (how.cluster.bit_length() - 1)
        found += parts * cost["byte"]
    found *= cost["wgmma"] if how.wgmma else 1
    return found * -(-batch // (how.rows * groups))
