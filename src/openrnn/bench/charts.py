"""Charts of a file of results: ratios, growth with each size, memory."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openrnn.bench.ratios import GRAPHED, OURS, Line, Pair, lines_of, step_us
from openrnn.bench.record import Measurement
from openrnn.bench.tables import HEADS
from openrnn.errors import OpenRNNError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 44  # on one chart
BLUE, ORANGE, GREY, RED, INK = "#2a6fbb", "#e08214", "#8c8c8c", "#c1272d", "#222222"
UNDER: Final = "outside lower center"
COLOURS = {"forward": BLUE, "training": ORANGE, "steps": BLUE}
# the way in which users run a row today: the first of these that ran
USUAL = ("torch", "packed", "loop", "compiled", "eager", "cudnn", "baseline")
# a letter of the names in the suite `scaling`: the size that its rows double, and its words
AXES = {
    "t": ("steps", "steps T"),
    "b": ("batch", "batch B"),
    "h": ("hidden", "hidden size H"),
    "l": ("layers", "layers L"),
}
SERIES = {
    OURS: ("openrnn", BLUE, "-"),
    GRAPHED: ("openrnn, CUDA graph", BLUE, "--"),
    "torch": ("torch.nn", ORANGE, "-"),
    "graph": ("torch.nn, CUDA graph", ORANGE, "--"),
}


def need() -> None:
    """Raises OpenRNNError where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise OpenRNNError("charts need the package matplotlib: pip install matplotlib")


def names(results: Sequence[Measurement], stem: str) -> list[str]:
    """The files that `draw` writes of these results; the first shows the ratios."""
    return [f"{name}.png" for name, _ in _planned(lines_of(results), stem)]


def draw(results: Sequence[Measurement], folder: Path, stem: str) -> list[Path]:
    """Writes the charts and returns their paths.

    Raises:
        OpenRNNError: matplotlib is not installed.
    """
    need()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (make, lines) in _planned(lines_of(results), stem):
        path = folder / f"{name}.png"
        # no date and no version inside, so that the same results make the same file
        make(lines).savefig(path, dpi=110, metadata={"Software": None})
        written.append(path)
    return written


def _planned(lines: Sequence[Line], stem: str) -> Iterator[tuple[str, tuple[Any, list[Line]]]]:
    """Name, function and lines of each chart that these results have."""
    for suite, precision in dict.fromkeys((line.row.suite, line.precision) for line in lines):
        mine = [
            line for line in lines
            if (line.row.suite, line.precision) == (suite, precision) and line.mode in COLOURS
        ]  # fmt: skip
        where = "-".join([stem, *(word for word in (suite, precision) if word not in stem)])
        rated = [line for line in mine if usual(line)]
        rows = list(dict.fromkeys(line.row for line in rated))
        for index in range(0, len(rows), ROWS):
            part = set(rows[index : index + ROWS])
            number = f"-{index // ROWS + 1}" if len(rows) > ROWS else ""
            yield f"{where}-ratio{number}", (_ratios, [x for x in rated if x.row in part])
        if suite == "scaling":
            yield f"{where}-growth", (_growth, mine)
        kept = [line for line in mine if line.mode == "training" and _memories(line)]
        if kept:
            yield f"{where}-memory", (_memory, kept[:ROWS])


def usual(line: Line) -> Pair | None:
    """Ours against the way in which the row is run today."""
    return next((pair for peer in USUAL if (pair := line.pair(peer))), None)


def _figure(height: float, width: float = 9.0) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _head(lines: Sequence[Line]) -> str:
    return f"suite {lines[0].row.suite}, {lines[0].precision}"


def _ratios(lines: list[Line]) -> "Figure":
    """One row a line: how many times as fast; red where we lose."""
    rows = list(dict.fromkeys(line.row for line in lines))
    figure = _figure(1.6 + 0.24 * len(rows))
    axes = figure.add_subplot()
    peers: dict[Any, str] = {}
    for line in lines:
        pair = usual(line)
        if pair is None:
            continue
        peers[line.row] = HEADS[pair.peer.engine]
        height = rows.index(line.row) + (0.17 if line.mode == "training" else -0.17)
        colour = _colour(pair, line.mode)
        axes.plot([1, pair.ratio], [height, height], color=colour, lw=2.2, alpha=0.55, zorder=1)
        axes.plot([pair.ratio], [height], "o", color=colour, ms=5)
        graph = line.pair("graph")
        if graph:
            edge = _colour(graph, line.mode)
            axes.plot([graph.ratio], [height], "o", mfc="white", mec=edge, ms=5, zorder=3)
    axes.set_yticks(range(len(rows)), [f"{row.name}  ({peers.get(row, '-')})" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.axvline(1, color=INK, lw=1.2)
    plain_numbers(axes.xaxis)
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xlabel(
        "times as fast as what the row's users run today (in brackets); right is better"
    )
    axes.set_title(f"openrnn, {_head(lines)}", loc="left", fontweight="bold")
    figure.legend(handles=_marks(lines), loc=UNDER, fontsize=8, ncols=4)
    return figure


def _colour(pair: Pair, mode: str) -> str:
    return {"loss": RED, "disturbed": GREY}.get(pair.verdict, COLOURS[mode])


def _marks(lines: Sequence[Line]) -> list[Any]:
    from matplotlib.lines import Line2D

    modes = dict.fromkeys(line.mode for line in lines)
    made = [Line2D([], [], color=COLOURS[mode], marker="o", label=mode) for mode in modes]
    pairs = (pair for line in lines for pair in (usual(line), line.pair("graph")))
    verdicts = {pair.verdict for pair in pairs if pair}
    for verdict, colour, label in (
        ("loss", RED, "we are slower"), ("disturbed", GREY, "disturbed, not counted"),
    ):  # fmt: skip
        if verdict in verdicts:
            made.append(Line2D([], [], color=colour, marker="o", label=label))
    if any(line.pair("graph") for line in lines):
        label = "both from a CUDA graph"
        made.append(Line2D([], [], marker="o", mfc="white", mec=GREY, ls="", label=label))
    return made


def plain_numbers(axis: Any, wide: tuple[int, ...] = (1, 2, 5)) -> None:
    """Few labels, without powers, on an axis with a logarithmic scale."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    narrow = high < 5 * low
    axis.set_major_locator(LogLocator(base=10, subs=(1, 1.5, 2, 3, 5, 7) if narrow else wide))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _growth(lines: list[Line]) -> "Figure":
    """Time a step against each size that is doubled."""
    modes = list(dict.fromkeys(line.mode for line in lines))
    figure = _figure(3.4 * len(modes), 13.0)
    panels = figure.subplots(len(modes), len(AXES), squeeze=False)
    for down, mode in enumerate(modes):
        for across, (letter, (size, label)) in enumerate(AXES.items()):
            axes = panels[down][across]
            for engine, (title, colour, style) in SERIES.items():
                points = sorted(
                    (getattr(line.row, size), step_us(result))
                    for line in lines
                    if line.mode == mode and line.row.name.startswith((f"{letter}-", "base"))
                    and (result := line.results.get(engine)) and result.us
                )  # fmt: skip
                if points:
                    axes.plot(*zip(*points), style, color=colour, marker="o", ms=3.5, label=title)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            plain_numbers(axes.yaxis)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.grid(alpha=0.25, which="both")
            axes.set_xlabel(label)
            axes.set_title(mode if across == 0 else "", loc="left", fontsize=10)
        panels[down][0].set_ylabel("us a step")
    drawn: list[Any] = next((axes.get_lines() for axes in panels[0] if axes.lines), [])
    figure.legend(handles=drawn, loc=UNDER, fontsize=8, ncols=len(SERIES))
    row = next((line.row for line in lines if line.row.name == "base"), lines[0].row)
    figure.suptitle(
        f"One size doubled at a time from {row.shape}, {_head(lines)}",
        x=0.01, ha="left", fontweight="bold",
    )  # fmt: skip
    return figure


def _memories(line: Line) -> tuple[float, float] | None:
    """MiB of ours and of the way in which the row is run today."""
    pair = usual(line)
    if pair is None or not (pair.ours.memory_mib and pair.peer.memory_mib):
        return None
    return pair.ours.memory_mib, pair.peer.memory_mib


def _memory(lines: list[Line]) -> "Figure":
    """Memory that a training step adds, ours and theirs."""
    figure = _figure(1.6 + 0.24 * len(lines))
    axes = figure.add_subplot()
    for index, line in enumerate(lines):
        ours, theirs = _memories(line) or (1.0, 1.0)
        axes.plot([ours, theirs], [index, index], color=GREY, lw=2, zorder=1)
        axes.plot([theirs], [index], "o", color=ORANGE, ms=6)
        axes.plot([ours], [index], "o", color=RED if ours > theirs else BLUE, ms=6)
    labels = []
    for line in lines:
        pair = usual(line)
        labels.append(f"{line.row.name}  ({HEADS[pair.peer.engine] if pair else '-'})")
    axes.set_yticks(range(len(lines)), labels)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xscale("log")
    plain_numbers(axes.xaxis)
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xlabel("MiB that a training step adds at its peak; left is better")
    axes.set_title(f"memory of training, {_head(lines)}", loc="left", fontweight="bold")
    figure.legend(handles=_dots(), loc=UNDER, fontsize=8, ncols=3)
    return figure


def _dots() -> list[Any]:
    from matplotlib.lines import Line2D

    kinds = (
        (BLUE, "openrnn"),
        (RED, "openrnn, where it needs more"),
        (ORANGE, "the way in brackets"),
    )
    return [Line2D([], [], color=c, marker="o", ls="", label=text) for c, text in kinds]
