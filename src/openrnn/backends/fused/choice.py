"""Where cuDNN is measured faster than our kernels, from which `auto` chooses; never keyed on T."""

from dataclasses import dataclass

import torch

from openrnn.spec import Problem


@dataclass(frozen=True)
class Loss:
    """A region in which our kernels lose: hidden sizes and batches from the first to the last."""

    cells: tuple[str, ...]
    dtype: torch.dtype
    hidden: tuple[int, int]
    batch: tuple[int, int]
    grad: tuple[bool, ...]


LOSSES: tuple[Loss, ...] = ()


def slower(problem: Problem) -> str | None:
    """The region in which a problem lies, in words; None where ours is faster, or nobody measured.

    Only plain calls are there: with lengths cuDNN leaves its fast kernels, and ours ends early.
    """
    spec = problem.spec
    if problem.lengths or problem.drops or spec.num_layers > 1 or spec.bias_mode != "double":
        return None
    return None
