"""Kernels to which TMA brings the product's operand: those that fit, and a model of their step."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeVar

from openrnn.codegen.bounds import half_operands
from openrnn.codegen.config import KernelConfig
from openrnn.codegen.multicast_config import (
    MulticastBackwardConfig,
    MulticastConfig,
    MulticastForwardConfig,
)
from openrnn.codegen.tiles import whole_tiles
from openrnn.codegen.trace import Traced
from openrnn.tuning.limits import Limits

Config = TypeVar("Config", bound=MulticastConfig)

# Blocks of a cluster that has one part of K, and so shares a copy: the largest clusters that reach
# all multiprocessors.
CLUSTER = 2
# Blocks of a cluster that has all K_PARTS blocks of some groups, by K_PARTS, the better ones first.
CLUSTERS = {1: (), 2: (4, 2), 4: (8, 4)}
# sets of rows, which take turns; the better ones first, where the model sees no difference
SETS = 4, 3, 2
TILES = (2, 3, 4)  # of 8 rows, in a set
K_PARTS = (1, 2, 4)  # of backward's K
WARPS = 16  # three warpgroups that multiply or compute cells, one that copies and publishes
# fragments of R that a warp holds in registers; more where shared memory has too little room;
# by the number of warpgroups that multiply
FRAGMENTS: dict[str, dict[int, tuple[int, ...]]] = {
    "forward": {2: (14, 16)}, "backward": {2: (12, 14, 15, 16), 1: (18, 20, 22, 24)},
}  # fmt: skip
MOST_FRAGMENTS = {2: 15, 1: 20}  # in backward with four tiles, whose cells need the registers
_HELD = 14 * 64  # values of a row in registers: 14 fragments of 32 in each of two warpgroups
MOST_SUMS = 8  # of 8 units each, that a block computes: the rows of a warpgroup's product


class _Costs(NamedTuple):
    """Cycles of a step.

    Attributes:
        step: whatever the sizes.
        tile: for each tile of all sets; value: for each value of a row of R in a block.
    """

    step: float
    tile: float
    value: float


class _ForwardStackCosts(NamedTuple):
    """Cycles of a step where one launch runs several layers, forward.

    Attributes:
        step, tile: as in `_Costs`; set: for each set.
        in_registers, in_shared: for each value of a row of W_ih and R, by where a block holds it.
    """

    step: float
    tile: float
    set: float
    in_registers: float
    in_shared: float


class _BackwardStackCosts(NamedTuple):
    """Cycles of a step where one launch runs several layers, backward; two blocks share K.

    Attributes:
        step, tile, value: as in `_Costs`, the messages of these blocks in `step`; set: for each.
        four_blocks: what four blocks that share K add.
        slot: for each set, each slot of a warp beyond two, whose cells spill.
    """

    step: float
    tile: float
    set: float
    value: float
    four_blocks: float
    slot: float


# Of LSTMs, timed alone on an H100: forward fitted to 46 kernels, H 512 to 1536 (standard deviation
# 7%), backward by hand to a dozen, H 512 to 1280. Kernels that spill in their loop take up to twice
# as long. Backward by the number of warpgroups that multiply
_FORWARD = _Costs(step=1180.0, tile=430.0, value=2.45)
_BACKWARD = {1: _Costs(700.0, 500.0, 2.3), 2: _Costs(900.0, 690.0, 2.6)}
_MESSAGES = 1240.0  # of blocks that share K
# What a step saves where these blocks are of one cluster, by their number: the mean of four and of
# nine kernels, H 256 to 1536, on an H200
_SAVED_IN_CLUSTER = {2: 450.0, 4: 900.0}
# Fitted to 186 kernels of 21 stacks of LSTMs and GRUs, H 256 to 640, B 32 to 128 (standard
# deviation 6%; where the kernel of the first rank was not the quickest, it took at most 5% longer)
_FORWARD_STACK = _ForwardStackCosts(
    step=1830.0, tile=270.0, set=130.0, in_registers=1.9, in_shared=4.6
)
_BACKWARD_STACK = {
    1: _BackwardStackCosts(1750.0, 534.0, 244.0, 2.66, 291.0, 758.0),
    2: _BackwardStackCosts(1285.0, 706.0, 1033.0, 1.92, -1136.0, 480.0),
}


# Beyond these a stack's forward was as quick at most as a wavefront or layer by layer (2 x 768,
# 8 x 256 at B 16), or nothing was measured; backward of 2 x 768 took 0.86 of the time, and is not
# taken.
_LEAST_STACK_BATCH, _STACK_UNITS = 32, range(256, 641)


def knows_stack(units: int, batch: int) -> bool:
    """Whether stacks of such sizes, by tiles of 8 rows, were measured."""
    return whole_tiles(batch) >= _LEAST_STACK_BATCH and units in _STACK_UNITS


def forwards(
    cell: Traced, dtype: str, units: int, limits: Limits, layers: int = 1
) -> Iterator[MulticastForwardConfig]:
    """Every such forward kernel that fits, of so many layers at once."""
    groups = max(1, MOST_SUMS // len(cell.gates))  # of a block
    half = half_operands(cell, dtype)
    clusters = _clusters(units, groups, CLUSTER, limits, layers)
    if len(cell.gates) > MOST_SUMS or not clusters:
        return
    for sets, tiles in product(SETS, TILES):
        config = MulticastForwardConfig(
            units, CLUSTER, WARPS, groups * CLUSTER, tiles, sets, 0, 2, True, low_register=True,
            clusters=clusters, half_operands=half, layers=layers,
        )  # fmt: skip
        yield from _filled(config, cell, dtype, limits)


def backwards(
    cell: Traced, dtype: str, units: int, limits: Limits, layers: int = 1
) -> Iterator[MulticastBackwardConfig]:
    """Every such backward kernel that fits, of so many layers at once."""
    # A block copies its part of K in two halves. Of one layer both are its own gate gradients, so
    # these are cut into as many splits; in a stack one half is another layer's.
    halves = 2 if layers == 1 else 1
    for k_parts in K_PARTS:
        groups = MOST_SUMS // k_parts  # of a block
        # a split has the units of whole blocks, and whole tiles of K, of 32 values each
        splits = halves * k_parts
        if units % (8 * splits * groups) or units * len(cell.gates) % (32 * splits):
            continue
        # sums through memory, and inside clusters of several sizes
        ways = [(CLUSTER, False), *((size, True) for size in CLUSTERS[k_parts])]
        for sets, tiles, k_warpgroups in product(SETS, TILES, (1, 2)):
            if sets % 2 and k_warpgroups == 1:
                continue  # two warpgroups for cells have as many sets
            for cluster, inside in ways:
                clusters = _clusters(units, groups, cluster, limits, layers)
                if not clusters or (not inside and clusters // layers % k_parts):
                    continue
                config = MulticastBackwardConfig(
                    units, cluster, WARPS, groups * cluster, tiles, sets, 0, 2, True,
                    low_register=True, clusters=clusters, k_parts=k_parts, layers=layers,
                    k_warpgroups=k_warpgroups, parts_in_cluster=inside,
                )  # fmt: skip
                yield from _filled(config, cell, dtype, limits)


def _clusters(units: int, groups: int, cluster: int, limits: Limits, layers: int) -> int:
    """How many clusters hold R, with so many groups of 8 units a block; 0: not such a kernel."""
    clusters, rest = divmod(units, 8 * groups * cluster)
    some = 1 < clusters * layers <= limits.clusters(cluster)
    fits = limits.wgmma and not rest and units % 64 == 0 and some
    return clusters * layers if fits else 0


def _filled(config: Config, cell: Traced, dtype: str, limits: Limits) -> Iterator[Config]:
    """The kernel with as much of R in registers as they hold, where it fits.

    With two sets a second buffer of the operand would be waited for as long as the first one.
    """
    if config.operand_bytes(dtype) != 2:
        return
    fragments, most = config.fragments(cell, dtype), FRAGMENTS[config.kind][config.k_warpgroups]
    if config.kind == "backward" and config.tiles == 4:
        most = tuple(held for held in most if held <= MOST_FRAGMENTS[config.k_warpgroups])
    buffers = (2, 1) if config.tiles_in_flight > 2 else (1,)
    for number, held in product(buffers, most):
        made = replace(config, buffers=number, register_fragments=min(fragments, held))
        if made.shared(cell, dtype) <= limits.shared:
            yield made
            return


def inside_cluster(
    config: KernelConfig, every: Iterable[KernelConfig], batch: int, limits: Limits
) -> MulticastBackwardConfig | None:
    """Of `every` the kernel with the same tiles that has the blocks which share K in one cluster.

    None where there is none, or it needs more rounds, or has fewer buffers. Most of the measured
    table was made before there were such kernels. On an H200 ten pairs, H 384 to 1536, took 0.81 to
    0.95 of the other's time ("Sums through shared memory" in benchmarks/log/cuda-experiments.md).
    """
    if not isinstance(config, MulticastBackwardConfig) or config.parts_in_cluster:
        return None

    def shape(one: MulticastBackwardConfig) -> tuple[int, ...]:
        return one.tiles, one.tiles_in_flight, one.k_parts, one.k_warpgroups

    rounds = limits.rounds(config, batch)
    return next(
        (one for one in every
         if isinstance(one, MulticastBackwardConfig) and one.parts_in_cluster
         and shape(one) == shape(config) and one.buffers >= config.buffers
         and limits.rounds(one, batch) <= rounds),
        None,
    )  # fmt: skip


def saved_inside(config: KernelConfig, batch: int, limits: Limits) -> float:
    """Cycles of a step that a kernel saves whose blocks that share K are of one cluster."""
    if not isinstance(config, MulticastBackwardConfig) or not config.parts_in_cluster:
        return 0.0
    return _SAVED_IN_CLUSTER[config.k_parts] * limits.rounds(config, batch)


def step_cycles(cell: Traced, config: MulticastConfig, batch: int, limits: Limits) -> float:
    """The model's time of one step of the whole batch, in cycles."""
    sets, values = config.tiles_in_flight, config.k_of_block(cell)
    tiles = config.tiles * sets
    if config.layers > 1 and config.kind == "forward":
        forward, inside = _FORWARD_STACK, min(values, _HELD)
        once = forward.step + forward.tile * tiles + forward.set * sets
        once += forward.in_registers * inside + forward.in_shared * (values - inside)
    elif config.layers > 1:
        backward = _BACKWARD_STACK[config.k_warpgroups]
        once = backward.step + backward.tile * tiles + backward.set * sets
        once += backward.value * values
        once += {1: -_MESSAGES, 2: 0.0, 4: backward.four_blocks}[config.k_parts]
        once += backward.slot * sets * max(0, config.slots() - 2)
    else:
        costs = _FORWARD if config.kind == "forward" else _BACKWARD[config.k_warpgroups]
        once = costs.step + costs.tile * tiles + costs.value * values
        once += _MESSAGES if config.k_parts > 1 else 0.0
    return once * limits.rounds(config, batch) - saved_inside(config, batch, limits)
