"""Long calls are cut into chunks of time, which bounds the memory beside their results."""

# Each chunk costs about 40 us more than its steps, as it loads R anew. Measured on an H200 with an
# LSTM in bf16 of T 1024, B 64, H 512: docs/kernels.md.
CHUNK_FROM_BYTES = 256 << 20  # of gate gradients of all steps: from here on there are chunks
CHUNK_BYTES = 44 << 20  # bytes of gate gradients of a chunk
MIN_CHUNK_STEPS = 128  # after all chunks are made even, one may have half of that

LARGEST_WAVEFRONT = 512 << 20  # bytes of gate gradients of all layers and steps, held at once

# the same with recompute, where memory comes first
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
    most = MIN_RECOMPUTED_STEPS + 1 + RECOMPUTED_CHUNK_BYTES // (batch * row + 1)
    return steps // most + 1


def even(number: int, steps: int) -> tuple[int, ...]:
    """Where that many chunks begin and end; their sizes differ by one step at most."""
    return tuple(steps * chunk // number for chunk in range(number + 1))
