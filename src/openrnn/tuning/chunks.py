"""Long calls are cut into chunks of time, which bounds the memory beside their results."""

from openrnn.codegen.tiles import whole_tiles
from openrnn.spec import Spec

# Each chunk costs about 40 us more than its steps, as it loads R anew. Measured on an H200 with an
# LSTM in bf16 of T 1024, B 64, H 512: docs/kernels.md.
CHUNK_FROM_BYTES = 256 << 20  # of gate gradients of all steps: from here on there are chunks
CHUNK_BYTES = 44 << 20  # bytes of gate gradients of a chunk
MIN_CHUNK_STEPS = 128  # after all chunks are made even, one may have half of that

# Bytes of gate gradients that the layers of a wavefront hold at the same time; with recompute
# bytes of all that their chunks take.
LARGEST_WAVEFRONT = 512 << 20

# of a chunk with recompute, where memory comes first
RECOMPUTED_CHUNK_BYTES = 32 << 20
MIN_RECOMPUTED_STEPS = 32


def for_memory(steps: int, batch: int, row: int) -> int:
    """How many chunks a call has; `row`: bytes of the gate gradients of one step and row."""
    step = batch * row
    if steps * step < CHUNK_FROM_BYTES:
        return 1
    each = max(MIN_CHUNK_STEPS, CHUNK_BYTES // step)
    return (steps + each - 1) // each


def for_recompute(steps: int, batch: int, row: int) -> int:
    """How many chunks a call with recompute has.

    The reserve's size follows from it, so symbolic T and B must meet no branch.
    """
    return steps // most_recomputed(batch, row) + 1


def most_recomputed(batch: int, row: int) -> int:
    """The most steps that such a chunk has."""
    return MIN_RECOMPUTED_STEPS + 1 + RECOMPUTED_CHUNK_BYTES // (batch * row + 1)


def recompute_sizes(spec: Spec, batch: int, row: int) -> tuple[int, int]:
    """The batch and the bytes of a row by which chunks with recompute are counted.

    Saved activations are of whole tiles of rows. The layers of a stack may run at the same time,
    each with a chunk of its own: from four layers on these are smaller.

    Args:
        row: bytes of the gate gradients of one step and row.
    """
    at_once = 1 if spec.bidirectional or spec.wavefront == 0 else spec.num_layers
    return whole_tiles(batch), row * max(1, at_once // 2)


def even(number: int, steps: int) -> tuple[int, ...]:
    """Where that many chunks begin and end; their sizes differ by one step at most."""
    return tuple(steps * chunk // number for chunk in range(number + 1))
