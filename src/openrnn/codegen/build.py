"""A cell's kernels, ready to be called."""

from functools import lru_cache
from typing import TYPE_CHECKING

from openrnn.codegen import numba
from openrnn.codegen.trace import Traced

if TYPE_CHECKING:
    from openrnn.kernels.objects import Kernel


@lru_cache(maxsize=1024)
def forward(cell: Traced, dtype: str) -> "Kernel":
    """The compiled forward loop of a cell: `forward(job, task, team)`."""
    from openrnn.kernels import objects

    return objects.kernels(numba.forward_source(cell, dtype), ["forward"], 3)[0]


@lru_cache(maxsize=1024)
def backward(cell: Traced, dtype: str) -> "Kernel":
    """The compiled backward loop of a cell: `backward(job, task, team)`."""
    from openrnn.kernels import objects

    return objects.kernels(numba.backward_source(cell, dtype), ["backward"], 3)[0]
