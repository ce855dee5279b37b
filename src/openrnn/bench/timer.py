"""Times of calls, in turn: what disturbs one disturbs all."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from openrnn.bench import interrupt
from openrnn.bench.machine import ask_gpu

Call = Callable[[], object]
T = TypeVar("T")
SAMPLE = 0.002  # seconds of the calls between two looks at the clock
MOST = 20  # such calls
LONG = 0.1  # seconds of a call that warms up by itself
FEWEST, SLOW = 5, 3  # samples of each engine; of one that takes longer than its share
DISTURBED, ATTEMPTS = 0.05, 3  # share of a core that other processes took, and tries


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of a call in microseconds."""

    us: float
    low: float
    high: float
    repeats: int
    others: float | None = None


def interleaved(calls: Mapping[str, Call], device: str, seconds: float) -> dict[str, Timing]:
    """The times of several calls, sampled in turn, warmed up before.

    On a CPU, measured again where other processes took more than a twentieth of a core.
    """
    inner = {name: _inner(call, device) for name, call in calls.items()}
    best: dict[str, Timing] = {}
    gc.collect()
    for _ in range(ATTEMPTS):
        before, start = foreign() if device == "cpu" else None, time.perf_counter()
        samples = _samples(calls, inner, device, seconds)
        others = None if before is None else _share(before, start)
        if not best or (others or 0.0) < (next(iter(best.values())).others or 0.0):
            best = {name: _timing(values, others) for name, values in samples.items()}
        if others is None or others < DISTURBED:
            break
    return best


def _share(before: float, start: float) -> float:
    return max(0.0, ((foreign() or before) - before) / (time.perf_counter() - start))


def _samples(
    calls: Mapping[str, Call], inner: Mapping[str, int], device: str, seconds: float
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    budget = seconds * len(calls)
    with _quiet():
        while True:
            for name, call in calls.items():
                found[name].append(sample(call, inner[name], device))
            count, spent = len(next(iter(found.values()))), time.perf_counter() - begin
            if spent >= (budget if count >= FEWEST else 3 * budget) and count >= SLOW:
                return found


def sample(call: Call, count: int, device: str) -> float:
    """Microseconds of a call: the mean of `count` of them, by events on a GPU."""
    interrupt.check()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return 1e6 * (time.perf_counter() - start) / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(1e3 * first.elapsed_time(last) / count)


def _inner(call: Call, device: str) -> int:
    """Calls of a sample; runs the call twice, or once where that is long, which warms it up."""
    once = sample(call, 1, device) / 1e6
    if once < LONG:
        once = sample(call, 1, device) / 1e6
    return max(1, min(MOST, round(SAMPLE / max(once, 1e-9))))


def _timing(values: list[float], others: float | None) -> Timing:
    low, half, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(half, low, high, len(values), others)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Python's garbage collector, whose pauses are of what ran before."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def foreign() -> float | None:
    """Core-seconds that other processes took since the machine started; None but on Linux."""
    try:
        user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:5])
    except OSError:
        return None
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - time.process_time()


def once(call: Callable[[], T], device: str) -> tuple[float, T]:
    """Seconds of one call, to the end of what it started, and what it returned."""
    interrupt.check()
    start = time.perf_counter()
    found = call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


def peak(call: Call, device: str) -> float | None:
    """MiB that a call adds to the GPU's allocated memory at its peak; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def clock() -> int | None:
    """The GPU's clock in MHz, from nvidia-smi; None without one."""
    found = ask_gpu("clocks.sm")
    try:
        return int(found[0].split()[0])
    except (ValueError, IndexError):
        return None
