"""What a user sees of a run: a bar or plain lines, TensorBoard scalars, the final table."""

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from openrnn.lm.evaluate import Scores
from openrnn.lm.tasks import Task
from openrnn.lm.train import Report, Reporter

LINE = 10.0  # percent of a run, or seconds, from one plain line to the next


def status(report: Report) -> str:
    """A report as one line of text."""
    minutes, seconds = divmod(round(report.left), 60)
    return (
        f"loss {report.loss:.3f}  {report.task.text(report.loss)}  "
        f"{_amount(report.speed)}{report.task.letters}/s  {minutes}:{seconds:02} left"
    )


def _amount(value: float) -> str:
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.1f} k"


class Bar:
    """A progress bar, for a terminal."""

    def __init__(self, progress: Progress, task: Task) -> None:
        self.progress, self.kind = progress, task
        self.task = progress.add_task("", total=1.0, status="kernels are loaded, new ones compiled")

    def report(self, report: Report) -> None:
        self.progress.update(
            self.task,
            completed=report.progress,
            description=f"step {report.step}",
            status=status(report),
        )

    def held_out(self, step: int, nats: float) -> None:
        self.progress.console.print(
            f"step {step}: {self.kind.text(nats)} held out", highlight=False
        )


class Lines:
    """A progress line from time to time, for a file or a pipe."""

    def __init__(self, console: Console, task: Task) -> None:
        self.console, self.kind = console, task
        self.next = 0.0

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def report(self, report: Report) -> None:
        percent = 100 * report.progress
        if percent >= self.next:
            self.next = min(percent + LINE, 100)
            self._print(f"{percent:3.0f}%  step {report.step}  {status(report)}")

    def held_out(self, step: int, nats: float) -> None:
        self._print(f"step {step}: {self.kind.text(nats)} held out")


class ScalarWriter:
    """TensorBoard scalars."""

    def __init__(self, writer: Any, task: Task) -> None:
        self.writer, self.kind = writer, task

    def report(self, report: Report) -> None:
        scalars = {
            "loss/train": report.loss,
            f"{self.kind.tag}/train": self.kind.figure(report.loss),
            f"perf/{self.kind.unit}s_per_s": report.speed,
            "grad_norm": report.norm,
            "lr": report.lr,
        }
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, report.step)

    def held_out(self, step: int, nats: float) -> None:
        self.writer.add_scalar(f"{self.kind.tag}/held_out", self.kind.figure(nats), step)

    def scores(self, step: int, scores: Scores) -> None:
        """Writes the final score as a curve of its own: it is on more symbols than earlier ones."""
        self.writer.add_scalar(f"{self.kind.tag}/held_out_end", scores.model, step)
        if scores.test is not None:
            self.writer.add_scalar(f"{self.kind.tag}/test", scores.test, step)


class Rates:
    """Records the speed, without the first report, in which kernels are loaded or compiled."""

    def __init__(self) -> None:
        self.speeds: list[float] = []

    def report(self, report: Report) -> None:
        self.speeds.append(report.speed)

    def held_out(self, step: int, nats: float) -> None:
        """Does nothing: only speed is recorded here."""

    def write(self, path: Path, step: int, backend: str, scores: Scores) -> None:
        """Writes the result of a run as JSON, for programs."""
        task = scores.task
        found = {
            "steps": step, task.key: scores.model, "backend": backend,
            f"{task.unit}s_per_s": statistics.median(self.speeds[1:] or self.speeds or [0.0]),
        }  # fmt: skip
        if scores.test is not None:
            found[f"test_{task.key}"] = scores.test
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")


class Several:
    """Passes what it is told on to each of its reporters."""

    def __init__(self, reporters: list[Reporter]) -> None:
        self.reporters = reporters

    def report(self, report: Report) -> None:
        for reporter in self.reporters:
            reporter.report(report)

    def held_out(self, step: int, nats: float) -> None:
        for reporter in self.reporters:
            reporter.held_out(step, nats)


@contextmanager
def screen(console: Console, task: Task) -> Iterator[Reporter]:
    """A bar on a terminal, else lines."""
    if not console.is_terminal:
        yield Lines(console, task)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:3.0f}%"),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        yield Bar(progress, task)


@contextmanager
def tensorboard(
    folder: Path, step: int, console: Console, task: Task
) -> Iterator[list[ScalarWriter]]:
    """Writers of TensorBoard scalars in a folder, from a step on.

    Without the package tensorboard there is none, and a line says so.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        console.print(
            "no TensorBoard scalars: the package tensorboard is not installed", highlight=False
        )
        yield []
        return
    writer = SummaryWriter(str(folder), purge_step=step or None)
    try:
        yield [ScalarWriter(writer, task)]
    finally:
        writer.close()


def table(scores: Scores) -> Table:
    """The model beside its baselines."""
    task = scores.task
    what = f"{task.title} of {scores.size:,} held-out {task.unit}s"
    shown = Table(title=what, title_justify="left")
    shown.add_column("what")
    shown.add_column(task.title, justify="right")
    rows = {"this model": scores.model, **scores.baselines}
    if scores.test is not None:
        rows["this model, test part"] = scores.test
    for name, figure in rows.items():
        shown.add_row(name, f"{figure:.3f}")
    return shown
