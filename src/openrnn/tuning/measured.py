"""The tiles that were fastest when timed on an H200, where those of a size were.

`measured.csv` is written by `openrnn tune kernels`: kernel, mask, gates of the cell, bytes of a
value and of what products read of it, units, tiles of 8 rows in the batch (`eights`), then the
fastest kernel's shape, how much of R it holds and whether it is frugal, its delay where it is a
grid, and its microseconds a step. Forward without what training keeps is `inference`. Masks take
registers: where a batch was measured without them only, they have the shape and the delay of that
kernel, filled by the plan.

Between two measured batches runs the fastest of their two kernels and the model's first, by the
model's times scaled to those that were measured. Below the least runs that of the least, a grid
without its delay, which is for more rows; elsewhere the model chooses.
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

from openrnn.codegen.tiles import SIZES, Tiles
from openrnn.codegen.trace import Traced

CAPABILITY, PROCESSORS = (9, 0), 132  # of an H200, and of an H100 with SXM
FILE = "measured.csv"
SIZE = ("kind", "mask", "gates", "bytes", "multiplied", "units", "eights")
SHAPE = ("clusters", "cluster", "warps", "per", "tiles", "flight", "k_warps", "wgmma")
HELD = ("resident", "stages", "frugal")
PLAIN = "none"  # the mask of calls without
MASKS = (PLAIN, "lengths", "reset")  # that were measured, one at a time

How = TypeVar("How", bound=Tiles)
Shape = tuple[int, ...]
Key = tuple[str | int, ...]


class Fastest(NamedTuple):
    """The fastest kernel of a size."""

    eights: int
    shape: Shape
    held: tuple[int, int, bool]
    delay: int
    time: float  # us a step


def shape_of(how: Tiles) -> Shape:
    """What tells a kernel from others of its size."""
    return tuple(int(getattr(how, name, 1)) for name in SHAPE)


@lru_cache(maxsize=1)
def table() -> dict[Key, list[Fastest]]:
    """By all of SIZE but the last, the fastest for each batch that was measured, rising."""
    found: dict[Key, list[Fastest]] = {}
    text = (files("openrnn.tuning") / FILE).read_text(encoding="utf-8")
    for line in csv.DictReader(text.splitlines()):
        kind, mask, *sizes, eights = itemgetter(*SIZE)(line)
        key = kind, mask, *map(int, sizes)
        shape = tuple(map(int, itemgetter(*SHAPE)(line)))
        resident, stages, frugal = map(int, itemgetter(*HELD)(line))
        held = resident, stages, bool(frugal)
        fastest = Fastest(int(eights), shape, held, int(line["delay"]), float(line["us"]))
        found.setdefault(key, []).append(fastest)
    return {key: sorted(rows) for key, rows in found.items()}


def fastest_first(
    kind: str, mask: str, hows: list[How], cell: Traced, dtype: str, batch: int,
    capability: tuple[int, int], processors: int | None, model: Callable[[How, int], float],
) -> list[How]:  # fmt: skip
    """Kernels of one size in the order given, but that which was fastest before the others.

    Where the plan fills its shape otherwise, the kernel of the plan follows it.

    Args:
        kind: as in the table; mask: one of MASKS, or any other name.
        model: the expected time of a step of a kernel and batch.
    """
    if capability != CAPABILITY or processors not in (None, PROCESSORS) or not hows:
        return hows
    one = hows[0]
    size = len(cell.gates), SIZES[dtype], one.multiplied(dtype), one.units
    masks, kinds = dict.fromkeys((mask, PLAIN)), dict.fromkeys((kind, one.kind))
    eights = -(-batch // 8)
    found = _nearest([(name, here, *size) for here in masks for name in kinds], eights)
    if found is None:
        return hows
    rows, exact = table()[found], found[1] == mask
    place = bisect_left(rows, eights, key=itemgetter(0))
    below = eights < rows[0].eights
    between = not below and eights < rows[place].eights
    near = rows[place - 1 : place + 1] if between else rows[place : place + 1]
    by_shape = {shape_of(how): how for how in hows}
    # of two rows with one kernel the nearer says its delay
    near = sorted(near, key=lambda row: abs(row.eights - eights), reverse=True)
    rows_of = {row.shape: row for row in near if row.shape in by_shape}
    known = {
        _delayed(by_shape[shape], 0 if below else row.delay): row for shape, row in rows_of.items()
    }
    if not known:
        return hows
    # measured microseconds for each expected cycle
    scales = {how: row.time / model(how, 8 * row.eights) for how, row in known.items()}
    if between and shape_of(hows[0]) not in rows_of:
        scales[hows[0]] = fmean(scales.values())
    first = min(scales, key=lambda how: scales[how] * model(how, batch))
    fronts = [first]
    if exact and first in known:
        held = dict(zip(HELD, known[first].held))
        fronts.insert(0, replace(first, **held))  # type: ignore[arg-type]
    return [*dict.fromkeys(fronts), *(how for how in hows if shape_of(how) != shape_of(first))]


def _nearest(keys: list[Key], eights: int) -> Key | None:
    """The first key with a row for a batch; else with rows on both sides of it; else above it."""
    reaching = [key for key in keys if key in table() and table()[key][-1].eights >= eights]
    here = (key for key in reaching if any(row.eights == eights for row in table()[key]))
    around = (key for key in reaching if table()[key][0].eights < eights)
    return next(chain(here, around, reaching), None)


def _delayed(how: How, delay: int) -> How:
    if how.clusters == 1:
        return how
    return replace(how, delay=delay)  # type: ignore[call-arg]  # a grid has one
