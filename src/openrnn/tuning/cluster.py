"""Kernels of a block or cluster, which holds all of R: those that fit, and a model of their step.

The model counts cycles of one multiprocessor.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from openrnn.codegen.bounds import half_operands
from openrnn.codegen.config import SIZES, BackwardConfig, ForwardConfig, KernelConfig, saved_names
from openrnn.codegen.cuda import planes
from openrnn.codegen.trace import Traced
from openrnn.tuning.limits import Limits, filled, registers_of_thread


class _ClusterCosts(NamedTuple):
    """Cycles, fitted to 4,990 kernels of LSTMs and GRUs, one loop at a time, on an H200.

    The standard deviation is 10% in forward and 8% in backward. The first of the ranking takes 1.02
    and 1.01 times as long as the quickest, in the mean of 507 and 471 sizes.
    """

    step: float  # of every step
    cluster: float  # more, in a cluster
    chain: float  # for each of two mma that depend on each other
    mma: float  # for each mma of a quarter of a multiprocessor
    load: float  # for each 128 bytes of shared memory
    cell: float  # for each cell function, of two cells a lane
    value: float  # for each value that it reads or gives
    byte: float  # for each byte that is exchanged
    wide: float  # more for each cell function in float32
    wgmma: float  # factor on all of it, with wgmma
    turn: float  # part of a step that one of two tiles in flight takes beside the other


_FORWARD = _ClusterCosts(
    step=170, cluster=86, chain=5.26, mma=3.16, load=0.628, cell=77.6, value=34, byte=0.074,
    wide=177, wgmma=1.14, turn=0.65,
)  # fmt: skip
_BACKWARD = _ClusterCosts(
    step=113, cluster=0, chain=8.9, mma=3.43, load=0.809, cell=157, value=29.6, byte=0.05,
    wide=139, wgmma=1.23, turn=0.87,
)  # fmt: skip
# A second block on a multiprocessor adds nothing to a step of _SPARE cycles, a whole step to one
# that is _FILLED cycles longer, in proportion between them. Three and four were not measured.
_SPARE, _FILLED = 200.0, 3000.0
# Forward kernels were timed with up to 256 rows. With 4,000, two tiles of 16 rows in flight took
# longer than two of 8 (an LSTM of 128 units, row sepa of suite users at 4e5a9e6 and 12bb0c2). Where
# between 256 and 4,000 that begins was not measured.
_MANY_ROWS, _TURN_OF_MANY = 2048, 0.93
_WGMMA_TILE, _WGMMA_LEAST = 3.5, 12.0  # cycles of one wgmma: for each tile of 8 rows; at least


def forwards(cell: Traced, dtype: str, units: int, limits: Limits) -> Iterator[ForwardConfig]:
    """Every forward kernel of a block or cluster that fits.

    In 16 bits without wgmma, a kernel that reads some of R from shared memory is low-register: the
    compiler then reads ahead. For 14 kernels of an LSTM and a GRU, H 512 and 640, that was 6%
    faster to 2% slower; for other kernels it was mostly slower.
    """
    half = half_operands(cell, dtype)
    for cluster, block_groups in limits.splits(units):
        kinds = [(tiles, in_flight, 1) for tiles, in_flight in product((1, 2, 4), (1, 2))]
        kinds += [(tiles, 1, 4) for tiles in (2, 3, 4, 8) if limits.wgmma]
        for groups, (tiles, in_flight, warpgroup) in product((1, 2, 3, 4), kinds):
            wgmma = warpgroup > 1
            warps = -(-block_groups // (warpgroup * groups)) * warpgroup
            # a warpgroup without units would wait for nobody
            idle = wgmma and units // 8 // cluster <= (warps - warpgroup) * groups
            if warps > 16 or idle:
                continue
            config = ForwardConfig(
                units, cluster, warps, groups, tiles, in_flight, 0, wgmma=wgmma, half_operands=half
            )
            states = 2 * groups * tiles * (in_flight * len(cell.states) + len(cell.gates) // 2)
            states += 8 * groups * tiles if wgmma else 0
            free = registers_of_thread(config.threads) - 62 - config.accumulators(cell) - states
            for made in filled(cell, dtype, config, free, limits):
                overflows = made.register_fragments < made.fragments(cell, dtype)
                reads_ahead = dtype != "float32" and not wgmma
                yield replace(made, low_register=overflows and reads_ahead)


_ONE_BLOCK = 24  # units


def backwards(cell: Traced, dtype: str, units: int, limits: Limits) -> Iterator[BackwardConfig]:
    """Every backward kernel of a block or cluster that fits.

    Up to _ONE_BLOCK units a block alone, for every cell: of an LSTM of 24 units, B 4, a step of
    training took 0.05 us more with clusters of three (row nam-long of suite users on an H200,
    4e5a9e6 and 12bb0c2).
    """
    for cluster, groups in limits.splits(units):
        if cluster > 1 and units <= _ONE_BLOCK:
            continue
        kinds = [(tiles, in_flight, False) for tiles, in_flight in product((1, 2), (1, 2))]
        kinds += [(tiles, 1, True) for tiles in (2, 3, 4) if limits.wgmma]
        for warps, (tiles, in_flight, wgmma) in product((4, 8, 12, 16), kinds):
            config = BackwardConfig(units, cluster, warps, groups, tiles, in_flight, 0, wgmma=wgmma)
            slots = config.slots()
            sums = 4 * config.mma_rows(cell) * tiles
            values = 2 * slots * (len(saved_names(cell)) + in_flight * len(cell.states))
            values += slots * (len(planes(cell)) + 2 * len(cell.unit_params))
            free = registers_of_thread(config.threads) - 70 - sums - values
            yield from filled(cell, dtype, config, free, limits)


def cell_work(cell: Traced, dtype: str, config: KernelConfig) -> tuple[int, int, int]:
    """What follows the products of a step.

    Returns:
        Cell functions, one after the other; values that each reads or gives; bytes that the blocks
        of a cluster exchange.
    """
    if isinstance(config, ForwardConfig):
        exchanged = config.units * config.operand_bytes(dtype) * config.tiles * 8
        return config.groups * config.tiles, len(cell.gates), exchanged
    cells = -(-config.groups * config.tiles // config.warps)
    values = len(saved_names(cell)) + len(planes(cell))
    return cells, values, config.cluster * config.groups * config.tiles * 256


def _costs(config: KernelConfig) -> _ClusterCosts:
    return _FORWARD if isinstance(config, ForwardConfig) else _BACKWARD


def cycles(cell: Traced, dtype: str, config: KernelConfig) -> float:
    """The model's time of one step of one cluster for one set of rows, alone on the device."""
    quarter = -(-config.warps // 4)  # warps of a quarter of a multiprocessor
    fragments, k_tiles = config.fragments(cell, dtype), config.k_tiles(cell, dtype)
    cost = _costs(config)
    cells, values, exchanged = cell_work(cell, dtype, config)
    # the four warps of a warpgroup read their operand once
    readers = config.warps / 4 if config.wgmma else config.warps
    in_memory = fragments - config.register_fragments
    loads = readers * k_tiles * config.tiles * 4 + config.warps * in_memory * 8
    products = config.tiles * (cost.chain + 2 * quarter * cost.mma)
    if config.wgmma:
        products = 2 * quarter * max(_WGMMA_TILE * config.tiles, _WGMMA_LEAST)
    wide = cost.wide if SIZES[dtype] == 4 else 0
    found = (
        cost.step + fragments * products + loads * cost.load
        + cells * (quarter * (cost.cell + wide) + values * cost.value)
    )  # fmt: skip
    if config.cluster > 1:
        found += cost.cluster + cost.byte * exchanged
    return found * cost.wgmma if config.wgmma else found


def blocks_of_multiprocessor(cell: Traced, dtype: str, config: KernelConfig, limits: Limits) -> int:
    """Blocks that share a multiprocessor, by registers and shared memory."""
    taken = min(registers_of_thread(config.threads), 8 * config.register_fragments + 80)
    by_registers = 65536 // (taken * -(-config.threads // 128) * 128)
    by_memory = limits.shared // (config.shared(cell, dtype) + 1024)
    return max(1, min(by_registers, by_memory, 4))


def step_cycles(
    cell: Traced, dtype: str, config: KernelConfig, batch: int, limits: Limits
) -> float:
    """The model's time of one step of the whole batch, in cycles."""
    clusters, resident = -(-batch // config.rows), limits.expected_clusters(config.cluster)
    shared = min(blocks_of_multiprocessor(cell, dtype, config, limits), -(-clusters // resident))
    alone = cycles(cell, dtype, config)
    cost = _costs(config)
    many = config.kind == "forward" and config.tiles > 1 and batch >= _MANY_ROWS
    turn = _TURN_OF_MANY if many else cost.turn
    several = 1 + turn * (config.tiles_in_flight - 1)
    further = (shared - 1) * min(1.0, max(0.0, alone - _SPARE) / _FILLED)
    return alone * several * (1 + further) * -(-clusters // (resident * shared))
