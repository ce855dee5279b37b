"""Whether one launch runs the loops of all layers of a stack, each layer behind the one before.

The kernels are those of `tuning/cluster_stack.py` and, for large batches, of `tuning/multicast.py`.
"""

from math import inf
from typing import NamedTuple

from openrnn.codegen.config import SIZES, KernelConfig
from openrnn.codegen.multicast_config import MulticastConfig
from openrnn.memo import memo
from openrnn.tuning import measured, plan
from openrnn.tuning.limits import Limits
from openrnn.tuning.stack_times import Stack
from openrnn.tuning.wavefront import best as best_wavefront

# us to launch and to load R; of backward with multicast; and a factor on all of a launch with
# multicast, as five of them took 0.85 to 1.00 of the modelled time on an H200
LAUNCH, MULTICAST_BACKWARD_LAUNCH, MULTICAST_FACTOR = 8.0, 25.0, 0.95
# bytes a us at which backward's flag buffers are filled: gate gradients of all layers but the first
FILLED_PER_US = 0.6e6
TRANSPOSE_US = 1.5  # us: a matrix that backward reads transposed
# products of weights of several layers in one call take this part of their time one by one
BATCHED_PRODUCTS = 0.7
# Bytes of a value of layers that are multiplied together. In float32 backward of three layers and
# more lost with that; stacks of two, which are too few for it, did not.
MOST_BYTES = 2
# In backward a wavefront's time is multiplied by one of these before it is compared with that of
# one launch: by the first below H 512, by the second from H 512 on for three layers or more; for
# two it is left as it is. On an H200 14 stacks below took 1.03 to 1.40 of the modelled time, six of
# H 512 and three layers or four 0.98 to 1.11, 1.04 in the mean, five of two 0.85 to 1.01
# (benchmarks/log/stack-polls.jsonl, part whole).
FACTOR_BELOW_512, FACTOR_FROM_512 = 1.1, 1.05


class StackPlan(NamedTuple):
    """How a stack runs in one launch.

    Attributes:
        config: of the kernel that is tried first, or of the one that was loaded.
        us: of all layers by the model.
        otherwise: that of the other way, a wavefront or layer by layer, by its model; in backward
            a wavefront's times its factor, if it has one. The launch is taken where `us` is at
            most this.
    """

    config: KernelConfig
    us: float
    otherwise: float


def multiplies_together(layers: int, value_bytes: int, no_copies: bool) -> bool:
    """Whether backward multiplies weights of several layers in one call.

    These are all W_ih but the first, and all R but the last.

    Args:
        value_bytes: of a value of the layers.
        no_copies: no row of y has to be copied first: none is padded, and no reset hides one.
    """
    return layers > 2 and value_bytes <= MOST_BYTES and no_copies


def _launch_us(stack: Stack, steps: int, batch: int, config: KernelConfig) -> float:
    """The time of all layers in one launch by the model, in microseconds."""
    limits = Limits.of(stack.capability, stack.processors)
    product, after = stack.products_us(steps, batch)
    step = plan.microseconds_of(stack.cell, stack.dtype, config, batch, limits)
    us = (steps + stack.layers - 1) * step + product + LAUNCH
    by_multicast = isinstance(config, MulticastConfig)
    if stack.kind == "backward":
        if by_multicast:
            us += MULTICAST_BACKWARD_LAUNCH - LAUNCH
        else:
            row = len(stack.cell.gates) * stack.units * SIZES[stack.dtype]
            us += (stack.layers - 1) * steps * batch * row / FILLED_PER_US
        no_copies = stack.units == stack.hidden and "reset" not in stack.option_names
        together = multiplies_together(stack.layers, SIZES[stack.dtype], no_copies)
        part = BATCHED_PRODUCTS if together else 1.0
        us += (1 + part * (stack.layers - 1)) * after
        us += (stack.layers - 1) * TRANSPOSE_US  # beside those of R, which any way has
    return us * (MULTICAST_FACTOR if by_multicast else 1.0)


def _other_us(stack: Stack, steps: int, batch: int, in_chunks: bool) -> float:
    """See `StackPlan.otherwise`."""
    other = best_wavefront(stack, steps, batch, None) if in_chunks else None
    if other is not None:
        factor = 1.0
        if stack.kind == "backward" and (stack.units < 512 or stack.layers > 2):
            factor = FACTOR_BELOW_512 if stack.units < 512 else FACTOR_FROM_512
        return other.us * factor
    product, after = stack.products_us(steps, batch)
    product += stack.copy_us(steps, batch)
    times = plan.step_times(stack.loop(batch), 1)
    alone = inf if times is None else times.alone  # no kernel holds R
    return stack.in_turn_us(steps * alone, product + after)


@memo(1024)
def best(
    stack: Stack, steps: int, batch: int, wavefront: int | None, in_chunks: bool = True,
    loaded: KernelConfig | None = None,
) -> StackPlan | None:  # fmt: skip
    """The quickest such launch; None where there is none, or by the models another way is quicker.

    Args:
        wavefront: see `Spec.wavefront`; 1: the launch is asked for, and the times do not matter.
        in_chunks: the stack may run as a wavefront instead.
        loaded: the kernel that runs. It is another than the first of the ranking where that spills
            registers. None: not known yet, so the first is assumed.
    """
    configs = plan.ranked(stack.loop(batch), layers=stack.layers)
    if wavefront not in (None, 1) or not configs:
        return None
    if wavefront is None and not plan.knows_stack(configs[0], stack.dtype, batch):
        return None
    config: KernelConfig = configs[0]
    # one that only has R elsewhere was counted like the first when the factors above were fitted
    if loaded is not None and measured.shape_of(loaded) != measured.shape_of(config):
        config = loaded
    launch = StackPlan(
        config,
        _launch_us(stack, steps, batch, config),
        _other_us(stack, steps, batch, in_chunks),
    )
    known = measured.knows(stack.capability, stack.processors)
    return launch if wavefront == 1 or (known and launch.us <= launch.otherwise) else None
