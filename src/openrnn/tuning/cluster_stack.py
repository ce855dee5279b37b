"""Kernels that run each layer of a stack in clusters of its own: those that fit, and a model."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, TypeVar

from openrnn.codegen.bounds import half_operands
from openrnn.codegen.cluster_stack_config import (
    ClusterStackBackwardConfig,
    ClusterStackConfig,
    ClusterStackForwardConfig,
)
from openrnn.codegen.config import SIZES, ForwardConfig
from openrnn.codegen.trace import Traced
from openrnn.tuning.cluster import cell_work
from openrnn.tuning.limits import Limits, filled, registers_of_thread

Config = TypeVar("Config", bound=ClusterStackConfig)

_MOST_ARGUMENT_BYTES = 32764  # of a kernel
_MOST_WARPS = 8  # of the loop: a block has twice as many, and threads need registers


class _Costs(NamedTuple):
    """Cycles of a step, fitted to 361 kernels of forward and 260 of backward, of 63 stacks.

    These are of stacks-clusters.jsonl (H100) and stack-polls.jsonl (H200) in benchmarks/log, but
    for kernels that share multiprocessors, and those of backward that had more than one round of
    polls before there were rounds of 12. The stacks are LSTMs, GRUs and RNNs, H 40 to 512, B 1 to
    256, in bfloat16 and float32. The standard deviation is 7% in forward and 8% in backward.
    """

    step: float  # of every step
    cluster: float  # more, in a cluster
    wide_cluster: float  # and in one of more than 8 blocks
    layer: float  # for each layer
    mma: float  # for each mma of a quarter of a multiprocessor
    load: float  # for each 128 bytes of shared memory
    cell: float  # for each cell function, of two cells a lane
    value: float  # for each value that it reads or gives
    wide: float  # more for each cell function in float32
    byte: float  # for each byte that blocks exchange
    poll: float  # for each poll of a thread
    round: float  # for each round of its polls after the first
    device: float  # more where blocks fill the device
    float32: float  # factor on all of it in float32


_FORWARD = _Costs(
    step=115, cluster=166, wide_cluster=144, layer=62, mma=5.4, load=0.88, cell=60, value=50,
    wide=155, byte=0.044, poll=26, round=915, device=37, float32=0.95,
)  # fmt: skip
_BACKWARD = _Costs(
    step=235, cluster=0, wide_cluster=0, layer=36, mma=8.8, load=1.02, cell=85, value=26,
    wide=0, byte=0.066, poll=54, round=226, device=61, float32=1.35,
)  # fmt: skip
# registers of a thread besides R: an input warp holds what it polls for
_TAKEN = 72


# The most units by default, by bytes of a value. Beyond 512 W_ih and R together hardly fit a
# cluster. Backward in tf32 was slower than the other way in seven stacks of H 160 to 384, and by 4%
# in one of two of up to 128 (part whole of benchmarks/log/stack-polls.jsonl).
_MOST_UNITS = {"forward": {2: 512, 4: 512}, "backward": {2: 512, 4: 128}}


def knows(kind: str, dtype: str, units: int) -> bool:
    """Whether such stacks were measured, and quicker."""
    return units <= _MOST_UNITS[kind][SIZES[dtype]]


def forwards(
    cell: Traced, dtype: str, units: int, limits: Limits, layers: int
) -> Iterator[ClusterStackForwardConfig]:
    """Every such forward kernel that fits."""
    half = half_operands(cell, dtype)
    for blocks, block_groups in _splits(units, limits):
        for groups, tiles in product((1, 2, 3, 4), (1, 2)):
            warps = -(-block_groups // groups)
            if warps > _MOST_WARPS or (groups > 1 and block_groups < groups):
                continue
            config = ClusterStackForwardConfig(
                units, blocks, warps, groups, tiles, 1, 0, half_operands=half, layers=layers
            )
            states = 2 * groups * tiles * (len(cell.states) + len(cell.gates) // 2)
            yield from _filled(config, cell, dtype, states, limits)


def backwards(
    cell: Traced, dtype: str, units: int, limits: Limits, layers: int
) -> Iterator[ClusterStackBackwardConfig]:
    """Every such backward kernel that fits."""
    for blocks, groups in _splits(units, limits):
        for warps, tiles in product((2, 4, 8), (1, 2)):
            config = ClusterStackBackwardConfig(
                units, blocks, warps, groups, tiles, 1, 0, layers=layers
            )
            slots = config.slots()
            states = slots * 2 * len(cell.states) + slots * 3 * len(cell.gates)
            yield from _filled(config, cell, dtype, states, limits)


def _splits(units: int, limits: Limits) -> Iterator[tuple[int, int]]:
    """See `Limits.splits`; none on devices other than those of 9.0, where nothing was measured."""
    return limits.splits(units) if limits.wgmma else iter(())


def _filled(
    config: Config, cell: Traced, dtype: str, states: int, limits: Limits
) -> Iterator[Config]:
    """The kernel with as much of R in registers as they hold, where the device holds a copy."""
    fits = config.argument_bytes(cell) <= _MOST_ARGUMENT_BYTES
    if not fits or config.layers > limits.clusters(config.cluster):
        return
    taken = _TAKEN + config.accumulators(cell) + states
    yield from filled(cell, dtype, config, registers_of_thread(config.threads) - taken, limits)


def step_cycles(
    cell: Traced, dtype: str, config: ClusterStackConfig, batch: int, limits: Limits
) -> float:
    """The model's time of one step of the whole batch, in cycles.

    It counts cycles of one multiprocessor, on which both halves of a block share what it can do.
    """
    quarter = max(1.0, config.warps / 2)  # warps of a quarter of a multiprocessor
    fragments, k_tiles = config.fragments(cell, dtype), config.k_tiles(cell, dtype)
    cells, values, exchanged = cell_work(cell, dtype, config)
    cost = _FORWARD if isinstance(config, ForwardConfig) else _BACKWARD
    in_memory = fragments + config.input_fragments(cell, dtype)
    in_memory -= config.register_fragments + config.input_register_fragments(cell, dtype)
    loads = config.warps * (2 * k_tiles * config.tiles * 4 + in_memory * 8)
    wide = cost.wide if SIZES[dtype] == 4 else 0.0
    found = cost.step + config.layers * cost.layer
    found += cost.cluster if config.cluster > 1 else 0.0
    found += cost.wide_cluster if config.cluster > 8 else 0.0
    found += fragments * config.tiles * quarter * cost.mma + loads * cost.load
    found += cells * (quarter * (cost.cell + wide) + values * cost.value)
    found += exchanged * cost.byte + config.polls(cell, dtype) * cost.poll
    found += (config.poll_rounds(cell, dtype) - 1) * cost.round
    blocks = config.layers * -(-batch // config.rows) * config.cluster
    found += cost.device * min(1.0, blocks / limits.clusters(1))
    found *= cost.float32 if SIZES[dtype] == 4 else 1.0
    return found * limits.rounds(config, batch)
