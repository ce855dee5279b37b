"""One row: every engine checked, then timed in turn with the others."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from openrnn.bench import gpu, timer
from openrnn.bench.cases import BenchRow
from openrnn.bench.engines.base import Engine
from openrnn.bench.record import Measurement
from openrnn.bench.remote import Remote
from openrnn.bench.sides import Ground, SampleError, Side, side_of
from openrnn.bench.task import PRECISIONS, products


def measure(
    row: BenchRow, precision: str, device: str, engines: Sequence[Engine], seconds: float
) -> list[Measurement]:
    """The results of a row, in order of modes and engines.

    Raises:
        DeviceLostError: an engine left the GPU in a state in which nothing runs any more.
    """
    with products(PRECISIONS[precision].products):
        ground = Ground(row, precision, device)
        sides: list[Side] = []
        try:
            for engine in engines:
                side = _side(engine, ground)
                if side is not None:
                    sides.append(side)
            for mode in row.modes:
                _time(sides, mode, device, seconds)
                for side in sides:
                    side.done(mode)
        finally:
            for side in sides:
                side.close()
    clock = None if device == "cpu" else gpu.clock()
    found = [
        replace(side.known[mode], sm_mhz=clock if side.known[mode].us else None)
        for mode in row.modes
        for side in sides
    ]
    sides.clear()
    if device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _side(engine: Engine, ground: Ground) -> Side | None:
    """The engine on the row; None where rows of its kind are not what it is for."""
    if isinstance(engine, Remote):
        return engine.side(ground)
    return side_of(engine, ground)


def _time(sides: Sequence[Side], mode: str, device: str, seconds: float) -> None:
    """Times what is right in a mode and completes the results."""
    ready = {side.name: side for side in sides if side.prepare(mode)}

    def busy() -> float:
        return sum(side.busy() for side in sides)

    while ready:
        samplers = {name: partial(side.sample, mode) for name, side in ready.items()}
        try:
            timings = timer.interleaved(samplers, device, seconds, busy)
        except SampleError as error:  # for want of memory beside the others, mostly
            failed = ready.pop(error.name)
            failed.fail(mode, error.reason)
            failed.done(mode)
            continue
        for name, timing in timings.items():
            known = ready[name].known
            known[mode] = replace(
                known[mode], us=timing.us, low=timing.low, high=timing.high,
                repeats=timing.repeats, others=timing.others,
            )  # fmt: skip
        return
