"""The tables of a report as texts, for the terminal and for Markdown alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openrnn.bench.compare import Moved
from openrnn.bench.ratios import (
    GRAPHED,
    OURS,
    Line,
    Pair,
    Summary,
    judged,
    peers_of,
    quiet,
    refusals,
    step_us,
    summaries,
)
from openrnn.bench.record import Measurement
from openrnn.bench.timer import DISTURBED

# as column heads, and in sentences
HEADS = {
    "torch": "torch.nn", "graph": "graph", "cudnn": "cuDNN best", "packed": "packed",
    "loop": "loop", "eager": "eager", "compiled": "compiled", "flashrnn": "FlashRNN",
    "torchrl": "TorchRL", "onnxruntime": "ONNX Runtime",
    "cudnn-graph": "cuDNN graph", "float32": "float32", "recompute": "recompute",
    "reference": "reference", "cudnn-standard": "standard", "cudnn-persist-static": "static",
    "cudnn-persist-dynamic": "dynamic", "cudnn-persist-static-small-h": "small H",
    "baseline": "baseline", "no-overlap": "no overlap", "two-chunks": "two chunks",
    "baseline-graph": "baseline graph", "no-overlap-graph": "no overlap graph",
    "two-chunks-graph": "two chunks graph",
}  # fmt: skip
TITLES = {
    "torch": "torch.nn as called", "graph": "torch.nn, both from a CUDA graph",
    "cudnn": "cuDNN's best algorithm", "packed": "torch.nn with PackedSequence",
    "loop": "torch.nn in a loop of steps", "eager": "eager Python",
    "compiled": "Python, its step by torch.compile", "flashrnn": "FlashRNN",
    "torchrl": "TorchRL's Triton kernels", "onnxruntime": "ONNX Runtime",
    "cudnn-graph": "cuDNN, both from a CUDA graph",
    "float32": "openrnn in float32", "recompute": "openrnn, gates recomputed",
    "reference": "openrnn, plain reference",
    "cudnn-standard": "cuDNN's standard algorithm",
    "cudnn-persist-static": "cuDNN's persist_static",
    "cudnn-persist-dynamic": "cuDNN's persist_dynamic",
    "cudnn-persist-static-small-h": "cuDNN's persist_static_small_h",
    "baseline": "the baseline's openrnn",
    "no-overlap": "openrnn, products after loops",
    "two-chunks": "openrnn, products beside loops in two chunks at most",
    "baseline-graph": "the baseline's openrnn, both from a CUDA graph",
    "no-overlap-graph": "openrnn, products after loops, both from a CUDA graph",
    "two-chunks-graph": "openrnn, two chunks at most, both from a CUDA graph",
    OURS: "openrnn", GRAPHED: "openrnn from a CUDA graph",
}  # fmt: skip

SIGNS = {"tie": " =", "disturbed": " ~"}
DISTURBED_NOTE = (
    f"other processes took more than {100 * DISTURBED:.0f}% of a core: shown, not counted"
)
COUNTED = (
    "against", "precision", "mode", "rows", "mean", "least", "most", "wins", "ties", "losses",
    "disturbed",
)  # fmt: skip
COUNTED_NUMBERS = (False,) * 3 + (True, True, False, False) + (True,) * 4


@dataclass(frozen=True)
class TableCell:
    """A word of a table and what it means: win, loss, tie, disturbed, fault or nothing."""

    text: str
    means: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table: heads, and whether each column holds numbers."""

    title: str
    heads: tuple[str, ...]
    numbers: tuple[bool, ...]
    rows: tuple[tuple[TableCell, ...], ...]


def results_sheet(lines: Sequence[Line]) -> Sheet:
    """Every row: our time a step, what ran, and the ratio to each peer."""
    peers = peers_of(lines)
    first = ("row", "T x B x I x H", "precision", "mode", "us a step", "backend")
    heads = (*first, *(HEADS[peer] for peer in peers), "MiB", "first s")
    rows = tuple(tuple(_cells(line, peers)) for line in lines)
    numbers = (False,) * 4 + (True, False) + (True,) * (len(peers) + 2)
    return filled(Sheet("ratio: the other's time / openrnn's", heads, numbers, rows))


def filled(sheet: Sheet) -> Sheet:
    """The sheet without the columns that say nothing."""
    keep = [
        index
        for index in range(len(sheet.heads))
        if any(row[index].text != "-" for row in sheet.rows)
    ]
    return Sheet(
        sheet.title, tuple(sheet.heads[index] for index in keep),
        tuple(sheet.numbers[index] for index in keep),
        tuple(tuple(row[index] for index in keep) for row in sheet.rows),
    )  # fmt: skip


def _cells(line: Line, peers: Sequence[str]) -> Iterator[TableCell]:
    yield from map(TableCell, (line.row.name, line.row.shape, line.precision, line.mode))
    ours = line.ours
    timed = ours is not None and ours.us is not None
    yield TableCell(_amount(step_us(ours)) + _mark(ours)) if ours and timed else _state(ours)
    yield TableCell((ours.chosen if ours else None) or "-")
    for peer in peers:
        pair = line.pair(peer)
        yield ratio_cell(pair) if pair else _state(line.results.get(peer))
    memory = ours.memory_mib if ours else None
    first = ours.first_s if ours else None
    yield TableCell("-" if memory is None else _amount(memory))
    yield TableCell("-" if first is None else f"{first:.2f}")


def ratio_cell(pair: Pair) -> TableCell:
    """A ratio; ties and disturbed ones have signs of their own."""
    return TableCell(_amount(pair.ratio) + SIGNS.get(pair.verdict, ""), pair.verdict)


def _state(result: Measurement | None) -> TableCell:
    if result is None or result.status == "refused":
        return TableCell("-")
    return TableCell(result.status, "fault")


def _mark(result: Measurement) -> str:
    return "" if quiet(result) else SIGNS["disturbed"]


def summary_sheet(lines: Sequence[Line]) -> Sheet:
    """Geometric means, with the least ratio and the losses beside them."""
    rows = tuple(tuple(summary_cells(summary)) for summary in summaries(lines))
    return filled(Sheet("geometric mean of the ratios", COUNTED, COUNTED_NUMBERS, rows))


def summary_cells(summary: Summary) -> Iterator[TableCell]:
    """A row of the same."""
    yield from map(TableCell, (TITLES[summary.peer], summary.precision, summary.mode))
    yield TableCell(str(len(summary.pairs)))
    if summary.pairs:
        mean = summary.mean
        yield TableCell(_amount(mean), "win" if mean > 1 else "loss")
        for pair in (summary.least, summary.most):
            yield TableCell(f"{_amount(pair.ratio)} {pair.ours.row.name}", pair.verdict)
    else:
        yield from map(TableCell, "---")
    for verdict in ("win", "tie", "loss"):
        count = summary.count(verdict)
        yield TableCell(str(count), verdict if count else "")
    yield TableCell(str(summary.disturbed) if summary.disturbed else "-")


def losses_sheet(lines: Sequence[Line]) -> Sheet:
    """Every pair that we lose."""
    heads = (
        "row",
        "T x B x I x H",
        "precision",
        "mode",
        "against",
        "ratio",
        "ours us",
        "theirs us",
    )
    rows = tuple(
        (
            *map(TableCell, (pair.ours.row.name, pair.ours.row.shape, pair.ours.precision)),
            *map(TableCell, (pair.ours.mode, TITLES[pair.peer.engine])),
            ratio_cell(pair),
            *(TableCell(_amount(result.us or 0.0)) for result in (pair.ours, pair.peer)),
        )
        for pair in judged(lines, "loss")
    )
    return Sheet(losses_title(lines).lower(), heads, (False,) * 5 + (True,) * 3, rows)


def losses_title(lines: Sequence[Line]) -> str:
    """How many ratios are losses, and how many disturbed ones may be."""
    lost, disturbed = len(judged(lines, "loss")), len(judged(lines, "disturbed"))
    title = f"Losses, {lost}, the worst first" if lost else "No loss"
    if not any(judged(lines, verdict) for verdict in ("win", "tie", "loss")):
        title = "Nothing to compare"
    return f"{title}; {disturbed} disturbed, not counted" if disturbed else title


def moved_sheet(moved: Sequence[Moved]) -> Sheet:
    """What a comparison with older results found beyond noise."""
    heads = ("row", "precision", "mode", "engine", "before us", "now us", "before / now")
    rows = tuple(
        (
            *map(TableCell, (change.now.row.name, change.now.precision, change.now.mode)),
            TableCell(TITLES[change.now.engine]),
            TableCell(_amount(change.before.us or 0.0)),
            TableCell(_amount(change.now.us or 0.0)),
            TableCell(_amount(change.ratio), "win" if change.ratio > 1 else "loss"),
        )
        for change in moved
    )
    return Sheet("moved beyond noise", heads, (False,) * 4 + (True,) * 3, rows)


def errors_sheet(lines: Sequence[Line]) -> Sheet:
    """The relative errors of rows that are about them: those of any float32 numbers."""
    about = [line for line in lines if line.row.full]
    engines = list(dict.fromkeys(name for line in about for name in line.results))
    heads = ("row", "T x B x I x H", "precision", "mode", *(TITLES[name] for name in engines))
    rows = tuple(
        (
            *map(TableCell, (line.row.name, line.row.shape, line.precision, line.mode)),
            *(_error(line.results.get(name)) for name in engines),
        )
        for line in about
    )
    numbers = (False,) * 4 + (True,) * len(engines)
    return filled(Sheet("relative error against float64", heads, numbers, rows))


def _error(result: Measurement | None) -> TableCell:
    if result is None or result.error is None:
        return _state(result)
    return TableCell(f"{result.error:.3e}", "fault" if result.status == "wrong" else "")


def refusal_lines(lines: Sequence[Line]) -> Iterator[str]:
    """Who refused, why, and how many rows."""
    for (engine, reason), rows in refusals(lines).items():
        names = ", ".join(rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
        yield f"{TITLES[engine]}: {reason} ({names})"


def fault_line(result: Measurement) -> str:
    """A wrong or failed result in words."""
    what = f"{result.row.name}, {result.precision}, {result.mode}"
    return f"{result.status}: {TITLES[result.engine]}, {what}: {result.reason}"


def _amount(value: float) -> str:
    """Three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
