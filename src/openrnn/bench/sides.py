"""One engine on its way through one row: checked, prepared and sampled, mode by mode.

A side may run in this process (`Local`) or, over the sources of another commit, in one of its own
(`bench.remote`); `measure` treats both alike. This module runs in both.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch

from openrnn.bench import interrupt, timer
from openrnn.bench.cases import BenchRow
from openrnn.bench.check import Judge, bounded, outputs
from openrnn.bench.engines.base import Engine, Ready
from openrnn.bench.modes import MODES
from openrnn.bench.record import Measurement
from openrnn.bench.task import Task
from openrnn.errors import NoBackendError, OpenRNNError

LOST = "the GPU is lost to this process"


class DeviceLostError(OpenRNNError):
    """The device answers no more: nothing that follows in this process would be a result."""


class SampleError(OpenRNNError):
    """An engine failed while it was timed: this one has no result, the others go on.

    Attributes:
        name: of the engine; reason: why, in one line.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


@dataclass
class Ground:
    """What all sides of a row share: its tensors, and what is right."""

    row: BenchRow
    precision: str
    device: str

    @cached_property
    def task(self) -> Task:
        return Task(self.row, self.precision, self.device)

    @cached_property
    def part(self) -> Task:
        """The part of the task on which engines are compared."""
        return bounded(self.task)

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.part)


class Side:
    """An engine on a row.

    Attributes:
        known: what is known of each mode so far; of those that are to be timed, without a time.
    """

    name: str
    known: dict[str, Measurement]

    def prepare(self, mode: str) -> bool:
        """Makes a mode ready to be sampled; False where it was not found right, or fails now."""
        raise NotImplementedError

    def sample(self, mode: str, count: int) -> float:
        """Microseconds of a call, the mean of `count` of them.

        Raises:
            SampleError: the call failed.
        """
        raise NotImplementedError

    def fail(self, mode: str, reason: str) -> None:
        """The mode has failed after it was prepared."""
        self.known[mode] = replace(self.known[mode], status="failed", reason=reason)

    def done(self, mode: str) -> None:
        """Frees what it holds for a mode that has been timed: the next one needs memory, too."""

    def busy(self) -> float:
        """Core-seconds that a process of its own has taken."""
        return 0.0

    def close(self) -> None:
        """Frees what the side holds."""


class _Right(NamedTuple):
    """A candidate that was found right in a mode, and what the comparison told."""

    ready: Ready
    result: Measurement


@dataclass
class Local(Side):
    """An engine in this process; it is checked as it is made."""

    engine: Engine
    ground: Ground
    known: dict[str, Measurement] = field(default_factory=dict)
    ready: dict[str, list[_Right]] = field(default_factory=dict)
    chosen: dict[str, _Right] = field(default_factory=dict)

    def __post_init__(self) -> None:
        row = self.ground.row
        self.name = self.engine.name
        self.blank = Measurement(row, self.ground.precision, "", self.name, "")
        try:
            refusal = self.engine.refuses(self.ground.task)
        except torch.OutOfMemoryError as error:  # not even for the tensors of the row
            self._settle(row.modes, self.blank, "failed", reason_of(error))
            return
        if refusal:
            self._settle(row.modes, self.blank, "refused", refusal)
        else:
            self._check()

    def prepare(self, mode: str) -> bool:
        if not self.ready.get(mode):
            return False
        device, memory = self.ground.device, None
        try:
            chosen = _fastest(self.ready[mode], mode, device)
            if self.engine.graphed:  # its memory is its own; here the whole call is captured
                chosen.ready.run(mode)
            elif not MODES[mode].host:
                memory = timer.peak(partial(chosen.ready.run, mode), device)
        except Exception as error:
            self._settle([mode], self.ready[mode][0].result, "failed", reason_of(error))
            return False
        self.chosen[mode] = chosen
        self.known[mode] = replace(chosen.result, memory_mib=memory)
        return True

    def sample(self, mode: str, count: int) -> float:
        call = partial(self.chosen[mode].ready.run, mode)
        try:
            return timer.sample(call, count, self.ground.device, MODES[mode].host)
        except Exception as error:
            reason = reason_of(error)
        raise SampleError(self.name, reason)  # here, as the frames of the first one hold tensors

    def done(self, mode: str) -> None:
        self.chosen.pop(mode, None)
        for right in self.ready.pop(mode, ()):
            right.ready.done(mode)
        if self.ground.device != "cpu":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.ready.clear()
        self.chosen.clear()

    def _check(self) -> None:
        """Compares every candidate with float64; the right ones are ready to be timed."""
        try:
            task, part = self.ground.task, self.ground.part
            # of a task that is compared whole there is one set of ways: a second would take memory
            smalls = self.engine.candidates(part)
            ways: Iterable[tuple[Ready, Ready]] = ((one, one) for one in smalls)
            if part is not task:
                ways = zip(smalls, self.engine.candidates(task), strict=True)
            for small, large in ways:
                self._compare(small, large)
        except Exception as error:
            modes = [mode for mode in self.ground.row.modes if not self.ready.get(mode)]
            self._settle(modes, self.blank, "failed", reason_of(error))

    def _compare(self, small: Ready, large: Ready) -> None:
        part = small.task.row
        for mode in part.modes:
            if mode in self.known and self.known[mode].status == "failed":
                del self.known[mode]  # of another candidate
            try:
                first, found = timer.once(partial(outputs, small, mode), small.task.device)
                verdict = self.ground.judge.verdict(found, mode)
            except NoBackendError as error:
                self._settle([mode], self.blank, "refused", _refusal(error))
                continue
            except Exception as error:
                if not self.ready.get(mode):
                    self._settle([mode], self.blank, "failed", reason_of(error))
                continue
            result = replace(
                self.blank, mode=mode, status="ok", chosen=large.chosen(mode),
                error=verdict.error, checked=(part.steps, part.batch), first_s=first,
            )  # fmt: skip
            if verdict.right:
                self.ready.setdefault(mode, []).append(_Right(large, result))
            elif not self.ready.get(mode):
                reason = f"{verdict.worst} off by {verdict.error:.1e} of its norm"
                self.known[mode] = replace(result, status="wrong", reason=reason)
            if not verdict.right:
                large.done(mode)

    def _settle(self, modes: Iterable[str], blank: Measurement, status: str, reason: str) -> None:
        for mode in modes:
            self.known[mode] = replace(blank, mode=mode, status=status, reason=reason)


def side_of(engine: Engine, ground: Ground) -> Local | None:
    """The engine on the row in this process; None where rows of its kind are not what it is for.

    Where there is no memory for the row, nobody is asked: each engine has failed.
    """
    with suppress(torch.OutOfMemoryError):
        if not engine.concerns(ground.task):
            return None
    return Local(engine, ground)


def _refusal(error: NoBackendError) -> str:
    return "; ".join(f"{name}: {'; '.join(why)}" for name, why in error.reasons.items())


def _fastest(candidates: list[_Right], mode: str, device: str) -> _Right:
    """The candidate of the least time, each tried twice; one that fails at this size is left out.

    Raises:
        Exception: what the last candidate raised, where all fail.
    """
    if len(candidates) == 1:
        return candidates[0]
    times: dict[int, float] = {}
    failure: Exception | None = None
    for index, right in enumerate(candidates):
        call = partial(right.ready.run, mode)
        try:
            times[index] = min(timer.sample(call, 1, device) for _ in range(2))
        except Exception as error:
            reason_of(error)  # which ends everything where the GPU is lost
            failure = error.with_traceback(None)  # whose frames hold what the others need
    if failure is not None and not times:
        raise failure
    return candidates[min(times, key=lambda index: times[index])]


def reason_of(error: Exception) -> str:
    """What an engine says of its failure, in one line.

    Raises:
        DeviceLostError: the failure is one after which the GPU answers no more.
    """
    interrupt.check()  # a compiler's own processes end by the same Ctrl-C
    if isinstance(error, DeviceLostError):
        raise error
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
