"""The CPU kernels of a network, compiled before the first call needs them."""

from openrnn.backends.base import traced
from openrnn.backends.cpu.layer import compute_dtype
from openrnn.codegen import build
from openrnn.spec import Problem


def compiled(problem: Problem) -> int:
    """Compiles the kernels of calls like this one, of any sizes; returns how many there are.

    They are a time loop that all cells share and this cell's step, in each direction, and the
    kernels that pack matrices.
    """
    from openrnn.kernels.cpu import matrices

    cell = traced(problem.spec)
    dtype = str(compute_dtype(problem.dtype)).removeprefix("torch.")
    matrices.digest()
    found = {*build.forward(cell, dtype)}
    if problem.grad:
        found |= {*build.backward(cell, dtype)}
    return len(found) + 1
