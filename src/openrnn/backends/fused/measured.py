"""The tiles that were fastest when timed on an H200, where those of a size were.

`measured.csv` is written by `benchmarks/tiles.py`: kernel, gates of the cell, bytes of a value,
units and tiles of 8 rows, then the fastest kernel's shape and its microseconds a step. A number of
tiles in between takes what the next larger one takes; a size that is not there has the model.
"""

import csv
from bisect import bisect_left
from functools import lru_cache
from importlib.resources import files
from operator import itemgetter
from typing import TypeVar

from openrnn.codegen.tiles import SIZES, Tiles
from openrnn.codegen.trace import Traced

CAPABILITY, PROCESSORS = (9, 0), 132  # of an H200, and of an H100
FILE = "measured.csv"
SIZE = ("kind", "gates", "bytes", "units", "rows")  # rows: tiles of 8, of the whole batch
SHAPE = ("clusters", "cluster", "warps", "per", "tiles", "flight", "k_warps", "wgmma")

How = TypeVar("How", bound=Tiles)
Shape = tuple[int, ...]


def shape_of(how: Tiles) -> Shape:
    """What tells a kernel from others of its size."""
    return tuple(int(getattr(how, name, 1)) for name in SHAPE)


@lru_cache(maxsize=1)
def table() -> dict[tuple[str, int, int, int], list[tuple[int, Shape]]]:
    """By kernel, gates, bytes and units: numbers of tiles, rising, with the fastest shape."""
    found: dict[tuple[str, int, int, int], list[tuple[int, Shape]]] = {}
    text = (files("openrnn.backends.fused") / FILE).read_text(encoding="utf-8")
    for line in csv.DictReader(text.splitlines()):
        kind, gates, size, units, rows = itemgetter(*SIZE)(line)
        key = kind, int(gates), int(size), int(units)
        shape = tuple(map(int, itemgetter(*SHAPE)(line)))
        found.setdefault(key, []).append((int(rows), shape))
    return {key: sorted(rows) for key, rows in found.items()}


def fastest_first(
    hows: list[How], cell: Traced, dtype: str, batch: int, capability: tuple[int, int],
    processors: int | None,
) -> list[How]:  # fmt: skip
    """Kernels of one size in the order given, but that which was fastest before the others."""
    if capability != CAPABILITY or processors not in (None, PROCESSORS) or not hows:
        return hows
    key = hows[0].kind, len(cell.gates), SIZES[dtype], hows[0].units
    rows = table().get(key)
    if rows is None:
        return hows
    place = bisect_left(rows, (batch + 7) // 8, key=itemgetter(0))
    shape = rows[min(place, len(rows) - 1)][1]
    return sorted(hows, key=lambda how: shape_of(how) != shape)
