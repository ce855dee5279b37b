"""Kernels of a grid, whose clusters share R through L2: those that fit, and a model of their step.

The model counts cycles of one multiprocessor.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from openrnn.codegen.bounds import half_operands
from openrnn.codegen.config import GridBackwardConfig, GridForwardConfig
from openrnn.codegen.trace import Traced
from openrnn.tuning.limits import POWERS_OF_TWO, Limits, filled, registers_of_thread

Config = TypeVar("Config", GridForwardConfig, GridBackwardConfig)

# Of streamed fragments: what L2 keeps of them from step to step, and the bytes that a
# multiprocessor reads in a cycle from L2 and from memory. Fitted to 142 kernels timed alone on an
# H200 (standard deviation 9%), but for the last: that lies between an H200's 20, by the fit, and an
# H100's 14, by its bandwidth.
_L2_KEEPS = 30e6
_L2_RATE, _MEMORY_RATE = 26.0, 16.0
_MOST_FRAGMENTS = 256  # of a warp that streams some: its product is code without a loop
_STREAM_REGISTERS = 34  # of a thread, for fragments on their way and their address


class _GridCosts(NamedTuple):
    """Cycles, fitted to 298 kernels timed alone on an H200 (median errors 4% and 8%)."""

    step: float  # of every step, with its way through L2
    cluster: float  # more, in a cluster
    double: float  # for each doubling of the cluster
    mma: float  # for each mma of a quarter of a multiprocessor
    load: float  # for each 128 bytes of shared memory
    poll: float  # for each poll of L2 by a thread
    l2: float  # for each byte that all blocks fetch
    part: float  # for each byte of partial sums in shared memory
    byte: float  # for each byte of partial sums between blocks
    slot: float  # for each slot of a warp
    cell: float  # more for each slot of a quarter of a multiprocessor
    wgmma: float  # factor on all of it, with wgmma


_FORWARD = _GridCosts(
    step=1909, cluster=137, double=0, mma=0.33, load=1.09, poll=98.7, l2=0, part=0.057, byte=0.039,
    slot=217, cell=0, wgmma=1.32,
)  # fmt: skip
_BACKWARD = _GridCosts(
    step=903, cluster=903, double=189, mma=1.4, load=1.6, poll=97.6, l2=0.00004, part=0.056,
    byte=0.056, slot=0, cell=8.6, wgmma=1.28,
)  # fmt: skip


def _splits(units: int, limits: Limits) -> Iterator[tuple[int, int, int]]:
    """Blocks of a cluster, clusters that share R, and groups of each cluster."""
    for cluster, resident in limits.resident:
        if cluster not in POWERS_OF_TWO:  # others were not measured in grids
            continue
        found = set()
        for copies in (1, 2, 4):  # of R, that the device holds
            if resident // copies < 2:
                continue
            groups = -(-units // 8 // (resident // copies))
            clusters = -(-units // 8 // groups)
            if clusters > 1 and groups not in found:
                found.add(groups)
                yield cluster, clusters, groups


def fitting(
    kind: type[Config], cell: Traced, dtype: str, units: int, limits: Limits
) -> Iterator[Config]:
    """Every kernel of a kind that fits; where none holds all of R, those that stream a part of it.

    These are planned on such devices as they were measured on.
    """
    every: list[Config] = list(_shapes(kind, cell, dtype, units, limits))
    held: list[Config] = []
    for config in every:
        held += filled(cell, dtype, config, _free(cell, config), limits)
    yield from held
    for config in every if limits.has_h200_clusters and not held else []:
        yield from _streaming(cell, dtype, config, limits)


def _shapes(
    kind: type[Config], cell: Traced, dtype: str, units: int, limits: Limits
) -> Iterator[Config]:
    """The ways to share R and the work among blocks and warps."""
    forward = kind.kind == "forward"
    sums_of_unit = len(cell.gates) if forward else 1
    more = {"half_operands": True} if forward and half_operands(cell, dtype) else {}
    for cluster, clusters, groups in _splits(units, limits):
        rows = (groups * sums_of_unit + 1) // 2  # of fragments
        for k_warps in (1, 2, 4, 8):
            sizes = {-(-rows // each) for each in (1, 2, 3, 4)}
            if limits.wgmma:
                sizes |= {-(-warps // 4) * 4 for warps in sizes}
            for m_warps in sorted(sizes):
                warps = m_warps * k_warps
                if not 4 <= warps <= 16:
                    continue
                kinds = [(tiles, False) for tiles in (1, 2, 4, 8)]
                if limits.wgmma and m_warps % 4 == 0:
                    kinds += [(tiles, True) for tiles in (2, 3, 4, 8)]
                for tiles, wgmma in kinds:
                    config = kind(
                        units, cluster, warps, groups, tiles, 1, 0, clusters=clusters,
                        k_warps=k_warps, wgmma=wgmma, delay=_delay(kind, tiles), **more,
                    )  # fmt: skip
                    if config.feeds_all(cell, dtype):
                        yield config


def _streaming(cell: Traced, dtype: str, config: Config, limits: Limits) -> Iterator[Config]:
    """The kernel with as much of R in registers and shared memory as they hold with resets."""
    fragments, free = config.fragments(cell, dtype), _free(cell, config) - _STREAM_REGISTERS
    if config.wgmma or fragments > _MOST_FRAGMENTS:
        return
    held = max(0, min(fragments, free // 8))
    made = replace(config, register_fragments=held, stages=2)
    others = fragments - held
    with_resets = replace(made, streamed_fragments=others, reset=True)
    room = limits.shared - with_resets.shared(cell, dtype)
    if room >= 0:
        yield replace(made, streamed_fragments=others - room // (1024 * config.warps))


def _delay(kind: type[GridForwardConfig] | type[GridBackwardConfig], tiles: int) -> int:
    """Cycles before the first poll: near the best ones measured; more rows take longer."""
    return min(200 * tiles, 600) if kind.kind == "forward" else min(300 * tiles, 800)


def _free(cell: Traced, config: GridForwardConfig | GridBackwardConfig) -> int:
    """Registers of a thread that are left for R."""
    taken = 66 + config.accumulators(cell) + 4 * config.tiles + 24 * (config.slots() - 1)
    return registers_of_thread(config.threads) - taken


def _stream_cycles(config: GridForwardConfig | GridBackwardConfig, blocks: int) -> float:
    """What reading streamed fragments takes."""
    of_block = config.streamed_bytes(1)
    from_l2 = min(1.0, _L2_KEEPS / max(1, of_block * blocks))
    return of_block * (from_l2 / _L2_RATE + (1 - from_l2) / _MEMORY_RATE)


def step_cycles(
    cell: Traced, dtype: str, config: GridForwardConfig | GridBackwardConfig, batch: int,
    limits: Limits,
) -> float:  # fmt: skip
    """The model's time of one step of the whole batch, in cycles."""
    forward = config.kind == "forward"
    cost, sums_of_unit = (_FORWARD, len(cell.gates)) if forward else (_BACKWARD, 1)
    quarter = -(-config.warps // 4)  # warps of a quarter of a multiprocessor
    fragments, k_tiles = config.fragments(cell, dtype), config.k_tiles(cell, dtype)
    fetched = min(config.rows, batch) * k_tiles * config.k_warps * 64
    blocks = config.cluster * config.clusters * min(limits.copies(config), -(-batch // config.rows))
    block_slots = -(-config.groups * config.tiles // config.cluster)
    parts = block_slots * config.cluster * config.k_warps * sums_of_unit * 256
    # the four warps of a warpgroup read their operand once
    readers = config.warps / 4 if config.wgmma else config.warps
    in_memory = fragments - config.register_fragments
    loads = readers * k_tiles * config.tiles * 4 + config.warps * in_memory * 8
    loads += fetched / 32
    found = (
        cost.step + fragments * config.tiles * 2 * quarter * cost.mma + loads * cost.load
        + fetched / 16 / config.threads * cost.poll + fetched * blocks * cost.l2
        + parts * cost.part + config.slots() * (cost.slot + quarter * cost.cell)
    )  # fmt: skip
    if config.cluster > 1:
        found += cost.cluster + cost.double * (config.cluster.bit_length() - 1)
        found += parts * cost.byte
    found += _stream_cycles(config, blocks)
    found *= cost.wgmma if config.wgmma else 1
    return found * limits.rounds(config, batch)
