"""Where products of one chunk of a call pay beside the loop of another.

A loop of few rows leaves multiprocessors idle, and the products over all its steps, which need its
results or give its inputs, take up to a quarter of a call. So a call may run in a few chunks: while
the loop of one runs, forward multiplies the inputs of the next, backward the gradients of the one
before. The shortest is mostly forward's first and backward's last, whose products nothing hides.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil

import torch

from openrnn.backends.fused import kernels, measured, plan
from openrnn.backends.fused.layer import LayerKernels
from openrnn.backends.fused.limits import Limits
from openrnn.native.side_stream import supported

COST = 40.0  # us of each chunk after the first, see `chunks`
MOST = 4  # chunks
LEAST = 40.0  # us that they must save beyond that
LONG = 800.0  # us of loops: shorter calls wait for their host, which more chunks keep longer
SLOWER = 0.05  # of the time of backward's loop in a grid, which shares L2 with what is beside it
RATE = {2: 5e8, 4: 2e8}  # flop a us of products over all steps on an H200, by bytes of a value


def edges(
    layer: LayerKernels, kind: str, flags: kernels.Flags, steps: int, batch: int, columns: int
) -> list[int]:
    """Where chunks begin and end, as the forward loop runs them; [] where one is as good.

    Args:
        kind, flags: of the loop.
        columns: of all matrices, of G*H rows each, that are multiplied with all steps.
    """
    products = steps * batch * 2.0 * layer.gates * layer.hidden * columns
    products /= RATE[layer.dtype.itemsize]
    if products < COST + LEAST:
        return []
    loop, idle, slower = _loop(layer, kind, flags, (batch + 7) // 8)
    return best_edges(steps, products, steps * loop, idle, slower)


@lru_cache(maxsize=4096)
def _loop(
    layer: LayerKernels, kind: str, flags: kernels.Flags, tiles: int
) -> tuple[float, float, float]:
    """Microseconds of a step by the model, and two shares of `best_edges`: idle, slower.

    No multiprocessor counts as idle on devices where nothing was measured, and with drivers that
    cannot say that all blocks of a launch have begun.
    """
    about = torch.cuda.get_device_properties(layer.device)
    where, most = (about.major, about.minor), about.multi_processor_count
    asked = layer.cell, layer.name, layer.hidden, 8 * tiles, where, most
    config, limits = kernels.ranked(kind, flags, *asked)[0], Limits.of(where, most)
    time = plan.us_of(layer.cell, layer.name, config, 8 * tiles, limits)
    blocks = -(-8 * tiles // config.rows) * config.clusters * config.cluster
    known = where == measured.CAPABILITY and supported()
    slower = SLOWER if kind == "backward" and config.clusters > 1 else 0.0
    return time, max(0.0, 1 - blocks / most) if known else 0.0, slower


def best_edges(
    steps: int, products: float, loop: float, idle: float, slower: float = 0.0
) -> list[int]:
    """Where chunks begin and end, as the forward loop runs them; [] where one is as good.

    Each is as many times as long as the one before as makes its products end with that one's loop.

    Args:
        products: us of those of all steps; loop: of the loop over all steps.
        idle: the share of multiprocessors that the loop leaves.
        slower: the share of its time that a loop takes longer with products beside it.
    """
    if not idle or loop < LONG or products < COST + LEAST:
        return []
    ratio = idle * loop / products
    most, found = LEAST, []
    for number in range(2, MOST + 1):
        ends = [*accumulate(ratio**place for place in range(number))]
        first, others = 1 / ends[-1], ends[-2] / ends[-1]
        saved = (1 - first) * products - slower * others * loop - (number - 1) * COST
        inner = (ceil(steps * end / ends[-1]) for end in ends[:-1])
        tried = [0, *inner, steps]
        if saved >= most and all(begin < end for begin, end in pairwise(tried)):
            most, found = saved, tried
    return found
