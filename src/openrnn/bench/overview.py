"""All results in one chart: how many times as fast, by the kind of work that users do."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from openrnn.bench import charts
from openrnn.bench.ratios import Pair, Summary, lines_of
from openrnn.bench.record import ResultFile
from openrnn.bench.tables import Sheet, TableCell

NAME = "overview.png"
Records = Sequence[tuple[Path, ResultFile]]

# a kind of work: its suite, and which of the suite's rows
FAMILIES = {
    "reinforcement learning": ("users", "isaac sb3 sf rllib torchrl dreamer"),
    "forecasting": ("users", "deepar-* hydro-*"),
    "speech": ("users", "rnnt rnnt-* crdnn tacotron-step"),
    "audio": ("users", "nam nam-* sepa"),
    "language models": ("users", "lm-*"),
    "one layer, H 64 to 512": ("users", "fastrnns haste-*"),
    "stacks of layers": ("stacks", "*"),
    "resets and lengths": ("resets-and-lengths", "*"),
    "other cells": ("custom", "*"),
    "single steps": ("latency", "*"),
    "DeepBench": ("deepbench", "*"),
    "one layer, for CPUs": ("cpu", "*"),
}
WIDTHS = {"bfloat16": "16 bits", "float16": "16 bits", "tf32": "TF32", "float32": "float32"}
MOST_BESIDE = 4  # panels
SHIFT = {"forward": -0.18, "training": 0.18}  # of a family's two marks
Panel = tuple[str, str]  # machine and width


@dataclass(frozen=True)
class Point:
    """One mark: a family of rows on a machine, in a width and a mode."""

    family: str
    panel: Panel
    mode: str
    pairs: tuple[Pair, ...]

    @property
    def summary(self) -> Summary:
        """Ours against what the users of each row run today."""
        return Summary("", "", self.mode, self.pairs)


def points(records: Records) -> list[Point]:
    """The marks of all records, in the order of `FAMILIES`; what was disturbed does not count."""
    found: dict[tuple[str, Panel, str], list[Pair]] = {}
    for _, record in records:
        for line in lines_of(record.results):
            family = family_of(line.row.suite, line.row.name)
            pair = charts.usual(line)
            width = WIDTHS.get(line.precision)
            if family and width and pair and not pair.disturbed and line.mode in SHIFT:
                panel = (_machine(record), width)
                found.setdefault((family, panel, line.mode), []).append(pair)
    made = [Point(*key, tuple(pairs)) for key, pairs in found.items()]
    families = list(FAMILIES)
    return sorted(made, key=lambda point: families.index(point.family))


def family_of(suite: str, name: str) -> str | None:
    """The kind of work of a row; None where it has none."""
    for family, (own, patterns) in FAMILIES.items():
        if own == suite and any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return family
    return None


def chart_path(records: Records) -> Path:
    """Where the chart of records lies: in the folder that holds all of them."""
    return Path(os.path.commonpath([path.parent for path, _ in records])) / NAME


def sheet(records: Records) -> Sheet:
    """The numbers of the chart."""
    every = points(records)
    panels = panels_of(every)
    columns = [(panel, mode) for panel in panels for mode in SHIFT]
    heads = ("rows of", *(f"{_title(panel)}, {mode}" for panel, mode in columns))
    rows = []
    for family in dict.fromkeys(point.family for point in every):
        mine = {(point.panel, point.mode): point for point in every if point.family == family}
        cells = [TableCell(_words(mine[column]) if column in mine else "") for column in columns]
        rows.append((TableCell(family), *cells))
    return Sheet("", heads, (False, *(True for _ in columns)), tuple(rows))


def panels_of(every: Iterable[Point]) -> list[Panel]:
    """Machines with a GPU first, narrow numbers first."""
    widths = list(dict.fromkeys(WIDTHS.values()))
    return sorted({point.panel for point in every}, key=lambda p: (widths.index(p[1]), p[0]))


def draw(records: Records) -> Path | None:
    """Writes the chart; None where there is nothing to draw.

    Raises:
        OpenRNNError: matplotlib is not installed.
    """
    every = points(records)
    if not every:
        return None
    charts.need()
    path = chart_path(records)
    _figure(every).savefig(path, dpi=150, metadata={"Software": None})
    return path


def _machine(record: ResultFile) -> str:
    """Its name and, for a CPU, how many cores ran."""
    cores = str(record.machine.get("threads", "")).partition(" ")[0]
    name = re.sub(r"\((R|TM)\)| Processor$", "", record.machine["name"])  # a title has little room
    return name + (f", {cores} cores" if cores else "")


def _title(panel: Panel) -> str:
    return f"{panel[0]}, {panel[1]}"


def _words(point: Point) -> str:
    one = point.summary
    return f"{one.mean:.3g} ({one.least.ratio:.3g} to {one.most.ratio:.3g})"


def _figure(every: Sequence[Point]) -> Any:
    from matplotlib.figure import Figure

    panels = panels_of(every)
    families = list(dict.fromkeys(point.family for point in every))
    rows = -(-len(panels) // MOST_BESIDE)
    columns = -(-len(panels) // rows)
    size = 3.0 + 2.5 * columns, 0.9 + rows * (0.6 + 0.34 * len(families))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, sharex=True, squeeze=False)
    every_axes = list(grid.flat)
    for axes in every_axes[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(every_axes, panels):
        for point in every:
            if point.panel == panel:
                _mark(axes, point, families.index(point.family) + SHIFT[point.mode])
        axes.axvline(1, color=charts.INK, lw=1)
        axes.set_xscale("log")
        axes.set_title(_title(panel), loc="left", fontsize=10)
        axes.tick_params(axis="x", labelbottom=True)
        axes.grid(axis="x", alpha=0.25)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    every_axes[0].set_yticks(range(len(families)), families)
    every_axes[0].set_ylim(len(families) - 0.5, -0.5)
    charts.plain_numbers(every_axes[0].xaxis, (1, 3))
    figure.suptitle("How many times as fast as what users run today, as called", x=0.01, ha="left",
                    fontweight="bold")  # fmt: skip
    figure.legend(handles=list(_legend()), loc=charts.UNDER, fontsize=9, ncols=4, frameon=False)
    return figure


def _mark(axes: Any, point: Point, height: float) -> None:
    """A dot and a number for the mean, a line from the least row to the most; losses are red."""
    colour, one = charts.COLOURS[point.mode], point.summary
    most = one.most.ratio
    axes.plot([one.least.ratio, most], [height, height], color=colour, lw=1.6, alpha=0.45)
    axes.plot([one.mean], [height], "o", color=colour, ms=5.5)
    lost = [pair.ratio for pair in point.pairs if pair.verdict == "loss"]
    axes.plot(lost, [height] * len(lost), "o", color=charts.RED, ms=3.5)
    text = f"{one.mean:.0f}" if one.mean >= 10 else f"{one.mean:.1f}"
    axes.text(1.15 * max(most, 1), height, text, color=colour, va="center", fontsize=8)


def _legend() -> Iterator[Any]:
    from matplotlib.lines import Line2D

    for mode in SHIFT:
        label = f"{mode}, geometric mean"
        yield Line2D([], [], color=charts.COLOURS[mode], marker="o", ls="", label=label)
    yield Line2D([], [], color=charts.GREY, lw=1.6, label="least to most")
    yield Line2D([], [], color=charts.RED, marker="o", ms=3.5, ls="", label="a row that is slower")
