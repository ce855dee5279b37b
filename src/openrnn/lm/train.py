"""The loop: trains a run until its budget is spent or a signal asks to stop, and saves it."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from openrnn.errors import OpenRNNError
from openrnn.lm import checkpoint, evaluate
from openrnn.lm.run import Learned, TrainingRun
from openrnn.lm.tasks import Task
from openrnn.lm.workers import launched

SAVE = 30.0  # seconds from one checkpoint to the next
GLANCES = 8  # short evaluations on held-out bytes in a run


@dataclass(frozen=True)
class Report:
    """Where a run stands, means taken since the report before."""

    task: Task
    step: int
    progress: float
    loss: float  # nats a symbol
    speed: float  # symbols a second
    norm: float
    lr: float
    left: float  # seconds


class Reporter(Protocol):
    """What is called as a run proceeds."""

    def report(self, report: Report) -> None: ...

    def held_out(self, step: int, nats: float) -> None: ...


class _Window:
    """The steps since the last report."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.begin = run, (run.step, run.elapsed)
        self._open()

    def _open(self) -> None:
        self.step, self.elapsed, self.pause = self.run.step, self.run.elapsed, 0.0
        self.total = torch.zeros((), dtype=torch.float64, device=self.run.workers.device)

    def add(self, learned: Learned) -> None:
        self.total += learned.loss
        self.last = learned

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around work that is not training: its time does not count in the reported rate."""
        begin = time.monotonic()
        yield
        self.pause += time.monotonic() - begin

    def due(self) -> bool:
        """Whether a report is due: twice a second, less often in long runs."""
        return self.run.elapsed - self.elapsed >= min(10.0, max(0.5, self.run.elapsed / 200))

    def close(self) -> Report:
        """The report on the steps since the last one; starts anew. All processes call it together.

        Raises:
            OpenRNNError: the loss or the gradient is no number any more.
        """
        run, workers, config = self.run, self.run.workers, self.run.config
        steps = run.step - self.step
        loss = workers.total(float(self.total) / steps)[0] / workers.world
        norm = float(self.last.norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise OpenRNNError(
                f"training diverged by step {run.step} (loss {loss}, norm of the gradient {norm}): "
                f"try a lower --lr than {config.lr}"
            )
        busy = max(run.elapsed - self.elapsed - self.pause, 1e-9)
        rate = steps * config.batch * config.bptt / busy
        progress = min(1.0, config.progress(run.step, run.elapsed))
        begin_step, begin = self.begin
        if config.steps is None:
            left = 60 * (config.minutes or 0.0) - run.elapsed
        else:
            left = (config.steps - run.step) * (run.elapsed - begin) / (run.step - begin_step)
        self._open()
        return Report(run.task, run.step, progress, loss, rate, norm, self.last.lr, max(0.0, left))


def train(run: TrainingRun, path: Path, reporter: Reporter) -> int:
    """Trains, reports and saves; returns the signal that ended it early, or 0.

    All processes go through the same branches: what depends on time or on signals is agreed on.

    Raises:
        CheckpointError: a checkpoint cannot be written; the one before is intact.
        OpenRNNError: the loss is no number any more; the last checkpoint is from before.
    """
    glance = evaluate.sample_of(run.corpus.held_out, evaluate.GLANCE)
    whole = evaluate.sample_of(run.corpus.held_out, evaluate.FULL)
    glanced = int(GLANCES * run.config.progress(run.step, run.elapsed))
    begin, saved = time.monotonic() - run.elapsed, (run.step, run.elapsed)
    window = _Window(run)
    with listen() as heard:
        while True:
            run.elapsed, number = run.workers.agree(time.monotonic() - begin, heard())
            progress = run.config.progress(run.step, run.elapsed)
            over = progress >= 1 or (number and run.step)
            keep = run.step > saved[0] and (over or run.elapsed - saved[1] >= SAVE)
            if run.step > window.step and (keep or window.due()):
                reporter.report(window.close())  # which refuses what must not be kept
            if keep:
                with window.paused():
                    save(run, path)
                saved = (run.step, run.elapsed)
            if over:
                return 0 if progress >= 1 else int(number)
            if int(GLANCES * progress) > glanced:
                glanced = int(GLANCES * progress)
                with window.paused():
                    reporter.held_out(run.step, evaluate.nats(run, glance))
            window.add(run.learn())
            if run.passed and run.config.task == "words":
                with window.paused():
                    run.plateau.judge(evaluate.nats(run, whole))


def save(run: TrainingRun, path: Path) -> None:
    """Writes the checkpoint of a run. All processes call it together and fail together."""
    tensors, record = run.snapshot()

    def write() -> None:
        if run.workers.first:
            checkpoint.write(path, tensors, record)

    run.workers.together(write, "the first process could not save")


@contextmanager
def listen() -> Iterator[Callable[[], int]]:
    """Gives a function that returns the signal that came, SIGINT or SIGTERM; 0 for none.

    A second one ends the process at once, but not under torchrun, which passes on a Ctrl-C that
    its processes have had already.
    """
    heard = 0

    def hear(number: int, _: object) -> None:
        nonlocal heard
        heard = number
        if not launched():
            signal.signal(number, before[number])

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before: dict[int, Any] = {
        number: signal.getsignal(number) or signal.SIG_DFL
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    for number in before:
        signal.signal(number, hear)
    try:
        yield lambda: heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
