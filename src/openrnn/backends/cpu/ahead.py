"""The CPU kernels of a network, compiled before the first call needs them."""

import torch

from openrnn.backends.base import traced
from openrnn.backends.cpu import rounding
from openrnn.backends.cpu.layer import compute_dtype
from openrnn.codegen import build
from openrnn.spec import Problem


def compiled(problem: Problem) -> int:
    """Compiles the kernels of calls like this one, of any sizes; returns how many there are.

    They are a time loop that all cells share and this cell's step, in each direction, the kernels
    that pack matrices, what starts all of them and, where bfloat16 is permitted or is the dtype of
    the call, its products; of 16 bits also the products with matrices as they are.
    """
    from openrnn.kernels.cpu import host, launch, matrices

    cell = traced(problem.spec)
    dtype = str(compute_dtype(problem.dtype)).removeprefix("torch.")
    launch.starters(), matrices.digest()
    found = {*build.forward(cell, dtype)}
    if problem.grad:
        found |= {*build.backward(cell, dtype)}
    narrow = problem.dtype == torch.bfloat16
    reads = problem.precision == "bf16" or (narrow and not host.MULTIPLIES_BF16)
    if reads:
        matrices.bf16_product()
    elif narrow:
        matrices.pairs()
    name, in_place = str(problem.dtype).removeprefix("torch."), rounding.widens(problem.dtype)
    if in_place:
        matrices.narrow_dots(name)
        if problem.grad:
            matrices.narrow_back(name)
    return len(found) + 2 + (reads or narrow) + in_place * (1 + problem.grad)
