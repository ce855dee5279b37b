"""Whether a stack runs as a wavefront, and in how many chunks of time.

A chunk is a task of a layer: its product and its loop. It waits for the chunk before of its own
layer and for the same chunk of the layer below. So n chunks of L layers take at least n + L - 1
tasks one after the other, and at least as long as the device needs for the clusters of all tasks.
The constants were fitted to six stacks in 38 cuts, timed from CUDA graphs on an H200 (error 15%):
`benchmarks/log/wavefront.json`. Kernels that leave room for more loops were at most 3% faster.
"""

from typing import NamedTuple

from openrnn.codegen.config import SIZES, KernelConfig
from openrnn.codegen.trace import Traced
from openrnn.memo import memo
from openrnn.tuning import measured, overlap, plan
from openrnn.tuning.limits import Limits

CHUNK_COST = 13.0  # us of a chunk beyond its steps and products: launches, waits, R loaded anew
PRODUCTS_BESIDE = 3.0  # times as long as alone that products take beside loops
LEAST_STEPS = 8  # of a chunk that the model cuts
MOST_CHUNKS = 32
LEAST_GAIN = 0.92  # of the time layer by layer, at most, that a wavefront must take


class Stack(NamedTuple):
    """Layers of one size.

    Attributes:
        kind, flags: of the loops.
        columns: of the matrix, of G*H rows, that is multiplied with each chunk; after: of those
            that are multiplied with all steps of a layer when its loops have run.
    """

    kind: str
    flags: plan.Flags
    cell: Traced
    dtype: str
    hidden: int
    layers: int
    columns: int
    after: int
    capability: tuple[int, int]
    processors: int


class Wavefront(NamedTuple):
    """How a stack runs.

    Attributes:
        chunks: of time.
        us: of all layers by the model; in_turn: the same, layer by layer.
    """

    chunks: int
    us: float
    in_turn: float


@memo(1024)
def best(stack: Stack, steps: int, batch: int, chunk: int | None) -> Wavefront | None:
    """The quickest wavefront; None where layer by layer is as quick, or loops are grids.

    Args:
        chunk: steps that a chunk is to have; None: the model chooses.
    """
    limits = Limits.of(stack.capability, stack.processors)
    config = _config(stack, batch)
    places = dict(limits.places).get(config.cluster, 0)
    if config.clusters > 1 or not places:
        return None
    share = -(-batch // config.rows) / places  # of the device, that a loop takes
    loop = steps * plan.us_of(stack.cell, stack.dtype, config, batch, limits)
    rows, size = len(stack.cell.gates) * stack.hidden, SIZES[stack.dtype]
    product, after = (
        overlap.products_time(steps, batch, rows, columns, size)
        for columns in (stack.columns, stack.after)
    )
    in_turn = stack.layers * (loop + product + after + CHUNK_COST)

    def cut(count: int) -> Wavefront:
        task = (loop + PRODUCTS_BESIDE * product) / count + CHUNK_COST
        line = (count + stack.layers - 1) * task
        held = stack.layers * (share * (loop + count * CHUNK_COST) + product)
        return Wavefront(count, max(line, held) + stack.layers * after, in_turn)

    if chunk is not None:
        return cut(-(-steps // chunk))
    known = (stack.capability, stack.processors) == (measured.CAPABILITY, measured.PROCESSORS)
    counts = range(2, min(MOST_CHUNKS, steps // LEAST_STEPS) + 1)
    if not known or not counts:
        return None
    quickest = min(map(cut, counts), key=lambda one: one.us)
    return quickest if quickest.us <= LEAST_GAIN * in_turn else None


def _config(stack: Stack, batch: int) -> KernelConfig:
    """The kernel of a loop."""
    return plan.ranked(
        stack.kind, stack.flags, stack.cell, stack.dtype, stack.hidden, -(-batch // 8) * 8,
        stack.capability, stack.processors,
    )[0]  # fmt: skip
