"""`tuning/measured.csv`, the table of fastest kernels, made of measured times."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from openrnn.bench.record import KernelTime
from openrnn.bench.tables import Sheet, TableCell
from openrnn.cells import lookup
from openrnn.codegen.config import SIZES, KernelConfig
from openrnn.codegen.tiles import tiles_of
from openrnn.codegen.trace import trace
from openrnn.tuning import measured

EVEN = 1.02  # times the fastest: of kernels that near the one tried first is taken
COLUMNS = (*measured.SHAPE, *measured.FILL, "delay")
WRITTEN = ("units", *COLUMNS, "streamed_fragments")  # of a configuration, in files of times

Config = TypeVar("Config")
Key = tuple[str | int, ...]


def config_of(config: KernelConfig) -> dict[str, int]:
    """A configuration as files of times have it."""
    return {name: measured.column(config, name) for name in WRITTEN}


def text_of(files: Iterable[Sequence[KernelTime]]) -> str:
    """The table with newer files of times; later files win.

    Kernels that stream a part of R are not in it: the model ranks them.
    """
    known: dict[Key, tuple[object, ...]] = {
        (*key, loops, row.batch_tiles): (
            *row.shape, *map(int, row.fill), row.delay, f"{row.time:.2f}",
        )
        for loops in measured.LOOPS
        for key, rows in measured.table(loops).items()
        for row in rows
    }  # fmt: skip
    for times in files:
        here: dict[Key, list[tuple[float, KernelTime]]] = {}
        for one in times:
            if not one.config.get("streamed_fragments"):
                here.setdefault(_key(one), []).append((one.us, one))
        for key, tried in here.items():
            time, best = fastest(tried)
            # older files do not have these columns
            config = {"low_register": 0, "parts_in_cluster": 0, **best.config}
            known[key] = (*(config[name] for name in COLUMNS), f"{time:.2f}")
    lines: list[Sequence[object]] = [(*measured.SIZE, *COLUMNS, "us")]
    lines += [(*key, *row) for key, row in sorted(known.items())]
    return "".join(",".join(map(str, line)) + "\n" for line in lines)


def _key(one: KernelTime) -> Key:
    size = SIZES[one.dtype]
    gates, read = len(trace(lookup(one.cell)).gates), one.operand_bytes or size
    tiles = tiles_of(one.batch)
    return one.kernel, one.mask, gates, size, read, one.config["units"], one.loops, tiles


def fastest(tried: Sequence[tuple[float, Config]]) -> tuple[float, Config]:
    """The kernel tried first among those within EVEN of the fastest."""
    least = min(time for time, _ in tried)
    return next(one for one in tried if one[0] <= EVEN * least)


def sheet(times: Iterable[KernelTime]) -> Sheet:
    """For each size the first of the ranking beside the fastest."""
    found: dict[Key, list[tuple[float, KernelTime]]] = {}
    for one in times:
        key = one.cell, one.dtype, one.hidden, one.batch, one.kernel, one.mask, one.loops
        found.setdefault(key, []).append((one.us, one))
    heads = ("cell", "dtype", "H", "B", "kernel", "mask", "at once", "plan's us", "configuration",
             "best us", "configuration")  # fmt: skip
    rows = []
    for where, tried in found.items():
        (first, picked), (least, best) = tried[0], fastest(tried)
        words = [*map(str, where), f"{first:.2f}", said(picked.config), f"{least:.2f}"]
        rows.append(tuple(map(TableCell, (*words, said(best.config)))))
    numbers = (False, False, True, True, False, False, True, True, False, True, False)
    return Sheet("kernels alone, us a step", heads, numbers, tuple(rows))


def said(config: dict[str, int]) -> str:
    """A configuration in short: clusters x blocks, warps, tiles, fragments and so on."""
    grid = f"{config['clusters']}x" if config["clusters"] > 1 else ""
    more = " wgmma" if config["wgmma"] else ""
    more += " low-register" if config.get("low_register") else ""
    more += f" d{config['delay']}" if grid else ""
    sizes = f"w{config['warps']} t{config['tiles']} f{config['tiles_in_flight']}"
    sizes += f" r{config['register_fragments']}"
    return f"{grid}{config['cluster']} {sizes}{more}"
