"""Long calls are cut into chunks of time, which bounds the memory beside their results."""

# Each chunk costs about 40 us more than its steps, as it loads R anew. Measured on an H200 with an
# LSTM in bf16 of T 1024, B 64, H 512: docs/kernels.md.
LARGE = 256 << 20  # bytes of gate gradients of all steps, from which on a call runs in chunks
ENOUGH = 44 << 20  # bytes of gate gradients of a chunk
LEAST = 128  # steps of a chunk, before all are made even: half of it at least

LARGEST_WAVEFRONT = 512 << 20  # bytes of gate gradients of all layers and steps, held at once

# the same with recompute, where memory comes first
ENOUGH_RECOMPUTED = 32 << 20
LEAST_RECOMPUTED = 32


def for_memory(steps: int, batch: int, row: int) -> int:
    """How many chunks a call has; `row`: bytes of the gate gradients of one step and row."""
    step = batch * row
    if steps * step < LARGE:
        return 1
    each = max(LEAST, ENOUGH // step)
    return (steps + each - 1) // each


def for_recompute(steps: int, batch: int, row: int) -> int:
    """How many chunks a call with recompute has.

    The reserve's size follows from it, so symbolic T and B must meet no branch.
    """
    most = LEAST_RECOMPUTED + 1 + ENOUGH_RECOMPUTED // (batch * row + 1)
    return steps // most + 1


def even(number: int, steps: int) -> tuple[int, ...]:
    """Where that many chunks begin and end; their sizes differ by one step at most."""
    return tuple(steps * chunk // number for chunk in range(number + 1))
