"""Whether a stack runs as a wavefront, and in how many chunks of time.

A chunk is a task of a layer: its product and its loop. It waits for the chunk before of its own
layer and for the same chunk of the layer below. So n chunks of L layers take at least n + L - 1
tasks one after the other, and at least as long as the device needs for the clusters of all tasks.
The constants were fitted to six stacks in 38 cuts, timed from CUDA graphs on an H200 (error 15%,
with steps by the model of that day): `benchmarks/log/wavefront.json`. Kernels that leave room for
more loops were at most 3% faster.

Where the quickest loop is a grid, which takes the whole device, two layers run at a time, each in
the quickest kernel of which the device holds two. The constants of these were fitted to four stacks
in two cuts each (error 6%): the log, "Half of a device".
"""

from typing import NamedTuple

from openrnn.memo import memo
from openrnn.tuning import measured, plan
from openrnn.tuning.stack_times import CHUNK_COST, Stack

GRID_CHUNK_COST = 25.0  # of grids, instead of CHUNK_COST: they fill flag buffers, too
# factors of the times of products by `overlap`: of clusters for a chunk, as its products run beside
# loops; of grids for a chunk and layer by layer, as theirs run between loops
PRODUCTS_BESIDE, GRID_PRODUCTS = 3.0, 0.7
LEAST_STEPS = 8  # of a chunk that the model cuts
MOST_CHUNKS = 32  # that it tries, unless memory or recompute needs more
LEAST_RECOMPUTED = 4  # chunks, as stacks with recompute that had two held more than torch.nn
MAX_TIME_RATIO = 0.92  # of the time layer by layer, at most, that a wavefront must take
GRIDS = 2  # loops at a time where the quickest one is a grid


class Wavefront(NamedTuple):
    """How a stack runs.

    Attributes:
        chunks: of time.
        loops: for how many at a time their kernel is chosen: 1, or GRIDS.
        us: of all layers by the model; in_turn: the same, layer by layer.
        by_chunk: see `Chunking`.
    """

    chunks: int
    loops: int
    us: float
    in_turn: float
    by_chunk: bool = False


@memo(1024)
def best(
    stack: Stack, steps: int, batch: int, chunk: int | None, multiple: int = 1, least: int = 1
) -> Wavefront | None:
    """The quickest wavefront; None where layer by layer is as quick, and where steps are launches.

    Args:
        chunk: steps that a chunk is to have; None: the model chooses.
        multiple: the number of chunks is a multiple of it; least: and at least this.
    """
    request = stack.loop(batch)
    config = plan.ranked(request)[0]
    if config.stepwise:
        return None
    loops = GRIDS if config.is_cooperative else 1
    times = plan.step_times(request, loops)
    if times is None:
        return None
    share = _share(request, config)
    product, after = stack.products_us(steps, batch)
    product += stack.copy_us(steps, batch)
    loop = steps * times.several
    alone = GRID_PRODUCTS * product if loops > 1 else product
    in_turn = stack.in_turn_us(steps * times.alone, alone + after)

    def in_chunks(count: int) -> Wavefront:
        if loops > 1:  # a diagonal of the schedule begins when all of the one before has ended
            task = (loop + GRID_PRODUCTS * product) / count + GRID_CHUNK_COST
            us = _turns(stack.layers, count, loops) * task
        else:
            task = (loop + PRODUCTS_BESIDE * product) / count + CHUNK_COST
            path_us = (count + stack.layers - 1) * task  # tasks that wait for each other
            device_us = stack.layers * (share * (loop + count * CHUNK_COST) + product)
            us = max(path_us, device_us)
        return Wavefront(count, loops, us + stack.layers * after, in_turn, stack.by_chunk)

    if chunk is not None:
        return in_chunks(max(-(-steps // (chunk * multiple)) * multiple, least))
    known = measured.knows(stack.capability, stack.processors)
    first = max(2, least) if multiple == 1 else multiple
    if not known or first > steps // LEAST_STEPS:
        return None
    most = min(max(first, MOST_CHUNKS), steps // LEAST_STEPS)
    counts = range(first, most + 1, multiple)
    quickest = min(map(in_chunks, counts), key=lambda wavefront: wavefront.us)
    return quickest if quickest.us <= MAX_TIME_RATIO * in_turn else None


@memo(1024)
def best_with_recompute(
    backward: Stack, forward: Stack, steps: int, batch: int, chunks: int, asked: bool
) -> Wavefront | None:
    """The wavefront of backward in which each chunk runs forward again.

    None where layer by layer is as quick, and where a loop takes the whole device.

    Args:
        backward, forward: the stack.
        chunks: of time, between which forward kept the states.
        asked: the caller asks for it: the times decide nothing.
    """
    tasks_us = device_us = in_turn = 0.0  # of all chunks of a layer
    for stack in (forward, backward):
        request = stack.loop(batch)
        config = plan.ranked(request)[0]
        times = plan.step_times(request, 1)
        if config.stepwise or config.is_cooperative or times is None:
            return None
        loop = steps * times.alone + chunks * CHUNK_COST
        product = stack.products_us(steps, batch)[0] + stack.copy_us(steps, batch)
        tasks_us += loop + PRODUCTS_BESIDE * product
        device_us += _share(request, config) * loop + product
        in_turn += loop + product
    path_us = (chunks + backward.layers - 1) * tasks_us / chunks  # tasks that wait for each other
    us, in_turn = max(path_us, backward.layers * device_us), backward.layers * in_turn
    if not asked:
        known = measured.knows(backward.capability, backward.processors)
        if not known or chunks < LEAST_RECOMPUTED or us > MAX_TIME_RATIO * in_turn:
            return None
    return Wavefront(chunks, 1, us, in_turn, backward.by_chunk)


def _share(request: plan.LoopRequest, config: plan.Config) -> float:
    """The part of the device that a loop takes; all of it where it is not known how many fit."""
    resident = request.limits.clusters(config.cluster)
    return plan.clusters_of(config, request.batch) / resident if resident else 1.0


def _turns(layers: int, chunks: int, loops: int) -> int:
    """How many tasks follow each other where so many run at a time, diagonal by diagonal."""
    return sum(
        -(-min(diagonal + 1, layers, chunks, layers + chunks - 1 - diagonal) // loops)
        for diagonal in range(layers + chunks - 1)
    )
