"""For how many loops at once the kernel of both directions of a layer is chosen."""

from openrnn.tuning import plan
from openrnn.tuning.cluster import blocks_of_multiprocessor
from openrnn.tuning.limits import Limits

LEAST_US = 30  # of a loop: two streams cost the host 10 to 20
LEAST_GAIN = 0.9  # of the time in turn, at most, that both at once must take


def held_twice(loop: plan.LoopRequest) -> bool:
    """Whether a device holds the quickest kernel twice, by values alone.

    A multiprocessor that runs blocks of two grids was not measured, so each has its own.
    """
    config = next(iter(plan.ranked(*loop)), None)
    limits = Limits.of(loop.capability, loop.processors)
    if config is None or not limits.places:
        return False
    twice = 2 * plan.clusters_of(config, loop.batch)
    places = limits.clusters(config.cluster)
    if config.clusters == 1:
        places *= blocks_of_multiprocessor(loop.cell, loop.dtype, config)
    return twice <= places


def loops(
    loop: plan.LoopRequest, steps: int, twice: bool, products: float = 0.0, hidden: bool = False
) -> int:
    """1: for one, as the device holds it twice; 2: for two at once; 0: the directions run in turn.

    Args:
        twice: the device holds the quickest kernel twice.
        products: us of the products of both directions.
        hidden: in turn they would run beside loops.
    """
    if twice:
        limits, config = Limits.of(loop.capability, loop.processors), plan.ranked(*loop)[0]
        us = plan.us_of(loop.cell, loop.dtype, config, loop.batch, limits)
        times: plan.StepTimes | None = plan.StepTimes(us, us)
    else:
        times = plan.step_times(loop, 2)
    if times is None or times.several > LEAST_GAIN * 2 * times.alone:
        return 0
    gained = steps * (2 * times.alone - times.several)
    pays = steps * times.several >= LEAST_US and not (hidden and products >= gained)
    return (1 if twice else 2) if pays else 0
