"""What torch's profiler shows of calls that go round torch's dispatcher."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

Result = TypeVar("Result")

_autograd: Any = torch.autograd
is_profiled: Callable[[], bool] = _autograd._profiler_enabled


def named(name: str, run: Callable[..., Result], *args: object) -> Result:
    """Calls `run` with the arguments, and a profiler shows that under a name."""
    if not is_profiled():
        return run(*args)
    with record_function(name):
        return run(*args)
