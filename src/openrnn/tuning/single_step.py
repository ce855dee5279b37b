"""Which calls are single steps that have kernels of their own, and the configurations of these.

A time loop first loads all of R, which pays from the second step on. One step reads each weight
once instead, so T = 1 is a problem of its own.
"""

from dataclasses import replace
from typing import NamedTuple

from openrnn.codegen.config import ceil_div
from openrnn.codegen.step_config import StepConfig
from openrnn.memo import memo
from openrnn.spec import Problem
from openrnn.tuning.limits import Limits

MOST_ROWS = 256  # of the batch: beyond it backward, in which a block takes all rows, is a loop
MOST_SUMS = 32  # fragments of a warp's sums, of 4 registers a lane
MOST_STAGES = 4  # of a ring: more were no faster
# The model of times and the shared memory of rings are of an H200.
PROCESSORS = 132
# Bytes of rings where a launch has a block for each multiprocessor at most, and where it has more:
# then two are resident on each.
RING, RING_OF_TWO = 200 << 10, 110 << 10
# Bytes of shared memory, of which a multiprocessor has room for one block. A launch of no more
# blocks than multiprocessors asks for them: it begins while the launch before still runs, and the
# free multiprocessors would otherwise take two of its blocks each.
ALONE = 116 << 10
# us by one GEMM and `step_cell`, by two, and more for each GFLOP, by bytes of a value
GEMMS = {2: (5.7, 8.2, 2.3), 4: (8.0, 13.5, 3.3)}
CELL = StepConfig("step_cell", 8)
BACKWARD = StepConfig("step_backward", 1)


class StepSizes(NamedTuple):
    """The sizes of a layer's step.

    Args:
        inputs: columns of W_ih, 0 without one.
        itemsize: bytes of a value.
        has_h: h is multiplied by R; without initial states it is zero.
    """

    gates: int
    inputs: int
    hidden: int
    batch: int
    itemsize: int
    has_h: bool = True

    @property
    def columns(self) -> int:
        """K of both products together."""
        return self.inputs + (self.hidden if self.has_h else 0)


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
    kinds = {forward_kind(sizes) for sizes in step_sizes(problem, batch)}
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


def step_sizes(problem: Problem, batch: int, has_h: bool = True) -> list[StepSizes]:
    """The sizes of the layers' steps, each once."""
    spec = problem.spec
    columns = [spec.layer_input(layer) for layer in range(spec.num_layers)]
    if spec.input_mode != "linear":
        columns[0] = 0
    size, hidden = problem.dtype.itemsize, spec.hidden_size
    return [
        StepSizes(len(spec.gates), inputs, hidden, batch, size, has_h)
        for inputs in dict.fromkeys(columns)
    ]


@memo(4096)  # each launch asks
def forward_kind(sizes: StepSizes) -> str:
    """The kernel that runs a layer's step.

    "step_forward", whose blocks multiply, too: each reads again what others have read. Or
    "step_cell" after two GEMMs, which share operands better.
    """
    own = min(step_time(config, sizes) for config in forward(sizes))
    one, two, gigaflop = GEMMS[sizes.itemsize]
    launches = two if sizes.inputs and sizes.has_h else one
    flop = 2.0 * sizes.batch * sizes.gates * sizes.hidden * sizes.columns
    return "step_forward" if own < launches + gigaflop * flop / 1e9 else "step_cell"


def configs(kind: str, sizes: StepSizes, capability: tuple[int, int]) -> list[StepConfig]:
    """The kernels of a layer that a device has shared memory for, best first.

    Args:
        kind: "step_forward", "step_cell" or "step_backward".
    """
    fixed = {one.kind: [one] for one in (CELL, BACKWARD)}
    return fixed.get(kind) or forward(sizes, Limits.of(capability).shared)


def blocks(config: StepConfig, hidden: int, batch: int) -> int:
    """The blocks of a launch: one for some groups of units and, in forward, 8 * tiles rows."""
    rows = 1 if config is BACKWARD else ceil_div(batch, 8 * config.tiles)
    return hidden // (8 * config.unit_groups) * rows


def shared_of_launch(
    config: StepConfig, sizes: StepSizes, capability: tuple[int, int], processors: int
) -> int:
    """Bytes of shared memory that the launch of a kernel asks for."""
    needed = config.shared(sizes.gates)
    few = blocks(config, sizes.hidden, sizes.batch) <= processors
    alone = config.kind == "step_forward" and few and overlaps(capability)
    return max(needed, ALONE) if alone and Limits.of(capability).shared >= ALONE else needed


def overlaps(capability: tuple[int, int]) -> bool:
    """Whether a launch may begin while the one before still runs."""
    return capability >= (9, 0)


def forward(sizes: StepSizes, shared: int = RING) -> list[StepConfig]:
    """The kernels `step_forward` of a layer, best first, and last the one that needs least.

    Args:
        shared: bytes of shared memory that a block may take.
    """
    smallest = StepConfig("step_forward", 1)
    every = [
        with_stages(StepConfig("step_forward", tiles, unit_groups), sizes, shared)
        for unit_groups in ((2, 1) if sizes.hidden % 16 == 0 else (1,))  # of equals the first
        for tiles in (1, 2, 4, 8)
        if unit_groups * tiles * ceil_div(sizes.gates, 2) <= MOST_SUMS
        and 8 * tiles < 2 * max(8, sizes.batch)
    ]
    fitting = [one for one in every if one.shared(sizes.gates) <= shared]
    best = sorted(fitting, key=lambda config: step_time(config, sizes))
    return [*best, with_stages(smallest, sizes, shared)]


def with_stages(config: StepConfig, sizes: StepSizes, shared: int) -> StepConfig:
    """The configuration with as many stages as shared memory should hold."""
    few = blocks(config, sizes.hidden, sizes.batch) <= PROCESSORS
    stages = min(shared, RING if few else RING_OF_TWO) // config.stage_bytes(sizes.gates)
    return replace(config, stages=max(1, min(MOST_STAGES, stages)))


def step_time(config: StepConfig, sizes: StepSizes) -> float:
    """Microseconds of `step_forward` on an H200, by a model.

    Fitted to measured times of LSTMs and GRUs: benchmarks/log/cuda-results.md, "Rings of single
    steps".
    """
    count = blocks(config, sizes.hidden, sizes.batch)
    rounds = ceil_div(count, PROCESSORS)
    rows = min(8 * config.tiles, sizes.batch)
    row = sizes.columns * sizes.itemsize
    loaded = (8 * config.unit_groups * sizes.gates + rows) * row  # bytes, of a block
    pairs = config.unit_groups * config.tiles  # of 8 units and 8 rows
    mma = ceil_div(sizes.gates, 2) * pairs * row / 32  # of a block
    of_processor = 0.77e-5 * loaded + 0.17 * pairs + 1.4e-3 * mma
    return 2.0 + rounds * of_processor + 0.18e-7 * count * loaded
