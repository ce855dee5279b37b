"""Long calls in chunks of time, so that what a chunk needs beside its results stays small."""

# Each chunk costs about 40 us more than its steps, as it loads R anew. Measured on an H200 with an
# LSTM in bf16 of T 1024, B 64, H 512: docs/kernels.md.
LARGE = 256 << 20  # bytes of gate gradients of all steps, from which on a call runs in chunks
ENOUGH = 44 << 20  # bytes of them that make a chunk
LEAST = 128  # steps that make a chunk

# with recompute, where memory comes first
ENOUGH_AGAIN = 32 << 20
LEAST_AGAIN = 32


def for_memory(steps: int, batch: int, row: int) -> int:
    """How many chunks a call has; `row`: bytes of the gate gradients of a step and row."""
    step = batch * row
    if steps * step < LARGE:
        return 1
    each = max(LEAST, ENOUGH // step)
    return (steps + each - 1) // each


def for_recompute(steps: int, batch: int, row: int) -> int:
    """The same with recompute. The reserve has this size: symbolic T and B must meet no branch."""
    most = LEAST_AGAIN + 1 + ENOUGH_AGAIN // (batch * row + 1)
    return steps // most + 1


def even(number: int, steps: int) -> tuple[int, ...]:
    """Where that many chunks begin and end, which differ by a step at most."""
    return tuple(steps * chunk // number for chunk in range(number + 1))
