"""Where the time of a row goes: a trace of torch.profiler, kernels and the gaps between them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from rich.console import Console
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # its own public enum
from torch.profiler import ProfilerActivity, profile

from openrnn.bench import timer
from openrnn.bench.cases import BenchRow
from openrnn.bench.engines.ours import Ours
from openrnn.bench.record import Profiled
from openrnn.bench.report import rendered
from openrnn.bench.tables import Sheet, TableCell
from openrnn.bench.task import PRECISIONS, Task, products

FOLDER = Path("runs/profile")
CALLS, SHOWN = 5, 12


@dataclass(frozen=True)
class TimeSpan:
    """Something that ran, in microseconds."""

    name: str
    begin: float
    end: float


def run(row: BenchRow, precision: str, device: str, backend: str, out: Console) -> list[Profiled]:
    """Profiles our layer on a row, each mode, prints what took how long, and returns it."""
    found = []
    with products(PRECISIONS[precision].products):
        task = Task(row, precision, device)
        ready = next(iter(Ours(backend).candidates(task)))
        for mode in row.modes:
            call = partial(ready.run, mode)
            for _ in range(3):
                timer.once(call, device)
            spans, path = _traced(call, device, f"{row.name}-{precision}-{mode}")
            out.print(
                f"{row.name} ({row.shape}) {precision} {mode}, {ready.chosen(mode)}, {CALLS} calls"
            )
            names = by_name(spans)
            found += [
                Profiled(row, precision, mode, name, us, count)
                for name, (us, count) in names.items()
            ]
            for sheet in (names_sheet(names, row.steps), gaps_sheet(spans)):
                out.print(rendered(sheet))
            out.print(summary(spans, device))
            out.print(f"trace: {path}", soft_wrap=True)
    return found


def _traced(call: timer.Call, device: str, name: str) -> tuple[list[TimeSpan], Path]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device != "cpu" else [])
    with profile(activities=kinds) as found:
        for _ in range(CALLS):
            timer.once(call, device)
    path = FOLDER / f"{name}.trace.json"
    found.export_chrome_trace(str(path))
    wanted = DeviceType.CPU if device == "cpu" else DeviceType.CUDA
    spans = [
        TimeSpan(event.name, event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == wanted and (device != "cpu" or event.cpu_parent is None)
    ]
    return sorted(spans, key=lambda span: span.begin), path


def by_name(spans: Sequence[TimeSpan]) -> dict[str, tuple[float, float]]:
    """Microseconds and runs in a call of each name, the most expensive first."""
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.name, []).append(span.end - span.begin)
    found = {name: (sum(all_) / CALLS, len(all_) / CALLS) for name, all_ in times.items()}
    return dict(sorted(found.items(), key=lambda item: item[1][0], reverse=True))


def names_sheet(names: Mapping[str, tuple[float, float]], steps: int) -> Sheet:
    """The most expensive names."""
    total = sum(us for us, _ in names.values()) or 1.0
    rows = tuple(
        _cells(
            name[:80], f"{count:g}", f"{us:.1f}", f"{us / steps:.3f}", f"{100 * us / total:.0f}%"
        )
        for name, (us, count) in islice(names.items(), SHOWN)
    )
    heads = ("name", "a call", "us a call", "us a step", "share")
    return Sheet("what ran", heads, (False, True, True, True, True), rows)


def gaps_sheet(spans: Sequence[TimeSpan]) -> Sheet:
    """The largest gaps."""
    widest = sorted(gaps(spans), key=lambda gap: gap[0], reverse=True)[:SHOWN]
    rows = tuple(_cells(f"{us:.1f}", before[:60], after[:60]) for us, before, after in widest)
    return Sheet("widest gaps", ("us", "after", "before"), (True, False, False), rows)


def gaps(spans: Sequence[TimeSpan]) -> list[tuple[float, str, str]]:
    """The times in which nothing ran: microseconds, what ended, what began."""
    found: list[tuple[float, str, str]] = []
    for last, span in _fronts(spans):
        if span.begin > last.end:
            found.append((span.begin - last.end, last.name, span.name))
    return found


def _fronts(spans: Sequence[TimeSpan]) -> Iterable[tuple[TimeSpan, TimeSpan]]:
    """Each span but the first, with the one before it that ended last."""
    last = None
    for span in spans:
        if last is not None:
            yield last, span
        if last is None or span.end > last.end:
            last = span


def summary(spans: Sequence[TimeSpan], device: str) -> str:
    """How much of the time something ran."""
    if not spans:
        return "torch.profiler saw nothing run"
    whole = max(span.end for span in spans) - spans[0].begin
    idle = sum(gap[0] for gap in gaps(spans))
    where = "between torch's operators: Python, and our CPU kernels" if device == "cpu" else "idle"
    return f"{whole / CALLS:.1f} us a call, of which {idle / CALLS:.1f} us {where}"


def _cells(*words: str) -> tuple[TableCell, ...]:
    return tuple(map(TableCell, words))
