"""Where a call is cut in time so that products of one chunk run beside the loop of another.

A loop of few rows leaves multiprocessors idle, and the products over all its steps take up to a
quarter of a call. While the loop of one chunk runs, forward multiplies the inputs of the next
chunk, and backward the gradients of the chunk before. The products of forward's first and of
backward's last chunk run alone, so that chunk is mostly the shortest.
"""

from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

from openrnn.tuning import measured, plan
from openrnn.tuning.limits import Limits

CHUNK_COST = 40.0  # us of each chunk after the first, see `chunks`
MOST_CHUNKS = 4
LEAST_SAVING = 40.0  # us, beyond what the chunks cost
MOST_TAKEN = 0.75  # of all multiprocessors by loops of two directions, beside which products run
LEAST_LOOP = 800.0  # us: shorter calls wait for their host, which more chunks keep longer
GRID_SLOWDOWN = 0.05  # share of time that products cost backward's grid loop, by sharing L2
FLOP_PER_US = {2: 5e8, 4: 2e8}  # of products over all steps on an H200, by bytes of a value


class LoopStep(NamedTuple):
    """One step of a loop.

    Attributes:
        us: its time by the model.
        idle: share of the device's multiprocessors that the loop leaves idle.
        slowdown: share of its time that it takes longer with products beside it.
    """

    us: float
    idle: float
    slowdown: float


def products_time(steps: int, batch: int, gate_rows: int, columns: int, itemsize: int) -> float:
    """Microseconds of the products over all steps.

    Args:
        gate_rows: G*H, the rows of every matrix.
        columns: of all matrices that are multiplied.
        itemsize: bytes of a value.
    """
    return steps * batch * 2.0 * gate_rows * columns / FLOP_PER_US[itemsize]


def pays(products: float) -> bool:
    """Whether products of so many microseconds are long enough for a second chunk."""
    return products >= CHUNK_COST + LEAST_SAVING


def loop_step(loop: plan.LoopRequest) -> LoopStep:
    """The step of the kernel that runs.

    No multiprocessor counts as idle on devices on which nothing was measured.
    """
    config, limits = plan.ranked(*loop)[0], Limits.of(loop.capability, loop.processors)
    time = plan.us_of(loop.cell, loop.dtype, config, loop.batch, limits)
    blocks = plan.clusters_of(config, loop.batch) * config.cluster
    idle = 0.0
    if loop.capability == measured.CAPABILITY:
        idle = max(0.0, 1 - blocks / (loop.processors or measured.PROCESSORS))
    grid = loop.kind == "backward" and config.clusters > 1
    return LoopStep(time, idle, GRID_SLOWDOWN if grid else 0.0)


def best_edges(
    steps: int, products: float, loop: float, idle: float, slowdown: float = 0.0
) -> list[int]:
    """Where chunks begin and end, as the forward loop runs them; [] where one is as good.

    Each is as many times as long as the one before as makes its products end with that one's loop.

    Args:
        products: us of those of all steps; loop: of the loop over all steps.
        idle, slowdown: see `LoopStep`.
    """
    if not idle or loop < LEAST_LOOP or not pays(products):
        return []
    ratio = idle * loop / products
    most, found = LEAST_SAVING, []
    for number in range(2, MOST_CHUNKS + 1):
        ends = [*accumulate(ratio**place for place in range(number))]
        first, others = 1 / ends[-1], ends[-2] / ends[-1]
        saved = (1 - first) * products - slowdown * others * loop - (number - 1) * CHUNK_COST
        inner = (ceil(steps * end / ends[-1]) for end in ends[:-1])
        tried = [0, *inner, steps]
        if saved >= most and all(begin < end for begin, end in pairwise(tried)):
            most, found = saved, tried
    return found
