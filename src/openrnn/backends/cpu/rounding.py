"""Which calls read gate matrices rounded to bfloat16: what `precision="bf16"` permits."""

import torch

from openrnn.kernels.cpu import launch
from openrnn.spec import Problem


def reads_bf16(problem: Problem, steps: int, batch: int) -> bool:
    """Whether a call of these sizes does."""
    return problem.precision == "bf16" and why_not(problem, steps, batch) is None


def why_not(problem: Problem, steps: int, batch: int) -> str | None:
    """Why a call that may does not, in words; or None."""
    if problem.dtype != torch.float32:
        return f"dtype {str(problem.dtype).removeprefix('torch.')}, needs float32"
    if problem.grad:
        return "gradients are wanted"
    if not launch.packs_bf16(steps, batch):
        return f"T {steps} and B {batch}, needs {_ENOUGH}"
    return None


def described(problem: Problem) -> list[str]:
    """A line for a person, where it is permitted."""
    if problem.spec.precision != "bf16" or problem.precision == "int8":
        return []
    known = problem.steps is not None and problem.batch is not None
    steps, batch = (problem.steps or 0, problem.batch or 0) if known else (launch.PACK_FROM, 1)
    if why := why_not(problem, steps, batch):
        return [f"weights are not rounded to bfloat16: {why}"]
    return ["weights are read as bfloat16" + ("" if known else f", where a call has {_ENOUGH}")]


_ENOUGH = f"T of {launch.BF16_STEPS} or T x B of {launch.PACK_FROM}"
