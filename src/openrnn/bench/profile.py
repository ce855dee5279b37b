"""Where the time of one row goes: a trace of torch.profiler, kernels and the gaps between them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # its own public enum
from torch.profiler import ProfilerActivity, profile

from openrnn.bench import timer
from openrnn.bench.cases import Row
from openrnn.bench.engines.ours import Ours
from openrnn.bench.report import rendered
from openrnn.bench.task import PRECISIONS, Task, products
from openrnn.bench.words import Cell, Sheet
from openrnn.errors import OpenRNNError

FOLDER = Path("runs/profile")
CALLS, SHOWN = 5, 12


@dataclass(frozen=True)
class Span:
    """Something that ran, in microseconds."""

    name: str
    begin: float
    end: float


def run(row: Row, precision: str, device: str, backend: str, out: Console) -> None:
    """Profiles our layer on a row, each mode, and prints what took how long."""
    with products(PRECISIONS[precision].products):
        task = Task(row, precision, device)
        engine = Ours(backend)
        reason = engine.refuses(task)
        if reason:
            raise OpenRNNError(f"{row.name} in {precision}: {reason}")
        ready = next(iter(engine.candidates(task)))
        for mode in row.modes:
            call = partial(ready.run, mode)
            for _ in range(3):
                timer.once(call, device)
            spans, path = _traced(call, device, f"{row.name}-{precision}-{mode}")
            out.print(
                f"{row.name} ({row.shape}) {precision} {mode}, {ready.chosen[mode]}, {CALLS} calls"
            )
            for sheet in sheets(spans):
                out.print(rendered(sheet))
            out.print(summary(spans, device))
            out.print(f"trace: {path}", soft_wrap=True)


def _traced(call: timer.Call, device: str, name: str) -> tuple[list[Span], Path]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device != "cpu" else [])
    with profile(activities=kinds) as found:
        for _ in range(CALLS):
            timer.once(call, device)
    path = FOLDER / f"{name}.trace.json"
    found.export_chrome_trace(str(path))
    wanted = DeviceType.CPU if device == "cpu" else DeviceType.CUDA
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == wanted and (device != "cpu" or event.cpu_parent is None)
    ]
    return sorted(spans, key=lambda span: span.begin), path


def sheets(spans: Sequence[Span]) -> Iterable[Sheet]:
    """The most expensive names, and the largest gaps."""
    total = sum(span.end - span.begin for span in spans) or 1.0
    names: dict[str, list[float]] = {}
    for span in spans:
        names.setdefault(span.name, []).append(span.end - span.begin)
    ranked = sorted(names.items(), key=lambda item: sum(item[1]), reverse=True)[:SHOWN]
    rows = tuple(
        _cells(
            name[:80], f"{len(times) / CALLS:g}", f"{sum(times) / CALLS:.1f}",
            f"{100 * sum(times) / total:.0f}%",
        )
        for name, times in ranked
    )  # fmt: skip
    yield Sheet(
        "what ran", ("name", "a call", "us a call", "share"), (False, True, True, True), rows
    )
    widest = sorted(gaps(spans), key=lambda gap: gap[0], reverse=True)[:SHOWN]
    rows = tuple(_cells(f"{us:.1f}", before[:60], after[:60]) for us, before, after in widest)
    yield Sheet("widest gaps", ("us", "after", "before"), (True, False, False), rows)


def gaps(spans: Sequence[Span]) -> list[tuple[float, str, str]]:
    """The times in which nothing ran: microseconds, what ended, what began."""
    found: list[tuple[float, str, str]] = []
    for last, span in _fronts(spans):
        if span.begin > last.end:
            found.append((span.begin - last.end, last.name, span.name))
    return found


def _fronts(spans: Sequence[Span]) -> Iterable[tuple[Span, Span]]:
    """Each span but the first, with the one before it that ended last."""
    last = None
    for span in spans:
        if last is not None:
            yield last, span
        if last is None or span.end > last.end:
            last = span


def summary(spans: Sequence[Span], device: str) -> str:
    """How much of the time something ran."""
    if not spans:
        return "torch.profiler saw nothing run"
    whole = max(span.end for span in spans) - spans[0].begin
    idle = sum(gap[0] for gap in gaps(spans))
    where = "between torch's operators: Python, and our CPU kernels" if device == "cpu" else "idle"
    return f"{whole / CALLS:.1f} us a call, of which {idle / CALLS:.1f} us {where}"


def _cells(*words: str) -> tuple[Cell, ...]:
    return tuple(map(Cell, words))
