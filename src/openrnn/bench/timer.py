"""Times of calls, in turn: what disturbs one disturbs all."""

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from openrnn.bench import interrupt

Call = Callable[[], object]
Sampler = Callable[[int], float]  # how many calls -> microseconds of one
Busy = Callable[[], float]
T = TypeVar("T")
SAMPLE = 0.002  # seconds of the calls between two looks at the clock
MAX_CALLS = 20  # such calls
# A layer prepares the second call of a kind, and captures the third run with the same memory as a
# CUDA graph.
WARM_UP = 6  # calls before those that count
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


def interleaved(
    samplers: Mapping[str, Sampler], device: str, seconds: float, busy: Busy | None = None
) -> dict[str, Timing]:
    """The times of several calls, sampled in turn, warmed up before.

    On a CPU, measured again where other processes took more than a twentieth of a core.

    Args:
        busy: core-seconds taken so far by processes of ours that sample some of the calls.
    """
    inner = {name: _inner(sampler) for name, sampler in samplers.items()}
    best: dict[str, Timing] = {}
    gc.collect()
    for _ in range(ATTEMPTS):
        before, start = foreign(busy) if device == "cpu" else None, time.perf_counter()
        samples = _samples(samplers, inner, seconds)
        spent = time.perf_counter() - start
        others = None if before is None else max(0.0, ((foreign(busy) or before) - before) / spent)
        if not best or (others or 0.0) < (next(iter(best.values())).others or 0.0):
            best = {name: _timing(values, others) for name, values in samples.items()}
        if others is None or others < DISTURBED:
            break
    return best


def _samples(
    samplers: Mapping[str, Sampler], inner: Mapping[str, int], seconds: float
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in samplers}
    begin = time.perf_counter()
    budget = seconds * len(samplers)
    with quiet():
        while True:
            for name, sampler in samplers.items():
                found[name].append(sampler(inner[name]))
            count, spent = len(next(iter(found.values()))), time.perf_counter() - begin
            if spent >= (budget if count >= FEWEST else 3 * budget) and count >= SLOW:
                return found


def sample(call: Call, count: int, device: str, host: bool = False) -> float:
    """Microseconds of a call, the mean of `count` of them.

    By events on a GPU; there, for the host's part, the time until the calls have returned.
    """
    interrupt.check()
    if device != "cpu":
        torch.cuda.synchronize()
    if device == "cpu" or host:
        start = time.perf_counter()
        for _ in range(count):
            call()
        found = 1e6 * (time.perf_counter() - start) / count
        if device != "cpu":
            torch.cuda.synchronize()
        return found
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(1e3 * first.elapsed_time(last) / count)


def _inner(sampler: Sampler) -> int:
    """Calls of a sample; runs the call WARM_UP times before, or once where that is long."""
    for _ in range(WARM_UP):
        once = sampler(1) / 1e6
        if once >= LONG:
            break
    return max(1, min(MAX_CALLS, round(SAMPLE / max(once, 1e-9))))


def _timing(values: list[float], others: float | None) -> Timing:
    low, half, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(half, low, high, len(values), others)


@contextmanager
def quiet() -> Iterator[None]:
    """Without Python's garbage collector, whose pauses are of what ran before."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def foreign(busy: Busy | None = None) -> float | None:
    """Core-seconds that other processes took of this one's cores since the machine started.

    Its cores are those that any of its threads may use, when it is asked first: `taskset` gives a
    process some, and OpenMP may bind each thread to one of them. None but on Linux.
    """
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    cores = {f"cpu{core}" for core in _own_cores()}
    user_nice_system = (map(int, line[1:4]) for line in lines if line[0] in cores)
    ours = time.process_time() + (busy() if busy else 0.0)
    return sum(map(sum, user_nice_system)) / os.sysconf("SC_CLK_TCK") - ours


@lru_cache(maxsize=1)
def _own_cores() -> frozenset[int]:
    found = frozenset[int]()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            found |= os.sched_getaffinity(int(thread.name))
    return found


def once(call: Callable[[], T], device: str) -> tuple[float, T]:
    """Seconds of one call, to the end of what it started, and what it returned."""
    interrupt.check()
    start = time.perf_counter()
    found = call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


def peak(call: Call, device: str) -> float | None:
    """MiB that a call adds at its peak: to the GPU's allocated memory, or to the process's own.

    None on a CPU where the system does not tell (it does on Linux).
    """
    if device == "cpu":
        return _resident_peak(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _resident_peak(call: Call) -> float | None:
    """MiB that a call adds to the resident memory of this process at its peak (Linux)."""
    try:
        before = resident()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        return None
    call()
    return max(0, _status("VmHWM") - before) / 2**20 if before else None


def resident() -> int:
    """Bytes of this process in memory, without what was freed; 0 where the system does not tell."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    """Bytes of a field of /proc/self/status; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = (int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return 1024 * next(found, 0)
