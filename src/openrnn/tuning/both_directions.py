"""For how many loops at once the kernel of both directions of a layer is chosen."""

from openrnn.codegen.config import KernelConfig
from openrnn.spec import Problem
from openrnn.tuning import measured, overlap, plan
from openrnn.tuning.cluster import blocks_of_multiprocessor

LEAST_US = 30  # of a loop: two streams cost the host 10 to 20
MAX_TIME_RATIO = 0.9  # of the time in turn, at most, that both at once must take
# factor on a step's time if blocks of both loops share multiprocessors: measured 1.0 to 1.5, for
# LSTMs of H 256 and 512 at B 32 and 64 on an H200
SHARED = 1.25
IN_TURN = 0  # for `loops_to_fit`: no two loops at once


def fits_twice(loop: plan.LoopRequest) -> bool:
    """Whether a device holds the quickest kernel twice, by values alone.

    A multiprocessor that runs blocks of two grids was not measured, so each has its own.
    """
    config = _first(loop)
    if config is None or config.reads_r:
        return False
    limits, blocks = loop.limits, 1
    if not config.is_cooperative:
        blocks = blocks_of_multiprocessor(loop.cell, loop.dtype, config, limits)
    return plan.holds(blocks * limits.clusters(config.cluster), config, loop.batch, 2)


def _first(loop: plan.LoopRequest, loops: int = 1) -> KernelConfig | None:
    """The first kernel for so many loops at once, if there is one."""
    return next(iter(plan.ranked(loop, loops)), None)


def idle(loop: plan.LoopRequest, loops: int) -> float:
    """The share of multiprocessors that both loops leave idle; 0 for less than `overlap.ROOM`.

    0, too, on devices of another compute capability than the measured one.

    Args:
        loops: for how many loops at once their kernel is chosen.
    """
    config = _first(loop, loops)
    if config is None or loop.capability != measured.CAPABILITY:
        return 0.0
    blocks = 2 * plan.clusters_of(config, loop.batch) * config.cluster
    left = 1 - blocks / (loop.processors or measured.PROCESSORS)
    return left if left >= overlap.ROOM else 0.0


def side_products(
    problem: Problem, layer: int, input_columns: int, columns_above: int
) -> overlap.SideProducts:
    """The products of both directions that may run beside both loops of a layer.

    Its own count as 0 where they are too short to pay for a second chunk, where reset states are
    given, with which no loop is cut, and where the layer has no input matrix.

    Args:
        problem: with T and B, and whether reset states are given.
        layer: its number.
        input_columns: of its input matrix, which forward multiplies by x and backward by gate
            gradients for dx; 0 where dx is not wanted.
        columns_above: of the weights of the layer above, whose gradients are wanted.
    """
    spec = problem.spec
    rows, itemsize = len(spec.gates) * spec.hidden_size, problem.dtype.itemsize

    def time(columns: int) -> float:
        return overlap.products_time(
            problem.steps or 0, problem.batch or 1, rows, columns, itemsize
        )

    has_matrix = layer > 0 or spec.input_mode == "linear"
    own = 2 * time(input_columns) if has_matrix and not problem.reset_state else 0.0
    of_weights = 2 * overlap.OF_WEIGHTS * time(columns_above)
    return overlap.SideProducts(own if overlap.pays(own) else 0.0, of_weights)


def edges(
    loop: plan.LoopRequest, steps: int, beside: overlap.SideProducts, loops: int
) -> list[int]:  # fmt: skip
    """Where chunks of the forward direction begin and end whose products run beside both loops.

    Args:
        beside: of both directions and all steps.
        loops: for how many loops at once their kernel is chosen.

    Returns:
        [] where one chunk is as good, and where nothing was measured.
    """
    loop = loop.without_masks
    times = plan.step_times(loop, loops) if loop.capability == measured.CAPABILITY else None
    if times is None:
        return []
    us = times.several if loops > 1 else times.alone
    costs = _costs(loop, loops)
    if costs is None:
        return []
    left = idle(loop, loops)
    return overlap.best_edges(
        steps, beside.own_us, steps * us, left, costs=costs, others=beside.above_us
    )  # fmt: skip


def _costs(loop: plan.LoopRequest, loops: int) -> overlap.Costs | None:
    """Those of chunks of loops that leave room; None where there is no kernel, or none measured."""
    config = _first(loop, loops)
    if config is None:
        return None
    cooperative = config.is_cooperative
    if loop.kind == "backward":  # with flags to fill before each chunk: not measured
        return None if cooperative else overlap.OF_BACKWARD_AT_ONCE
    return overlap.OF_GRIDS_WITH_ROOM if cooperative else overlap.OF_CLUSTERS


def _saved(
    loop: plan.LoopRequest, steps: int, us: float, beside: overlap.SideProducts, loops: int
) -> float:  # fmt: skip
    """Microseconds that products beside the loops save; `us`: of a step of both loops."""
    above = min(beside.above_us, idle(loop, loops) * steps * us)
    costs = _costs(loop, loops)
    if costs is None or not beside.own_us:
        return above
    chunk_edges = edges(loop, steps, beside, loops)
    return above + overlap.saved(chunk_edges, beside.own_us, 0.0, 0.0, costs)


def loops_to_fit(
    loop: plan.LoopRequest, steps: int, twice: bool, lost: float = 0.0,
    beside: overlap.SideProducts = overlap.NO_SIDE_PRODUCTS,
) -> int:  # fmt: skip
    """How many loops the kernel of both directions is chosen for, if they run at the same time.

    IN_TURN: They run one after the other.
    1: They run at the same time, in the kernel that is quickest alone: two of it fit.
    2: They run at the same time, in the quickest kernel of which the device holds two.

    The quickest kernel twice is not the quickest pair where blocks of both share multiprocessors,
    or leave none idle for products.

    Args:
        twice: the device holds the quickest kernel twice.
        lost: us that products beside loops save in turn; in backward beyond those at once.
        beside: see `edges`.
    """
    loop = loop.without_masks
    first = plan.ranked(loop)[0]
    shared = not twice or not plan.fits_concurrently(first, loop.batch, 2, loop.limits)
    slower = plan.step_times(loop, 2) if shared else None
    times, loops = slower, 2
    saved = 0.0 if slower is None else _saved(loop, steps, slower.several, beside, 2)
    if twice and (quickest := slower or plan.step_times(loop, 1)) is not None:
        alone = quickest.alone
        several = SHARED * alone if shared else alone
        own = _saved(loop, steps, several, beside, 1)
        if slower is None or steps * several - own <= steps * slower.several - saved:
            times, loops, saved = plan.StepTimes(alone, several), 1, own
    if times is None or times.several > MAX_TIME_RATIO * 2 * times.alone:
        return IN_TURN
    gained = steps * (2 * times.alone - times.several) + saved
    pays = steps * times.several >= LEAST_US and lost < gained
    return loops if pays else IN_TURN
