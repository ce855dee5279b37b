"""Kernels to which TMA brings the product's operand: those that fit, and a model of their step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
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
# sets of rows, which take turns; the better ones first, where the model sees no difference
FORWARD_SETS, BACKWARD_SETS = (4, 3, 2), (2, 3, 4)
TILES = (2, 3, 4)  # of 8 rows, in a set
K_PARTS = (1, 2, 4)  # of backward's K
WARPS = 16  # two warpgroups that multiply, one for cells, one that copies and publishes
# fragments of R that a warp holds in registers; more where shared memory has too little room
FORWARD_FRAGMENTS, BACKWARD_FRAGMENTS = (14, 16), (12, 14, 15, 16)
MOST_FRAGMENTS = 15  # in backward with four tiles, whose cells need the registers
MOST_SUMS = 8  # of 8 units each, that a block computes: the rows of a warpgroup's product
# cycles of a step: fixed, for each tile of all sets, and for each value of a row of R in a block;
# more where blocks share K. Fitted to 46 and 12 kernels of LSTMs, H 512 to 1536, timed alone on an
# H100: standard deviations of 7 and 4%. Kernels that spill in their loop take up to twice as long
_FORWARD = 1180.0, 430.0, 2.45
_BACKWARD = 900.0, 690.0, 2.9
_MESSAGES = 1200.0


def forwards(
    cell: Traced, dtype: str, units: int, limits: Limits
) -> Iterator[MulticastForwardConfig]:
    """Every such forward kernel that fits."""
    groups = max(1, MOST_SUMS // len(cell.gates))  # of a block
    half = half_operands(cell, dtype)
    if len(cell.gates) > MOST_SUMS or not (clusters := _clusters(units, groups, limits)):
        return
    for sets, tiles in product(FORWARD_SETS, TILES):
        config = MulticastForwardConfig(
            units, CLUSTER, WARPS, groups * CLUSTER, tiles, sets, 0, 2, True, low_register=True,
            clusters=clusters, half_operands=half,
        )  # fmt: skip
        yield from _filled(config, FORWARD_FRAGMENTS, cell, dtype, limits)


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
        for sets, tiles in product(BACKWARD_SETS, TILES):
            config = MulticastBackwardConfig(
                units, CLUSTER, WARPS, groups * CLUSTER, tiles, sets, 0, 2, True,
                low_register=True, clusters=clusters, k_parts=k_parts,
            )  # fmt: skip
            most = [held for held in BACKWARD_FRAGMENTS if tiles < 4 or held <= MOST_FRAGMENTS]
            yield from _filled(config, most, cell, dtype, limits)


def _clusters(units: int, groups: int, limits: Limits) -> int:
    """How many clusters share R, with so many groups of 8 units a block; 0: not such a kernel."""
    clusters, rest = divmod(units, 8 * groups * CLUSTER)
    some = 1 < clusters <= limits.clusters(CLUSTER)
    fits = limits.wgmma and not rest and units % 64 == 0 and some
    return clusters if fits else 0


def _filled(
    config: Config, most: Sequence[int], cell: Traced, dtype: str, limits: Limits
) -> Iterator[Config]:
    """The kernel with as much of R in registers as they hold, where it fits.

    With two sets a second buffer of the operand would be waited for as long as the first one.
    """
    if config.operand_bytes(dtype) != 2:
        return
    fragments = config.fragments(cell, dtype)
    buffers = (2, 1) if config.tiles_in_flight > 2 else (1,)
    for number, held in product(buffers, most):
        made = replace(config, buffers=number, register_fragments=min(fragments, held))
        if made.shared(cell, dtype) <= limits.shared:
            yield made
            return


def step_time(cell: Traced, config: MulticastConfig, batch: int, limits: Limits) -> float:
    """The model's time of one step of the whole batch, in cycles."""
    copies = limits.clusters(config.cluster) // config.clusters  # of R
    step, tile, value = _FORWARD if config.kind == "forward" else _BACKWARD
    once = step + tile * config.tiles * config.tiles_in_flight + value * config.k_of_block(cell)
    once += _MESSAGES if config.k_parts > 1 else 0.0
    return once * -(-batch // (config.rows * copies))
