"""Which calls are single steps that have kernels of their own, and the configurations of these.

A time loop first loads all of R, which pays from the second step on. One step reads each weight
once instead, so T = 1 is a problem of its own.
"""

from collections.abc import Iterator

from openrnn.codegen.config import StepConfig
from openrnn.spec import Problem

FEW_ROWS = 64  # of the batch, for which a step always pays
MOST_ROWS = 256  # for which it pays where its blocks read little
MOST_READ = 64 << 20  # bytes that all blocks of a launch read: beyond it GEMMs read less
MOST_SUMS = 12  # fragments of a warp's sums, of 4 registers a lane
LARGE_K = 1024  # columns of W_ih and R from which 16 warps of a block find enough to load
BACKWARD = StepConfig("step_backward", 1, 8)


def takes(problem: Problem, steps: int, batch: int) -> bool:
    """Whether the step kernels run a forward pass: one step of few rows, H and I multiples of 8."""
    spec = problem.spec
    inputs = {spec.layer_input(layer) for layer in range(spec.num_layers)}
    whole = spec.hidden_size % 8 == 0 and all(size % 8 == 0 for size in inputs)
    masked = problem.lengths or (problem.reset and spec.bidirectional)
    again = problem.grad and spec.recompute == "gates"
    if steps != 1 or not whole or masked or again:
        return False
    if batch <= FEW_ROWS:
        return True
    sizes = len(spec.gates), max(inputs), spec.hidden_size, batch
    return batch <= MOST_ROWS and values_read(*sizes) * problem.dtype.itemsize <= MOST_READ


def values_read(gates: int, inputs: int, hidden: int, batch: int) -> int:
    """What the blocks of a forward launch read: 8 units of both matrices, and their rows, each."""
    config = next(forward(gates, inputs, hidden, batch))
    a_block = 8 * (gates + config.tiles) * (inputs + hidden)
    return blocks(config, hidden, batch) * a_block


def differentiates(problem: Problem, steps: int, batch: int, before: bool) -> bool:
    """The same for the backward pass.

    Args:
        before: gradients of initial or reset states are wanted.
    """
    return takes(problem, steps, batch) and not (problem.reset and before)


def configs(kind: str, gates: int, inputs: int, hidden: int, batch: int) -> list[StepConfig]:
    """The kernels of a layer, best first.

    Args:
        kind: "step_forward" or "step_backward".
    """
    return [BACKWARD] if kind == BACKWARD.kind else [*forward(gates, inputs, hidden, batch)]


def blocks(config: StepConfig, hidden: int, batch: int) -> int:
    """The blocks of a launch: one for each 8 units and, in forward, 8 * tiles rows."""
    rows = 1 if config is BACKWARD else -(-batch // (8 * config.tiles))
    return hidden // 8 * rows


def forward(gates: int, inputs: int, hidden: int, batch: int) -> Iterator[StepConfig]:
    """The forward kernels of a layer, best first; a later one is less likely to spill."""
    fragments = -(-gates // 2)
    most = max(1, MOST_SUMS // fragments)
    tiles = min((tiles for tiles in (1, 2, 4) if 8 * tiles >= batch), default=4)
    while tiles > most:
        tiles //= 2
    while tiles:
        if tiles < 4 and inputs + hidden >= LARGE_K:
            yield StepConfig("step_forward", tiles, 16)
        yield StepConfig("step_forward", tiles, 8)
        tiles //= 2
