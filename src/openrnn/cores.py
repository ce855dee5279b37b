"""The cores of this process."""

import os


def usable_cores() -> int:
    """How many cores the process may use; the machine may have more."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
