"""Draws run in forked processes: one that dies or hangs is a fault, and the others go on."""

import faulthandler
import multiprocessing
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from .plans import odd_of
from .verdict import FAULT, Outcome, signature

CPU_SECONDS = 120  # of one draw, compilation aside; SIGPROF ends it wherever it is
WALL_SECONDS = 900  # of one draw that waits for ever
CHUNK = 200

Draw = Callable[[int, Callable[[str], None]], Outcome]
_FORK: Any = multiprocessing.get_context("fork")


def run(kind: str, draw: Draw, indices: list[int], jobs: int) -> Iterator[Outcome]:
    """The outcome of each draw, in no order; `draw` also takes what it is about to do, in words."""
    waiting = [indices[at : at + CHUNK] for at in range(0, len(indices), CHUNK)]
    running: dict[Connection, _Worker] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                worker = _Worker(kind, draw, waiting.pop(0))
                running[worker.pipe] = worker
            for pipe in wait([*running], timeout=5):
                outcome = running[pipe].heard()
                if outcome is not None:
                    yield outcome
            for pipe, worker in [*running.items()]:
                fault, left = worker.ended()
                if left is not None:
                    del running[pipe]
                    if fault:
                        yield fault
                    if left:
                        waiting.insert(0, left)
    finally:
        for worker in running.values():
            worker.process.kill()


def apart(function: Callable[..., None], *given: object) -> None:
    """Calls a function in a forked process, and waits for it; RuntimeError where it fails."""
    process = _FORK.Process(target=function, args=given)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{function.__name__} ended with {process.exitcode}")


class _Worker:
    """One process with a list of draws."""

    def __init__(self, kind: str, draw: Draw, indices: list[int]) -> None:
        self.kind, self.indices = kind, indices
        self.pipe, there = _FORK.Pipe(duplex=False)
        self.trail = tempfile.NamedTemporaryFile("w+", suffix=".trace")  # noqa: SIM115
        self.process = _FORK.Process(target=_work, args=(draw, indices, there, self.trail))
        sys.stdout.flush()
        self.process.start()
        there.close()
        self.stage, self.since, self.over = "", time.monotonic(), False
        self.last = indices[0]  # that ended

    def heard(self) -> Outcome | None:
        """The next outcome, if that is what came through the pipe."""
        try:
            said = self.pipe.recv()
        except (EOFError, OSError):
            self.over = True
            return None
        self.since = time.monotonic()
        if isinstance(said, Outcome):
            self.indices = [index for index in self.indices if index != said.index]
            self.stage, self.last = "", said.index
            return said
        self.stage = said
        return None

    def ended(self) -> tuple[Outcome | None, list[int] | None]:
        """Once it has ended: a fault if it died, and the draws that are left; else (None, None)."""
        waited = time.monotonic() - self.since > WALL_SECONDS
        if waited and not self.over:
            self.process.kill()
        elif not self.over:
            return None, None
        self.process.join()
        code = self.process.exitcode or 0
        if code < 0 and not self.indices:
            words = f"crash ({signal.Signals(-code).name}) after the draw, {self._place()}"
            return Outcome(self.kind, self.last, FAULT, words, signature(words)), []
        if not self.indices or (code == 0 and not waited):
            return None, self.indices
        if waited or code == -signal.SIGPROF:
            what = f"hang ({'waits' if waited else 'computes'})"
        else:
            name = signal.Signals(-code).name if code < 0 else f"exit {code}"
            what = f"crash ({name})"
        index, *left = self.indices
        if self.stage.startswith("torch.nn"):  # torch's own crash
            return Outcome(self.kind, index, "discarded", f"torch.nn itself: {what}"), left
        plan = self.stage.partition("\n")[2]
        place = self._place()
        words = f"{what} in {place}" if place else what
        return Outcome(self.kind, index, FAULT, words, signature(words), plan, odd_of(plan)), left

    def _place(self) -> str:
        """The innermost line of ours in what the fault handler wrote."""
        self.trail.seek(0)
        for line in self.trail:
            if "openrnn/" in line or "torch/" in line:
                found = re.search(r'File ".*?((?:openrnn|torch)/[^"]*)", line \d+ in (\S+)', line)
                if found:
                    return f"{found[1]}:{found[2]}"
        return ""


def _work(draw: Draw, indices: list[int], pipe: Connection, trail: Any) -> None:
    faulthandler.enable(trail)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for index in indices:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            outcome = draw(index, pipe.send)
        except Exception as error:  # the fuzzer's own mistake, seen as such
            text = "".join(traceback.format_exception(error)[-6:])
            outcome = Outcome(
                "fuzzer", index, FAULT, text, signature("fuzzer", type(error).__name__, str(error))
            )
        pipe.send(outcome)
        if outcome.verdict == FAULT:  # what went wrong may have spoilt the process: a fresh one
            break
    pipe.close()
