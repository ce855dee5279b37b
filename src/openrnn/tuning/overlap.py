"""Where a call is cut in time so that products of one chunk run beside the loop of another.

A loop of few rows leaves multiprocessors idle, which the products over all its steps can use. While
the loop of one chunk runs, forward multiplies the inputs of the next chunk, and backward the
gradients of the chunk before. The products of forward's first and of backward's last chunk run
alone, so that chunk is mostly the shortest.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

from openrnn.tuning import measured, plan

MOST_CHUNKS = 4
LEAST_IDLE = 0.1  # share of multiprocessors: on fewer a product takes longer than by itself
ROOM = 0.25  # the share that two loops at once, and a grid of a short call, must leave idle
GRID_SLOWDOWN = 0.05  # share of time that products cost backward's grid loop, by sharing L2
FLOP_PER_US = {2: 5e8, 4: 2e8}  # of products over all steps on an H200, by bytes of a value
OF_WEIGHTS = 0.73  # share of that time that products of weights take: they sum over steps and rows


class Costs(NamedTuple):
    """What chunks cost, and what they must bring; all in microseconds.

    Attributes:
        chunk: of each chunk after the first, beyond its steps.
        saving: the least that must be left when that is paid.
        loop: shorter loops, over all steps, are not cut.
    """

    chunk: float
    saving: float
    loop: float


# Measured from CUDA graphs: benchmarks/log/cuda-results.md. The first three on an H200, "Products
# beside the loops of short calls" (of grids also cuda-experiments.md, "Time chunks and overlap");
# the last on an H100, "Backward of both directions in chunks".
OF_CLUSTERS, OF_GRIDS = Costs(12.0, 12.0, 0.0), Costs(40.0, 40.0, 800.0)
OF_GRIDS_WITH_ROOM = Costs(20.0, 20.0, 0.0)  # forward, where `ROOM` is idle
OF_BACKWARD_AT_ONCE = Costs(22.0, 20.0, 0.0)  # of both directions
# floating-point operations of the largest product after a loop up to which dx, dW_ih and dW_hh run
# side by side: benchmarks/log/cuda-experiments.md, "Products after a loop, side by side"
FORK_UP_TO = 2e9


class SideProducts(NamedTuple):
    """Products that may run on a stream of their own while both loops of a layer run.

    Attributes:
        own_us: microseconds of the layer's own. In forward those of a chunk run beside the loops
            before its own, in backward beside the loops after its own.
        above_us: microseconds of those that give the gradients of the weights of the layer above.
            They run beside the loops that backward runs first, and the next loops wait for them.
    """

    own_us: float = 0.0
    above_us: float = 0.0


NO_SIDE_PRODUCTS = SideProducts()


class LoopStep(NamedTuple):
    """One step of a loop.

    Attributes:
        us: its time by the model.
        idle: share of the device's multiprocessors that the loop leaves idle.
        slowdown: share of its time that it takes longer with products beside it.
        costs: of its chunks.
    """

    us: float
    idle: float
    slowdown: float
    costs: Costs


def forks(steps: int, batch: int, gate_rows: int, columns: int) -> bool:
    """Whether each product after a loop leaves room on the device for the others.

    Args:
        columns: of the largest matrix; the others as in `products_time`.
    """
    return steps * batch * 2.0 * gate_rows * columns <= FORK_UP_TO


def products_time(steps: int, batch: int, gate_rows: int, columns: int, itemsize: int) -> float:
    """Microseconds of the products over all steps.

    Args:
        gate_rows: G*H, the rows of every matrix.
        columns: of all matrices that are multiplied.
        itemsize: bytes of a value.
    """
    return steps * batch * 2.0 * gate_rows * columns / FLOP_PER_US[itemsize]


def pays(products: float, costs: Costs = OF_CLUSTERS) -> bool:
    """Whether products of so many microseconds are long enough for a second chunk."""
    return products >= costs.chunk + costs.saving


def loop_step(loop: plan.LoopRequest) -> LoopStep:
    """The step of the kernel that runs.

    No multiprocessor counts as idle on devices of another compute capability than the measured one.
    """
    config = plan.ranked(loop)[0]
    time = plan.microseconds_of(loop.cell, loop.dtype, config, loop.batch, loop.limits)
    blocks = plan.clusters_of(config, loop.batch) * config.cluster
    idle = 0.0
    if loop.capability == measured.CAPABILITY and not config.reads_r:
        idle = max(0.0, 1 - blocks / (loop.processors or measured.PROCESSORS))
    if not config.is_cooperative:
        return LoopStep(time, idle, 0.0, OF_CLUSTERS)
    if loop.kind == "backward":
        return LoopStep(time, idle, GRID_SLOWDOWN, OF_GRIDS)
    return LoopStep(time, idle, 0.0, OF_GRIDS if idle < ROOM else OF_GRIDS_WITH_ROOM)


def best_edges(
    steps: int, products: float, loop: float, idle: float, slowdown: float = 0.0,
    costs: Costs = OF_CLUSTERS, others: float = 0.0,
) -> list[int]:  # fmt: skip
    """Where chunks begin and end, as the forward loop runs them; [] where one is as good.

    Each is as many times as long as the one before as makes its products end with that one's loop.

    Args:
        products: us of those of all steps; loop: of the loop over all steps.
        idle, slowdown, costs: see `LoopStep`.
        others: us of other products beside the longest chunk's loop, which ends no sooner.
    """
    if idle < LEAST_IDLE or loop < costs.loop or not pays(products, costs):
        return []
    ratio = idle * loop / products
    most_gained, best = costs.saving, []
    for number in range(2, MOST_CHUNKS + 1):
        ends = [*accumulate(ratio**index for index in range(number))]
        between = (ceil(steps * end / ends[-1]) for end in ends[:-1])
        edges = [0, *between, steps]
        if any(begin >= end for begin, end in pairwise(edges)):
            continue
        longest = (steps - edges[-2]) / steps * loop
        late = max(0.0, others / idle - longest)
        gained = saved(edges, products, loop, slowdown, costs) - late
        if gained >= most_gained:
            most_gained, best = gained, edges
    return best


def saved(
    edges: Sequence[int], products: float, loop: float, slowdown: float, costs: Costs
) -> float:
    """Microseconds that chunks with these edges save, as the forward loop runs them; [] is one.

    Args:
        products, loop, slowdown, costs: see `best_edges`.
    """
    if not edges:
        return 0.0
    steps = edges[-1]
    alone, beside = edges[1] / steps * products, edges[-2] / steps * loop
    return products - alone - slowdown * beside - (len(edges) - 2) * costs.chunk
