"""The configurations that were fastest when timed on an H200.

`measured.csv` is written by `openrnn tune kernels --table`. Its columns: the kind of kernel, its
mask, gates of the cell, bytes of a stored value and of one as products read it, units, how many
such loops ran at the same time, tiles of 8 rows in the batch, then the configuration, and its
microseconds a step. A forward kernel that saves nothing is `inference`.

A size that was not measured for inference takes the row of `forward`, with its registers.

A batch that was measured only without a mask takes that kernel's shape and delay for calls with the
mask, too. How much of R is in registers then follows from the model, since masks take registers.

Between two measured batches the choice is among their two kernels and the model's first, by the
model's times scaled to the measured ones. Below the least measured batch its kernel runs where it
is no grid: how a grid divides R, and its delay, are for more rows. Elsewhere the model chooses.
"""

import csv
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from itertools import chain
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple, TypeVar

from openrnn.codegen.config import SIZES, KernelConfig
from openrnn.codegen.tiles import tiles_of
from openrnn.codegen.trace import Traced

CAPABILITY, PROCESSORS = (9, 0), 132  # of an H200, and of an H100 with SXM
FILE = "measured.csv"
SIZE = ("kind", "mask", "gates", "bytes", "operand_bytes", "units", "loops", "batch_tiles")
LOOPS = (1, 2)  # at the same time, that were measured
SHAPE = (
    "clusters", "cluster", "warps", "groups", "tiles", "tiles_in_flight", "k_warps", "wgmma",
    "parts_in_cluster",
)  # fmt: skip
FILL = ("register_fragments", "stages", "low_register")  # how R is held
PLAIN = "none"  # the mask of calls without one
MASKS = (PLAIN, "lengths", "reset")  # that were measured, one at a time

Config = TypeVar("Config", bound=KernelConfig)
Shape = tuple[int, ...]
Key = tuple[str | int, ...]


class Fastest(NamedTuple):
    """The fastest kernel of a size."""

    batch_tiles: int
    shape: Shape
    fill: tuple[int, int, bool]
    delay: int
    time: float  # us a step


def shape_of(config: KernelConfig) -> Shape:
    """What tells a kernel from others of its size, but for how R is held."""
    return tuple(column(config, name) for name in SHAPE)


def column(config: KernelConfig, name: str) -> int:
    """What tables of kernels have of a configuration; 1 where its kind has no such field.

    In column `k_warps` kernels with multicast have the warpgroups that multiply.
    """
    field = "k_warpgroups" if name == "k_warps" and hasattr(config, "k_warpgroups") else name
    return int(getattr(config, field, 1))


def table(loops: int = 1) -> dict[Key, list[Fastest]]:
    """The rows for so many loops, by the rest of SIZE but the batch, which rises in each."""
    return _tables().get(loops, {})


@lru_cache(maxsize=1)
def _tables() -> dict[int, dict[Key, list[Fastest]]]:
    tables: dict[int, dict[Key, list[Fastest]]] = {}
    text = (files("openrnn.tuning") / FILE).read_text(encoding="utf-8")
    for line in csv.DictReader(text.splitlines()):
        kind, mask, *sizes, loops, batch_tiles = itemgetter(*SIZE)(line)
        key = kind, mask, *map(int, sizes)
        shape = tuple(map(int, itemgetter(*SHAPE)(line)))
        fragments, stages, low_register = map(int, itemgetter(*FILL)(line))
        fill = fragments, stages, bool(low_register)
        fastest = Fastest(int(batch_tiles), shape, fill, int(line["delay"]), float(line["us"]))
        tables.setdefault(int(loops), {}).setdefault(key, []).append(fastest)
    return {
        loops: {key: sorted(rows) for key, rows in known.items()} for loops, known in tables.items()
    }


def knows(capability: tuple[int, int], processors: int | None) -> bool:
    """Whether the table is of such a device."""
    return capability == CAPABILITY and processors in (None, PROCESSORS)


def fastest_first(
    kind: str, mask: str, configs: list[Config], cell: Traced, dtype: str, batch: int,
    capability: tuple[int, int], processors: int | None, model: Callable[[Config, int], float],
    loops: int = 1,
) -> tuple[list[Config], float | None]:  # fmt: skip
    """Configurations of one size in the order given, the one measured fastest first.

    And the microseconds of its step by the rows that chose it; None where no row is near.

    Where the model holds R of that shape in another way, its configuration comes second.

    Args:
        kind: as in the table; mask: one of MASKS, or any other name.
        model: the expected time of a step for a configuration and batch.
        loops: how many such loops run at the same time.
    """
    if not knows(capability, processors) or not configs:
        return configs, None
    modelled = configs[0]
    size = len(cell.gates), SIZES[dtype], modelled.operand_bytes(dtype), modelled.units
    masks, kinds = dict.fromkeys((mask, PLAIN)), dict.fromkeys((kind, modelled.kind))
    batch_tiles = tiles_of(batch)
    whole = table(loops)
    keys: list[Key] = [(name, row_mask, *size) for row_mask in masks for name in kinds]
    key = _nearest(keys, batch_tiles, whole)
    if key is None:
        return configs, None
    rows, exact = whole[key], key[1] == mask
    index = bisect_left(rows, batch_tiles, key=itemgetter(0))
    below = batch_tiles < rows[0].batch_tiles
    between = not below and batch_tiles < rows[index].batch_tiles
    near = rows[index - 1 : index + 1] if between else rows[index : index + 1]
    by_shape = {shape_of(config): config for config in configs}
    # of two rows with one shape the nearer one gives the delay
    near = sorted(near, key=lambda row: abs(row.batch_tiles - batch_tiles), reverse=True)
    rows_of = {row.shape: row for row in near if row.shape in by_shape}
    known = {by_shape[shape].delayed(row.delay): row for shape, row in rows_of.items()}
    if below:
        known = {config: row for config, row in known.items() if not config.is_cooperative}
    if not known:
        return configs, None
    # measured microseconds for each expected cycle
    scales = {
        config: row.time / model(config, 8 * row.batch_tiles) for config, row in known.items()
    }
    if between and shape_of(modelled) not in rows_of:
        scales[modelled] = fmean(scales.values())
    first = min(scales, key=lambda config: scales[config] * model(config, batch))
    fronts = [first]
    if exact and first in known:
        fill = dict(zip(FILL, known[first].fill))
        fronts.insert(0, replace(first, **fill))  # type: ignore[arg-type]
    shape = shape_of(first)
    others = (config for config in configs if shape_of(config) != shape)
    return [*dict.fromkeys(fronts), *others], scales[first] * model(first, batch)


def _nearest(keys: list[Key], batch_tiles: int, whole: dict[Key, list[Fastest]]) -> Key | None:
    """The first key with a row for the batch; else with rows on both sides of it; else above it."""
    reaching = [key for key in keys if key in whole and whole[key][-1].batch_tiles >= batch_tiles]
    exact = (key for key in reaching if any(row.batch_tiles == batch_tiles for row in whole[key]))
    around = (key for key in reaching if whole[key][0].batch_tiles < batch_tiles)
    return next(chain(exact, around, reaching), None)
