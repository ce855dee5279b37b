"""One row: every engine checked, then timed in turn with the others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from openrnn.bench import interrupt, timer
from openrnn.bench.cases import Row
from openrnn.bench.check import Judge, bounded, outputs
from openrnn.bench.engines.base import Engine, Ready
from openrnn.bench.record import Result
from openrnn.bench.task import PRECISIONS, Task, products
from openrnn.errors import OpenRNNError

LOST = "the GPU is lost to this process"


class DeviceLostError(OpenRNNError):
    """The device answers no more: nothing that follows in this process would be a result."""


class _Right(NamedTuple):
    """A candidate that was found right in a mode, and what the comparison told."""

    ready: Ready
    result: Result


@dataclass
class _Entry:
    """An engine on its way through a row: what is known of each mode, and what is left to time."""

    engine: Engine
    known: dict[str, Result] = field(default_factory=dict)
    ready: dict[str, list["_Right"]] = field(default_factory=dict)

    def settle(self, modes: Sequence[str], blank: Result, status: str, reason: str) -> None:
        for mode in modes:
            self.known[mode] = replace(blank, mode=mode, status=status, reason=reason)


def measure(
    row: Row, precision: str, device: str, engines: Sequence[Engine], seconds: float
) -> list[Result]:
    """The results of a row, in order of modes and engines.

    Raises:
        DeviceLostError: an engine left the GPU in a state in which nothing runs any more.
    """
    with products(PRECISIONS[precision].products):
        task = Task(row, precision, device)
        part = bounded(task)
        judge = Judge(part)
        meant = [engine for engine in engines if engine.concerns(task)]
        entries = [_checked(engine, task, part, judge) for engine in meant]
        for mode in row.modes:
            _time(entries, mode, device, seconds)
    clock = None if device == "cpu" else timer.clock()
    found = [
        replace(entry.known[mode], sm_mhz=clock if entry.known[mode].us else None)
        for mode in row.modes
        for entry in entries
    ]
    if device != "cpu":
        torch.cuda.empty_cache()
    return found


def _checked(engine: Engine, task: Task, part: Task, judge: Judge) -> _Entry:
    """Every candidate of an engine compared with float64; the right ones are ready to be timed."""
    row = task.row
    entry = _Entry(engine)
    blank = Result(row, task.precision, "", engine.name, "")
    refusal = engine.refuses(task)
    if refusal:
        entry.settle(row.modes, blank, "refused", refusal)
        return entry
    try:
        # of a task that is compared whole there is one set of ways: a second would take memory
        smalls = engine.candidates(part)
        ways: Iterable[tuple[Ready, Ready]] = ((one, one) for one in smalls)
        if part is not task:
            ways = zip(smalls, engine.candidates(task), strict=True)
        for small, large in ways:
            _compare(entry, small, large, judge, blank)
    except Exception as error:
        modes = [mode for mode in row.modes if not entry.ready.get(mode)]
        entry.settle(modes, blank, "failed", reason_of(error))
    return entry


def _compare(entry: _Entry, small: Ready, large: Ready, judge: Judge, blank: Result) -> None:
    part = small.task.row
    for mode in part.modes:
        if mode in entry.known and entry.known[mode].status == "failed":
            del entry.known[mode]  # of another candidate
        try:
            first, found = timer.once(partial(outputs, small, mode), small.task.device)
            verdict = judge.verdict(found, mode)
        except Exception as error:
            if not entry.ready.get(mode):
                entry.settle([mode], blank, "failed", reason_of(error))
            continue
        result = replace(
            blank, mode=mode, status="ok", chosen=large.chosen.get(mode), error=verdict.error,
            checked=(part.steps, part.batch), first_s=first,
        )  # fmt: skip
        if verdict.right:
            entry.ready.setdefault(mode, []).append(_Right(large, result))
        elif not entry.ready.get(mode):
            reason = f"{verdict.worst} off by {verdict.error:.1e} of its norm"
            entry.known[mode] = replace(result, status="wrong", reason=reason)


def _time(entries: Sequence[_Entry], mode: str, device: str, seconds: float) -> None:
    """Times what is ready in a mode and completes the results."""
    chosen: dict[str, _Right] = {}
    memory: dict[str, float | None] = {}
    for entry in entries:
        if not entry.ready.get(mode):
            continue
        name = entry.engine.name
        try:
            chosen[name] = _fastest(entry.ready[mode], mode, device)
            if entry.engine.graphed:  # its memory is its own; here the whole call is captured
                chosen[name].ready.run(mode)
            else:
                memory[name] = timer.peak(partial(chosen[name].ready.run, mode), device)
        except Exception as error:
            chosen.pop(name, None)
            entry.settle([mode], entry.ready[mode][0].result, "failed", reason_of(error))
    calls = {name: partial(right.ready.run, mode) for name, right in chosen.items()}
    times = timer.interleaved(calls, device, seconds) if calls else {}
    for entry in entries:
        name = entry.engine.name
        if name in times:
            entry.known[mode] = _completed(chosen[name].result, times[name], memory.get(name))


def _completed(result: Result, timing: timer.Timing, memory: float | None) -> Result:
    return replace(
        result, us=timing.us, low=timing.low, high=timing.high, repeats=timing.repeats,
        others=timing.others, memory_mib=memory,
    )  # fmt: skip


def _fastest(candidates: Sequence[_Right], mode: str, device: str) -> _Right:
    """The candidate of the least time, each tried twice; one that fails at this size is left out.

    Raises:
        Exception: what the last candidate raised, where all fail.
    """
    if len(candidates) == 1:
        return candidates[0]
    times: dict[int, float] = {}
    failure: Exception | None = None
    for place, right in enumerate(candidates):
        call = partial(right.ready.run, mode)
        try:
            times[place] = min(timer.sample(call, 1, device) for _ in range(2))
        except Exception as error:
            reason_of(error)  # which ends everything where the GPU is lost
            failure = error.with_traceback(None)  # whose frames hold what the others need
    if failure is not None and not times:
        raise failure
    return candidates[min(times, key=lambda place: times[place])]


def reason_of(error: Exception) -> str:
    """What an engine says of its failure, in one line.

    Raises:
        DeviceLostError: the failure is one after which the GPU answers no more.
    """
    interrupt.check()  # a compiler's own processes end by the same Ctrl-C
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "out of GPU memory"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no words")
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceLostError(f"{LOST}: {text}; go on with --resume") from error
    return f"{type(error).__name__}: {text}"[:300]
