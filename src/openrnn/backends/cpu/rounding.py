"""Which calls round to bfloat16: those of that dtype, or as `precision="bf16"` permits.

A processor with AVX512-BF16 multiplies numbers of bfloat16, with float32 sums, in half of the time
that float32 takes, with AMX in a fraction of it. So the products of calls in bfloat16 are made of
numbers rounded to it, as torch.nn's are: what layers read and emit, and gradients of gates; only
products with W_hr are of float32. On other processors, and where matrices are not packed, nothing
is rounded, and a forward pass reads matrices of bfloat16 as they are.
"""

import torch

from openrnn.backends.cpu.layer import compute_dtype, layout_of
from openrnn.kernels.cpu import launch
from openrnn.spec import Problem


def packs_bf16_panels(problem: Problem, steps: int, batch: int) -> bool:
    """Whether a call of these sizes reads gate matrices as panels of bfloat16.

    Matrices that are bfloat16 lose nothing by that.
    """
    if problem.dtype == torch.bfloat16:
        return not problem.grad and launch.packs_bf16(steps, batch)
    return problem.precision == "bf16" and why_not(problem, steps, batch) is None


def reads_in_place(problem: Problem, steps: int, batch: int) -> bool:
    """Whether a forward pass of these sizes reads matrices of 16 bits where they lie.

    Where they are not packed. A float32 copy would take longer to make, or to find right, than to
    read: up to B 64 a step takes 0.4 to 0.95 of the time.
    """
    bf16 = problem.dtype == torch.bfloat16
    packs = launch.packs_bf16 if bf16 and not problem.grad else launch.packs
    return has_16bit_kernels(problem.dtype) and not packs(steps, batch)


def backward_reads_in_place(problem: Problem, steps: int, batch: int) -> bool:
    """Whether backward reads matrices of 16 bits where they lie, and may store gradients so.

    Where forward does, and no layer's matrices need padding.
    """
    spec, dtype = problem.spec, compute_dtype(problem.dtype)
    return reads_in_place(problem, steps, batch) and all(
        layout_of(spec, layer, dtype).plain for layer in range(spec.num_layers)
    )


def has_16bit_kernels(dtype: torch.dtype) -> bool:
    """Whether there is a product with matrices of this dtype as they are."""
    if dtype != torch.float16:
        return dtype == torch.bfloat16
    from openrnn.kernels.cpu import host

    return host.WIDENS_FLOAT16


def multiplies_bf16(problem: Problem, steps: int, batch: int) -> bool:
    """Whether the products of a call of these sizes are of numbers rounded to bfloat16.

    Where its matrices are packed, and the processor has an instruction for that.
    """
    packs = launch.packs if problem.grad else launch.packs_bf16
    if problem.dtype != torch.bfloat16 or not packs(steps, batch):
        return False
    from openrnn.kernels.cpu import host

    return host.MULTIPLIES_BF16


def why_not(problem: Problem, steps: int, batch: int) -> str | None:
    """Why a call that may does not, in words; or None."""
    why = _refusal_at_any_size(problem)
    if why is None and not launch.packs_bf16(steps, batch):
        return f"T {steps} and B {batch}, needs {_ENOUGH}"
    return why


def _refusal_at_any_size(problem: Problem) -> str | None:
    """Why no call rounds, whatever T and B; None where some do."""
    if problem.dtype != torch.float32:
        return f"dtype {problem.dtype_name}, needs float32"
    return "gradients are wanted" if problem.grad else None


def described(problem: Problem) -> list[str]:
    """Lines for a person: of int8 weights, of 16 bits, and where rounding is permitted."""
    if problem.precision == "int8":
        return ["weights are int8; x and h are rounded to it, row by row"]
    return _narrow(problem) + _rounded(problem)


def _narrow(problem: Problem) -> list[str]:
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return []
    but = ""
    if problem.steps is not None and problem.batch is not None:
        if multiplies_bf16(problem, problem.steps, problem.batch):
            but = ", but products are of numbers rounded to bfloat16"
        elif any(reads(problem, problem.steps, problem.batch) for reads in _READ):
            but = f", but matrices are read as {problem.dtype_name}"
    return [f"computed in float32, between conversions of tensors{but}"]


def _rounded(problem: Problem) -> list[str]:
    if problem.spec.precision != "bf16":
        return []
    if problem.dtype == torch.bfloat16:
        return []  # which `_narrow` tells
    if problem.steps is None or problem.batch is None:
        why, where = _refusal_at_any_size(problem), f", where a call has {_ENOUGH}"
    else:
        why, where = why_not(problem, problem.steps, problem.batch), ""
    no = f"weights are not rounded to bfloat16: {why}"
    return [no if why else f"weights are read as bfloat16{where}"]


_READ = packs_bf16_panels, reads_in_place
_ENOUGH = f"T of {launch.BF16_STEPS} or T x B of {launch.PACK_FROM}"
