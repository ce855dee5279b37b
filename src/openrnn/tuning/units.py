"""How many units of a layer kernels compute: H, padded to a size that quicker kernels take.

All kernels take multiples of 8. Loops with multicast, the quickest for large batches, take
multiples of 128 in backward, and more of such sizes are in the measured table. On an H200 a call of
an LSTM of 1,000 units at B 128 takes 0.6 of the time with 1,024 units
(benchmarks/log/cuda-experiments.md, "Units that are padded").
"""

import sys
from typing import NamedTuple

from openrnn.codegen.tiles import whole_tiles
from openrnn.memo import memo
from openrnn.spec import Spec

WIDE = 128  # units are padded to a multiple of this
# Gates of cells that are padded: loops with multicast have at most eight, and what cells of one or
# two gates gain was not measured.
GATES = range(3, 9)
# Padding costs a call copies of weights and of their gradients, which few steps do not gain: an
# estimate. Kernels of single steps read no padding.
LEAST_STEPS = 12


class Padding(NamedTuple):
    """For some H and from some B on units are padded where they become at most (1 + share) H."""

    hidden: range
    batch: int
    share: float


def _from(hidden: int) -> range:
    return range(hidden, sys.maxsize)


_BY_14_PERCENT = Padding(_from(768), 48, 0.14)
# In float32 backward of an H above 1,536 has no kernel that holds R, and small batches gain nothing
# by padding.
_FLOAT32 = Padding(range(500, 1537), 9, 0.035), Padding(_from(1537), 48, 0.035)
# by bytes of a value
PADDINGS: dict[int, tuple[Padding, ...]] = {
    2: (Padding(_from(500), 9, 0.035), Padding(_from(576), 65, 0.07), _BY_14_PERCENT),
    4: (*_FLOAT32, Padding(_from(576), 65, 0.07)),
}
# The same of stacks of one direction. Below B 48 wavefronts of fewer units take less time by the
# models where H is between 512 and 896; 2 x 600 was quicker layer by layer without padding.
_STACK_BY_7_PERCENT = Padding(_from(641), 65, 0.07)
STACK_PADDINGS: dict[int, tuple[Padding, ...]] = {
    2: (
        Padding(range(500, 513), 9, 0.035),
        Padding(range(513, 896), 48, 0.035),
        Padding(_from(896), 9, 0.035),
        _STACK_BY_7_PERCENT,
        _BY_14_PERCENT,
    ),
    4: (*_FLOAT32, _STACK_BY_7_PERCENT),
}


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
    paddings = STACK_PADDINGS if stacked else PADDINGS
    pads = any(
        hidden in one.hidden and wide <= (1 + one.share) * hidden
        and (batch is None or batch >= one.batch)
        for one in paddings.get(itemsize, ())
    )  # fmt: skip
    return wide if pads else units
