"""How many units of a layer kernels compute: H, padded to a size that quicker kernels take.

All kernels take multiples of 8. Loops with multicast, the quickest for large batches, take
multiples of 128 in backward, and more of such sizes are in the measured table. On an H200 a call of
an LSTM of 1,000 units at B 128 takes 0.6 of the time with 1,024 units
(benchmarks/log/cuda-experiments.md, "Units that are padded").
"""

from typing import NamedTuple

from openrnn.codegen.tiles import whole_tiles
from openrnn.memo import memo
from openrnn.spec import Spec
from openrnn.tuning import multicast

WIDE = 128  # units are padded to a multiple of this
# The largest H of stacks that one launch runs, which knows no padding.
LARGEST_STACK = multicast.STACK_HIDDEN[-1]
LEAST_STACK_BATCH, LEAST_STACK_HIDDEN = 64, 896  # see `units_of`
# Gates of cells that are padded: loops with multicast have at most eight, and what cells of one or
# two gates gain was not measured.
GATES = range(3, 9)
# Padding costs a call copies of weights' gradients, and R is loaded value by value, which few steps
# do not gain: an estimate, only T 64 was timed. Kernels of single steps read no padding.
LEAST_STEPS = 12


class Padding(NamedTuple):
    """Units are padded where they become at most (1 + share) H, H from `least`, B from `batch`."""

    share: float
    least: int
    batch: int


# by bytes of a value
PADDINGS: dict[int, tuple[Padding, ...]] = {
    2: (Padding(0.035, 500, 9), Padding(0.07, 576, 65), Padding(0.14, 768, 48)),
    4: (Padding(0.035, 500, 9), Padding(0.07, 576, 65)),
}
# In float32 backward of an H above this has no kernel that holds R, and padding saves nothing there
LARGEST_FLOAT32, LEAST_LARGE_BATCH = 1536, 48


def is_short(steps: int | None) -> bool:
    """Whether calls of so many steps gain nothing by padding; None and symbols stand for many."""
    return isinstance(steps, int) and steps < LEAST_STEPS


@memo(4096)
def units_of(spec: Spec, itemsize: int, short: bool, batch: int | None, known: bool) -> int:
    """The units of each layer, at least H.

    Args:
        itemsize: bytes of a value.
        short: see `is_short`.
        batch: B; None: the most units that any B has.
        known: the device is one of those on which this was measured, see `measured.knows`.
    """
    hidden = spec.hidden_size
    units, wide = whole_tiles(hidden), -(-hidden // WIDE) * WIDE
    if not known or short or len(spec.gates) not in GATES:
        return units
    stacked = spec.num_layers > 1 and not spec.bidirectional
    if stacked and (spec.wavefront or hidden <= LARGEST_STACK):
        return units
    least = LEAST_LARGE_BATCH if itemsize == 4 and hidden > LARGEST_FLOAT32 else 0
    if stacked and units == hidden:
        # layers that may run as a wavefront, which knows no padding: by its model it is slower than
        # padded layers in turn there
        if itemsize == 4 or hidden < LEAST_STACK_HIDDEN:
            return units
        least = LEAST_STACK_BATCH
    pads = any(
        one.least <= hidden and wide <= (1 + one.share) * hidden
        and (batch is None or batch >= max(one.batch, least))
        for one in PADDINGS.get(itemsize, ())
    )  # fmt: skip
    return wide if pads else units
