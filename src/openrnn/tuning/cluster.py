"""Kernels whose R is held by a block or a cluster: which fit, and how long a step takes.

The model's times are cycles of one multiprocessor.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from openrnn.codegen.bounds import halved
from openrnn.codegen.cuda import planes
from openrnn.codegen.tiles import SIZES, Backward, Forward, Tiles, kept
from openrnn.codegen.trace import Traced
from openrnn.tuning.limits import Limits, filled, registers, resident

# Cycles, fitted to 2,200 kernels timed alone on an H200 (median error 7%): what a step always
# takes, what a cluster adds and each doubling of it; then for each dependent pair of mma, mma of a
# quarter of a multiprocessor, 128 bytes of shared memory, cell function of two cells a lane and
# value it reads or gives, byte exchanged, and what float32 functions take more. Where wgmma is
# used, all of it by a factor. Backward's are 0.81 of what was fitted: by so much 500 kernels had
# become faster later.
_FORWARD = {"step": 219, "cluster": 249, "double": 13, "chain": 0, "mma": 6.7, "load": 0.67,
            "cell": 48, "value": 35, "byte": 0.044, "wide": 148, "wgmma": 1.27}  # fmt: skip
_BACKWARD = {"step": 318, "cluster": 0, "double": 4, "chain": 4.5, "mma": 4, "load": 0.85,
             "cell": 97, "value": 26, "byte": 0.055, "wide": 187, "wgmma": 1.23}  # fmt: skip
_WGMMA_TILE, _WGMMA_LEAST = 3.5, 12.0  # of one wgmma for each tile of 8 rows, and at least
HIDDEN = 450.0  # cycles of a step in which another block of the same multiprocessor may run


def _clusters(groups: int, limits: Limits) -> Iterator[tuple[int, int]]:
    """Blocks of a cluster, and how many groups each owns at most."""
    for cluster in (1, 2, 4, 8, 16):
        if cluster <= min(limits.cluster, groups):
            yield cluster, -(-groups // cluster)


def forwards(cell: Traced, dtype: str, units: int, limits: Limits) -> Iterator[Forward]:
    """Every forward kernel of a block or cluster that fits.

    Frugal are those in 16 bits without wgmma where some of R is read from shared memory step by
    step: with registers left the compiler reads ahead. Over 14 kernels of an LSTM and a GRU, H 512
    and 640, that was 6% faster to 2% slower; for others it was mostly slower.
    """
    half = halved(cell, dtype)
    for cluster, here in _clusters(units // 8, limits):
        kinds = [(tiles, flight, 1) for tiles, flight in product((1, 2, 4), (1, 2))]
        kinds += [(tiles, 1, 4) for tiles in (2, 3, 4, 8) if limits.wgmma]
        for per, (tiles, flight, together) in product((1, 2, 3, 4), kinds):
            warps = -(-here // (together * per)) * together
            # a warpgroup without any units would wait for nobody
            idle = together > 1 and units // 8 // cluster <= (warps - together) * per
            if warps > 16 or idle:
                continue
            how = Forward(
                units, cluster, warps, per, tiles, flight, 0, wgmma=together > 1, half=half
            )
            extra = 2 * per * tiles * (flight * len(cell.states) + len(cell.gates) // 2)
            extra += 8 * per * tiles if how.wgmma else 0
            free = registers(how.threads) - 62 - how.sums(cell) - extra
            for made in filled(cell, dtype, how, free, limits):
                overflows = made.resident < made.pieces(cell, dtype)
                ahead = dtype != "float32" and not how.wgmma
                yield replace(made, frugal=overflows and ahead)


def backwards(cell: Traced, dtype: str, units: int, limits: Limits) -> Iterator[Backward]:
    """Every backward kernel of a block or cluster that fits."""
    for cluster, here in _clusters(units // 8, limits):
        kinds = [(tiles, flight, False) for tiles, flight in product((1, 2), (1, 2))]
        kinds += [(tiles, 1, True) for tiles in (2, 3, 4) if limits.wgmma]
        for warps, (tiles, flight, together) in product((4, 8, 12, 16), kinds):
            how = Backward(units, cluster, warps, here, tiles, flight, 0, wgmma=together)
            slots = how.slots()
            sums = 4 * how.mma_rows(cell) * tiles
            extra = 2 * slots * (len(kept(cell)) + flight * len(cell.states))
            extra += slots * (len(planes(cell)) + 2 * len(cell.unit_params))
            free = registers(how.threads) - 70 - sums - extra
            yield from filled(cell, dtype, how, free, limits)


def cycles(cell: Traced, dtype: str, how: Tiles) -> float:
    """The model's time of one step of one tile of one cluster, alone on the device."""
    quarter = -(-how.warps // 4)
    pieces, slices = how.pieces(cell, dtype), how.slices(cell, dtype)
    if isinstance(how, Forward):
        cost, cells, values = _FORWARD, how.per * how.tiles, len(cell.gates)
        exchanged = how.units * how.multiplied(dtype) * how.tiles * 8
    else:
        cost, cells = _BACKWARD, -(-how.per * how.tiles // how.warps)
        values = len(kept(cell)) + len(planes(cell))
        exchanged = how.cluster * how.per * how.tiles * 256
    # four warps that multiply together read their operand once
    readers = how.warps / 4 if how.wgmma else how.warps
    loads = readers * slices * how.tiles * 4 + how.warps * (pieces - how.resident) * 8
    products = how.tiles * (cost["chain"] + 2 * quarter * cost["mma"])
    if how.wgmma:
        products = 2 * quarter * max(_WGMMA_TILE * how.tiles, _WGMMA_LEAST)
    wide = cost["wide"] if SIZES[dtype] == 4 else 0
    found = (
        cost["step"] + pieces * products + loads * cost["load"]
        + cells * (quarter * (cost["cell"] + wide) + values * cost["value"])
    )  # fmt: skip
    if how.cluster > 1:
        found += cost["cluster"] + cost["double"] * (how.cluster.bit_length() - 1)
        found += cost["byte"] * exchanged
    return found * cost["wgmma"] if how.wgmma else found


def _together(cell: Traced, dtype: str, how: Tiles) -> int:
    """Blocks that share a multiprocessor, by registers and shared memory."""
    taken = min(registers(how.threads), 8 * how.resident + 80)
    by_registers = 65536 // (taken * -(-how.threads // 128) * 128)
    by_memory = 227 * 1024 // (how.shared(cell, dtype) + 1024)
    return max(1, min(by_registers, by_memory, 4))


def step_time(cell: Traced, dtype: str, how: Tiles, batch: int) -> float:
    """The model's time of one step of the whole batch, in cycles."""
    alone = cycles(cell, dtype, how)
    busy = alone - HIDDEN
    turn = alone if how.flight == 1 else max(alone, how.flight * busy + HIDDEN / 2)
    clusters, places = -(-batch // how.rows), resident(how.cluster)
    shared = min(_together(cell, dtype, how), -(-clusters // places))
    return max(turn, shared * how.flight * busy) * -(-clusters // (places * shared))
