"""Which calls are single steps that have kernels of their own, and the configurations of these.

A time loop first loads all of R, which pays from the second step on. One step reads each weight
once instead, so T = 1 is a problem of its own.
"""

from collections.abc import Iterator

import torch

from openrnn.codegen.step_config import StepConfig
from openrnn.memo import memo
from openrnn.spec import Problem, Spec

MOST_ROWS = 256  # of the batch: beyond it backward, in which a block takes all rows, is a loop
# bytes that blocks of `step_forward` read again, beyond which GEMMs were faster on an H200
MOST_REREAD = 40 << 20
MOST_BLOCKS = 264  # the same of its blocks, where rows take more than one: two a multiprocessor
MOST_SUMS = 12  # fragments of a warp's sums, of 4 registers a lane
LARGE_K = 1024  # columns of W_ih and R from which 16 warps of a block find enough to load
CELL = StepConfig("step_cell", 8, 8)
BACKWARD = StepConfig("step_backward", 1, 8)


def takes(problem: Problem, steps: int, batch: int, reset_state: bool = False) -> bool:
    """Whether kernels of single steps run a forward pass: T = 1, H and I multiples of 8.

    Args:
        reset_state: rows that are reset begin from states that were given; GEMMs know one h only.
    """
    spec = problem.spec
    inputs = {spec.layer_input(layer) for layer in range(spec.num_layers)}
    whole = spec.hidden_size % 8 == 0 and all(size % 8 == 0 for size in inputs)
    masked = problem.lengths or (problem.reset and spec.bidirectional)
    again = problem.grad and spec.recompute == "gates"
    if steps != 1 or not whole or masked or again:
        return False
    sizes = len(spec.gates), spec.hidden_size, batch
    kinds = {forward_kind(problem.dtype, *sizes, columns) for columns in input_columns(spec)}
    return not (reset_state and "step_cell" in kinds)


def differentiates(
    problem: Problem, steps: int, batch: int, before: bool, reset_state: bool = False
) -> bool:
    """Whether the backward pass of these sizes runs as a single step.

    Args:
        before: gradients of initial or reset states are wanted.
    """
    if batch > MOST_ROWS or (problem.reset and before):
        return False
    return takes(problem, steps, batch, reset_state)


def input_columns(spec: Spec) -> dict[int, None]:
    """The columns of the layers' input matrices, each once; 0 where layer 0 has none."""
    columns = [spec.layer_input(layer) for layer in range(spec.num_layers)]
    if spec.input_mode != "linear":
        columns[0] = 0
    return dict.fromkeys(columns)


@memo(4096)  # each launch asks
def forward_kind(dtype: torch.dtype, gates: int, hidden: int, batch: int, inputs: int) -> str:
    """The kernel that runs a layer's step; `inputs`: columns of W_ih, 0 without one.

    "step_forward", whose blocks multiply, too: each reads again what others have read. Or
    "step_cell" after two GEMMs, which share operands better.
    """
    config = next(forward(gates, inputs, hidden, batch))
    rows, columns = min(8 * config.tiles, batch), inputs + hidden
    count = blocks(config, hidden, batch)
    again = count * (8 * gates + rows) * columns - (gates * hidden + batch) * columns
    shares = count > hidden // 8
    large = again * dtype.itemsize > MOST_REREAD or (shares and count > MOST_BLOCKS)
    return "step_cell" if large else "step_forward"


def configs(kind: str, gates: int, inputs: int, hidden: int, batch: int) -> list[StepConfig]:
    """The kernels of a layer, best first.

    Args:
        kind: "step_forward", "step_cell" or "step_backward".
    """
    fixed = {one.kind: [one] for one in (CELL, BACKWARD)}
    return fixed.get(kind) or [*forward(gates, inputs, hidden, batch)]


def blocks(config: StepConfig, hidden: int, batch: int) -> int:
    """The blocks of a launch: one for each 8 units and, in forward, 8 * tiles rows."""
    rows = 1 if config is BACKWARD else -(-batch // (8 * config.tiles))
    return hidden // 8 * rows


def forward(gates: int, inputs: int, hidden: int, batch: int) -> Iterator[StepConfig]:
    """The kernels `step_forward` of a layer, best first; a later one is less likely to spill."""
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
