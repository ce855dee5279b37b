"""Which calls are single steps that have kernels of their own, and the configurations of these.

A time loop first loads all of R, which pays from the second step on. One step reads each weight
once instead, so T = 1 is a problem of its own.
"""

from dataclasses import replace
from typing import NamedTuple

from openrnn.codegen.config import ceil_div
from openrnn.codegen.step_config import WARPS, StepConfig
from openrnn.memo import memo
from openrnn.spec import Problem
from openrnn.tuning.limits import Limits

MOST_ROWS = 256  # of the batch: beyond it backward, in which a block takes all rows, is a loop
MOST_SUMS = 32  # fragments of a warp's sums, of 4 registers a lane
MOST_STAGES = 4  # of a ring
# The model of times and the sizes of rings are of an H200, whatever the device.
PROCESSORS = 132
# Bytes of a block's rings: where a launch has a block for each multiprocessor at most, and where it
# has more, so that two blocks fit on an H200's multiprocessor.
RING_BYTES, SMALL_RING_BYTES = 200 << 10, 110 << 10
# So many bytes of shared memory that one block alone fits on a multiprocessor of 9.0 and 10.0. A
# launch of no more blocks than multiprocessors asks for them: it begins while the launch before
# still runs, and the multiprocessors that are free by then would take two of its blocks each.
ONE_BLOCK_BYTES = 116 << 10
# us by one GEMM and `step_cell`, and by two; more for each GFLOP, and for each 10 MB of matrices
GEMMS = {2: (5.4, 8.5, 1.9, 0.98), 4: (7.0, 12.6, 3.3, 0.8)}  # by bytes of a value
# With resets to given states a time loop is the alternative to blocks, and not GEMMs: then blocks
# may take so many times as long as GEMMs would.
RESET_STATE_FACTOR = 2.0
CELL = StepConfig("step_cell", WARPS)
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
    if not reset_state:
        return True
    return all(forward_kind(sizes, True) != "step_cell" for sizes in step_sizes(problem, batch))


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
def forward_kind(sizes: StepSizes, reset_state: bool = False) -> str:
    """The kernel that runs a layer's step.

    "step_forward", whose blocks multiply, too: each reads again what others have read, but no
    weight twice up to 8 rows. Or "step_cell" after GEMMs, which share operands better.

    Args:
        reset_state: states after a reset are given. GEMMs do not know them, so "step_cell" means
            that the time loop runs.
    """
    if sizes.batch <= 8:
        return "step_forward"
    own = min(step_time(config, sizes) for config in forward(sizes))
    one, two, gigaflop, megabytes = GEMMS[sizes.itemsize]
    values = sizes.gates * sizes.hidden * sizes.columns  # of W_ih and R
    gemms = two if sizes.inputs and sizes.has_h else one
    gemms += gigaflop * 2.0 * sizes.batch * values / 1e9
    gemms += megabytes * values * sizes.itemsize / 1e7
    gemms *= RESET_STATE_FACTOR if reset_state else 1.0
    return "step_forward" if own < gemms else "step_cell"


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
    fits = Limits.of(capability).shared >= ONE_BLOCK_BYTES
    return max(needed, ONE_BLOCK_BYTES) if alone and fits else needed


def overlaps(capability: tuple[int, int]) -> bool:
    """Whether a launch may begin while the one before still runs."""
    return capability >= (9, 0)


def forward(sizes: StepSizes, shared: int = RING_BYTES) -> list[StepConfig]:
    """The kernels `step_forward` of a layer, best first, and last the one of fewest registers.

    Args:
        shared: bytes of shared memory that a block may take.
    """
    every = [
        with_stages(StepConfig("step_forward", tiles, unit_groups), sizes, shared)
        for unit_groups in ((2, 1) if sizes.hidden % 16 == 0 else (1,))
        for tiles in (1, 2, 4, 8)
        if unit_groups * tiles * ceil_div(sizes.gates, 2) <= MOST_SUMS
        and 8 * tiles < 2 * max(8, sizes.batch)
    ]
    smallest = with_stages(StepConfig("step_forward", 1), sizes, shared)
    fitting = [one for one in every if one.shared(sizes.gates) <= shared]
    # a stable sort: of blocks that take as long, those of 16 units come first, which were faster
    best = sorted(fitting, key=lambda config: step_time(config, sizes))
    return best if best[-1] == smallest else [*best, smallest]


def with_stages(config: StepConfig, sizes: StepSizes, shared: int) -> StepConfig:
    """The configuration with as many stages as shared memory should hold."""
    few = blocks(config, sizes.hidden, sizes.batch) <= PROCESSORS
    stages = min(shared, RING_BYTES if few else SMALL_RING_BYTES) // config.stage_bytes(sizes.gates)
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
