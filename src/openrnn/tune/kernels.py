"""Kernels alone, timed one by one: the first of each ranking, and variants of the best.

Forward without saved activations is `inference`. Lengths are spread evenly up to T; resets are 3%
of all steps. Results are not checked here: tests/test_fused_gpu.py does that.

A grid's delay is that of its first step; each warp adapts its own from there. Delays are compared
by the mean of many launches, first in coarse steps, then in fine ones after the best.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from operator import itemgetter

import torch
from rich.console import Console

from openrnn.bench.record import KernelTime, Writer
from openrnn.codegen.config import KernelConfig
from openrnn.cores import usable_cores
from openrnn.errors import OpenRNNError
from openrnn.tune.candidates import (
    KINDS,
    Candidate,
    Size,
    candidates,
    compiled,
    unspilled,
    variants,
)
from openrnn.tune.launches import time_of
from openrnn.tune.table import config_of
from openrnn.tuning import measured

DELAYS = (0, 50, 100, 150, 200, 300, 400, 500, 600, 800, 1000, 1200, 1400, 1700, 2000)  # cycles
Found = dict[Size, list[tuple[float, KernelConfig]]]


@dataclass(frozen=True)
class TuneRequest:
    """The sizes to measure.

    Args:
        most: kernels of a size, among grids and among others.
        delays: measure only the delays of those first in a ranking that are grids.
        loops: that run at the same time.
    """

    cells: Sequence[str] = ("lstm", "gru")
    dtypes: Sequence[str] = ("bfloat16",)
    kinds: Sequence[str] = KINDS
    masks: Sequence[str] = (measured.PLAIN,)
    hidden: Sequence[int] = (64, 128, 256, 512, 1024)
    batches: Sequence[int] = (1, 16, 64, 256)
    most: int = 8
    delays: bool = False
    loops: int = 1

    def sizes(self) -> Iterator[Size]:
        """Every combination."""
        every = product(self.cells, self.dtypes, self.hidden, self.batches, self.kinds, self.masks)
        return (Size(*one, self.loops) for one in every)


def measure(request: TuneRequest, writer: Writer, screen: Console) -> list[KernelTime]:
    """Compiles in parallel, then times one by one; times of a size come in the order of measuring.

    Raises:
        OpenRNNError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise OpenRNNError("kernels are timed on a CUDA device, and torch finds none")
    capability = torch.cuda.get_device_capability()
    first = [
        one
        for size in request.sizes()
        for one in candidates(size, capability, request.most)[: 1 if request.delays else None]
        if not request.delays or one.config.is_cooperative
    ]
    found: Found = {}
    times: list[KernelTime] = []
    with ProcessPoolExecutor(usable_cores(), get_context("spawn")) as pool:
        ready = _compile(first, pool)
        times += _time(ready, DELAYS, found, writer, screen)
        more = [] if request.delays else _second(found, capability)
        kernels = list(dict.fromkeys(one.kernel for one in more))
        fits = dict(zip(kernels, pool.map(unspilled, kernels, chunksize=4)))
        times += _time([one for one in more if fits[one.kernel]], (), found, writer, screen)
    return times


def _compile(every: Sequence[Candidate], pool: Executor) -> list[Candidate]:
    """The candidates as they compile without a spill."""
    kernels = list(dict.fromkeys(one.kernel for one in every))
    made = dict(zip(kernels, pool.map(compiled, kernels, chunksize=2)))
    ready = ((one, made[one.kernel]) for one in every)
    return [one._replace(config=config) for one, config in ready if config is not None]


def _second(found: Found, capability: tuple[int, int]) -> list[Candidate]:
    """Variants of the two fastest of each size that were not timed yet."""
    return [
        one
        for size, tried in found.items()
        for _, config in sorted(tried, key=itemgetter(0))[:2]
        for one in variants(Candidate(size, capability, config))
        if one.config not in [config for _, config in tried]
    ]


def _time(
    every: Sequence[Candidate], delays: Sequence[int], found: Found, writer: Writer, screen: Console
) -> Iterator[KernelTime]:
    for one in every:
        try:
            timed = time_of(one, delays)
        except OpenRNNError as error:  # of one kernel; the others' times count all the same
            screen.print(str(error), markup=False)
            continue
        if timed is None:
            continue
        us, config = timed
        found.setdefault(one.size, []).append(timed)
        size = one.size
        made = KernelTime(
            size.cell, size.dtype, size.hidden, size.batch, size.kind, round(us, 3),
            config_of(config), size.mask, config.operand_bytes(size.dtype), loops=size.loops,
        )  # fmt: skip
        writer.add([made])
        yield made
