"""Kernels to which TMA brings the product's operand: those that fit, and a model of their step."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from openrnn.codegen.bounds import half_operands
from openrnn.codegen.multicast_config import (
    MulticastBackwardConfig,
    MulticastConfig,
    MulticastForwardConfig,
)
from openrnn.codegen.trace import Traced
from openrnn.tuning.limits import Limits

Config = TypeVar("Config", bound=MulticastConfig)

CLUSTER = 2  # blocks that share a copy: the largest clusters that reach all multiprocessors
SETS = 2  # of rows, which take turns
TILES = (2, 3, 4, 6, 8)  # of 8 rows, in a set
K_PARTS = (1, 2, 4)  # of backward's K
WARPS = 12  # two warpgroups that compute, four warps more
MOST_FRAGMENTS = 16  # of R that a warp holds in registers
MOST_SUMS = 8  # of 8 units each, that a block computes: the rows of a warpgroup's product
# cycles of a step: fixed, for each tile of all sets, and for each value of a row of R in a block;
# more where blocks share K. Fitted to 399 and 184 kernels of LSTMs, GRUs and plain RNNs, H 512 to
# 2560, timed alone on an H200: standard deviations of 6 and 7%. Kernels that spill take up to 30%
# longer, as do those of float32 that save activations
_FORWARD = 2500.0, 360.0, 2.8
_BACKWARD = 3500.0, 475.0, 1.8
_MESSAGES = 2350.0


def forwards(
    cell: Traced, dtype: str, units: int, limits: Limits
) -> Iterator[MulticastForwardConfig]:
    """Every such forward kernel that fits."""
    groups = max(1, MOST_SUMS // len(cell.gates))  # of a block
    half = half_operands(cell, dtype)
    if len(cell.gates) > MOST_SUMS or not (clusters := _clusters(units, groups, limits)):
        return
    for tiles in TILES:
        config = MulticastForwardConfig(
            units, CLUSTER, WARPS, groups * CLUSTER, tiles, SETS, 0, 2, True, clusters=clusters,
            half_operands=half,
        )  # fmt: skip
        yield from _filled(config, cell, dtype, limits)


def backwards(
    cell: Traced, dtype: str, units: int, limits: Limits
) -> Iterator[MulticastBackwardConfig]:
    """Every such backward kernel that fits."""
    for k_parts in K_PARTS:
        groups = MOST_SUMS // k_parts  # of a block
        # half a part of K is of whole blocks and of whole tiles of 4 groups of 8 units
        uneven = units % (16 * k_parts * groups) or units * len(cell.gates) % (64 * k_parts)
        if uneven or not (clusters := _clusters(units, groups, limits)) or clusters % k_parts:
            continue
        for tiles in TILES:
            config = MulticastBackwardConfig(
                units, CLUSTER, WARPS, groups * CLUSTER, tiles, SETS, 0, 2, True,
                clusters=clusters, k_parts=k_parts, low_register=True,
            )  # fmt: skip
            yield from _filled(config, cell, dtype, limits)


def _clusters(units: int, groups: int, limits: Limits) -> int:
    """How many clusters share R, with so many groups of 8 units a block; 0: not such a kernel."""
    clusters, rest = divmod(units, 8 * groups * CLUSTER)
    some = 1 < clusters <= limits.clusters(CLUSTER)
    fits = limits.wgmma and not rest and units % 64 == 0 and some
    return clusters if fits else 0


def _filled(config: Config, cell: Traced, dtype: str, limits: Limits) -> Iterator[Config]:
    """The kernel with as much of R in registers as they hold, where it fits."""
    one_group = config.tiles % config.slots() == 0  # of units, whose cells a warp has
    if config.operand_bytes(dtype) != 2 or not one_group:
        return
    held = min(config.fragments(cell, dtype), MOST_FRAGMENTS)
    made = replace(config, register_fragments=held)
    if made.shared(cell, dtype) <= limits.shared:
        yield made


def step_time(cell: Traced, config: MulticastConfig, batch: int, limits: Limits) -> float:
    """The model's time of one step of the whole batch, in cycles."""
    copies = limits.clusters(config.cluster) // config.clusters  # of R
    step, tile, value = _FORWARD if config.kind == "forward" else _BACKWARD
    once = step + tile * config.tiles * config.tiles_in_flight + value * config.k_of_block(cell)
    once += _MESSAGES if config.k_parts > 1 else 0.0
    return once * -(-batch // (config.rows * copies))
