"""Forward kernels to which TMA brings h: those that fit, and a model of their step."""

from collections.abc import Iterator
from dataclasses import replace

from openrnn.codegen.bounds import half_operands
from openrnn.codegen.config import MulticastForwardConfig
from openrnn.codegen.trace import Traced
from openrnn.tuning.limits import Limits

CLUSTER = 2  # blocks that share a copy: the largest clusters that reach all multiprocessors
SETS = 2  # of rows, which take turns
TILES = (2, 4, 6, 8)  # of 8 rows, in a set
WARPS = 12  # two warpgroups that compute, four warps more
MOST_FRAGMENTS = 16  # of R that a warp holds in registers
# cycles, fitted to 32 kernels of LSTMs and GRUs in bf16 timed alone on an H200 (errors up to 15%;
# float32 that saves activations takes up to a third longer): of a step, of a tile, and of a tile
# for each unit
_STEP, _TILE, _TILE_UNIT = 5600.0, 130.0, 0.26


def fitting(
    cell: Traced, dtype: str, units: int, limits: Limits
) -> Iterator[MulticastForwardConfig]:
    """Every such kernel that fits, with all of R in registers."""
    places = dict(limits.places).get(CLUSTER, 0)
    groups = max(1, 8 // len(cell.gates))  # of a block, whose sums are at most 64
    clusters, rest = divmod(units, 8 * groups * CLUSTER)
    if not limits.wgmma or rest or units % 64 or not 1 < clusters <= places:
        return
    half = half_operands(cell, dtype)
    for tiles in TILES:
        config = MulticastForwardConfig(
            units, CLUSTER, WARPS, groups * CLUSTER, tiles, SETS, 0, 2, True, clusters=clusters,
            half_operands=half,
        )  # fmt: skip
        fragments = config.fragments(cell, dtype)
        if config.operand_bytes(dtype) != 2 or fragments > MOST_FRAGMENTS or len(cell.gates) > 8:
            continue
        made = replace(config, register_fragments=fragments)
        if made.shared(cell, dtype) <= limits.shared:
            yield made


def step_time(config: MulticastForwardConfig, batch: int, limits: Limits) -> float:
    """The model's time of one step of the whole batch, in cycles."""
    copies = dict(limits.places)[config.cluster] // config.clusters  # of R
    tiles = config.tiles * config.tiles_in_flight
    once = _STEP + tiles * (_TILE + _TILE_UNIT * config.units)
    return once * -(-batch // (config.rows * copies))
