"""What glibc does with memory that is freed, where results are large.

It maps blocks above a size, at first 128 KiB, and gives them back to the system when they are
freed. It also gives back free memory at the end of its heap above twice that size. A training step
whose gradients are freed before the next one would find new pages each time: of a GRU of 1,024
units they took 1.1 to 1.9 ms of 2 to 2.8.
"""

from functools import cache

import torch

MIN_RESULT_BYTES = 1 << 20  # bytes of a pass's results
_MOST = (32 << 20) - (64 << 10)  # just below the largest size that glibc takes for its limit


@cache
def keep_freed_memory() -> None:
    """From now on glibc keeps freed memory of up to 64 MiB for what this process asks for next.

    When a mapped block is freed, its size becomes that limit (mallopt(3), M_MMAP_THRESHOLD and
    M_TRIM_THRESHOLD), as if any tensor of 32 MiB had been freed. Where the limits are set by the
    environment, and with other allocators, nothing changes.
    """
    torch.empty(_MOST, dtype=torch.uint8, device="cpu")
