"""Rows one after the other: progress and time left, results written as they come, Ctrl-C."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from openrnn.bench import interrupt
from openrnn.bench.cases import BenchRow
from openrnn.bench.engines.base import Engine
from openrnn.bench.measure import measure
from openrnn.bench.ratios import lines_of, peers_of, step_us
from openrnn.bench.record import Measurement, Writer
from openrnn.bench.sides import DeviceLostError
from openrnn.bench.tables import HEADS, ratio_cell

Todo = tuple[BenchRow, str]  # a row and its precision


@dataclass
class Session:
    """What is to be measured, how, and what was found so far.

    Args:
        minutes: after so long it ends; what is not complete by then stays for `--resume`.
    """

    device: str
    seconds: float
    minutes: float | None = None
    results: list[Measurement] = field(default_factory=list)
    ended: str | None = None  # why it ended before its last row
    planned: bool = False  # it ended as it was asked to

    def left(self, todo: Sequence[Todo]) -> list[Todo]:
        """The rows that have no result yet."""
        done = {(result.row, result.precision) for result in self.results}
        return [(row, precision) for row, precision in todo if (row, precision) not in done]

    def run(
        self, left: Sequence[Todo], engines: Sequence[Engine], writer: Writer, screen: Console
    ) -> None:
        """Measures rows; what is measured is kept whatever happens."""
        begin, number = monotonic(), len(left)
        until = float("inf") if self.minutes is None else begin + 60 * self.minutes
        screen.print(self._plan(left, len(engines)), markup=False, soft_wrap=True)
        with _bar(screen) as progress, interrupt.deferred(), interrupt.limited(until):
            task = progress.add_task("", total=len(left))
            index = 0
            try:
                for index, (row, precision) in enumerate(left):
                    each = (monotonic() - begin) / index if index else 0.0  # seconds of a row
                    if monotonic() + each > until:
                        raise interrupt.OutOfTime
                    progress.update(task, description=f"{row.name} {precision}")
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # the table shows which backend ran
                        found = measure(row, precision, self.device, engines, self.seconds)
                    interrupt.check()
                    writer.add(found)
                    self.results += found
                    each = (monotonic() - begin) / (index + 1)
                    progress_text = (
                        f"[{index + 1} of {number}, {_about(each * (number - index - 1))}] "
                    )
                    progress.console.print(
                        progress_text + told(found), markup=False, soft_wrap=True
                    )
                    progress.advance(task)
            except interrupt.OutOfTime:
                self.ended = f"{self.minutes:g} minutes are over, {_rest(number - index, writer)}"
                self.planned = True
            except KeyboardInterrupt:
                self.ended = f"interrupted, {_rest(len(left) - index, writer)}"
                raise
            except DeviceLostError as error:
                self.ended = str(error)

    def _plan(self, left: Sequence[Todo], engines: int) -> str:
        """How many rows there are, and the least that they take."""
        timing = sum(len(row.modes) for row, _ in left) * engines * self.seconds
        rows = f"{len(left)} row{'s' * (len(left) != 1)} with up to {engines} engines each"
        least = f"{timing / 60:.1f} minutes of timing, compilation and checks aside"
        budget = "" if self.minutes is None else f"; as many as fit into {self.minutes:g} minutes"
        return f"{rows}: about {least}{budget}"


def _about(seconds: float) -> str:
    """The time that is left, roughly."""
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def _rest(count: int, writer: Writer) -> str:
    """What a run leaves that ends early, and how to go on."""
    rows = f"{count} row{'s' * (count != 1)} left"
    if writer.path is None:
        return f"{rows}: with --json FILE a run could be gone on with"
    return f"{rows}: what was measured is kept, go on with --resume --json {writer.path}"


def _bar(screen: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=screen, expand=True, transient=True)


def told(found: Sequence[Measurement]) -> str:
    """A measured row in a line."""
    parts = []
    for line in lines_of(found):
        ours = line.ours
        words = [line.mode]
        if ours is None or ours.us is None:
            words.append(ours.status if ours else "nothing")
        else:
            words.append(f"{step_us(ours):.3g} us a step")
            pairs = ((peer, line.pair(peer)) for peer in peers_of([line]))
            words += [f"{HEADS[peer]} {ratio_cell(pair).text}" for peer, pair in pairs if pair]
        parts.append(" ".join(words))
    row = found[0].row
    return f"{row.name} ({row.shape}) {found[0].precision}: " + "; ".join(parts)
