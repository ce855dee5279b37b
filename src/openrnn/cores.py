"""The cores of this process."""

import os


def usable_cores() -> int:
    """How many it may run on, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
