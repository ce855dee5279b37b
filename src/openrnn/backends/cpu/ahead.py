"""The CPU kernels of a network, compiled before the first call needs them."""

import torch

from openrnn.backends.base import traced
from openrnn.backends.cpu import rounding
from openrnn.backends.cpu.layer import compute_dtype
from openrnn.codegen import build
from openrnn.spec import Problem, dtype_name


def compiled(problem: Problem) -> int:
    """Compiles all kernels that calls like this one may need, at any T and B; returns how many.

    They are a time loop that all cells share and this cell's step, in each direction, the kernels
    that pack matrices, what starts all of them and, where bfloat16 is permitted or is the dtype of
    the call, its products; of 16 bits also the products with matrices as they are.
    """
    from openrnn.kernels.cpu import host, launch, matrices

    cell = traced(problem.spec)
    dtype = dtype_name(compute_dtype(problem.dtype))
    made: list[object] = [launch.starters(), matrices.digest(), *build.forward(cell, dtype)]
    if problem.grad:
        made += build.backward(cell, dtype)
    is_bfloat16 = problem.dtype == torch.bfloat16
    if problem.precision == "bf16" or (is_bfloat16 and not host.MULTIPLIES_BF16):
        made.append(matrices.bf16_product())
    elif is_bfloat16:
        made.append(matrices.pairs())
    if rounding.has_16bit_kernels(problem.dtype):
        made.append(matrices.dots_16bit(problem.dtype_name))
        if problem.grad:
            made.append(matrices.backward_kernels_16bit(problem.dtype_name))
    return len({*map(id, made)})
