"""Guards: compiled tests of all tensors of a call at once, from `torch._C._dynamo`.

A guard sees types, dtypes, devices, sizes, strides, requires_grad and dispatch keys, and with these
also autocast, inference mode, the transforms of `torch.func` and dispatch modes. It does not see
memory, grad mode, forward-mode differentiation and the tracer of `torch.jit`. It ends the process
where a tensor has no strides, so types and `nested` are asked first.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

TYPES = frozenset((Tensor, torch.nn.Parameter))
nested = attrgetter("is_nested")

Sizes = list[list[int | None]]  # of each tensor; None: any


def guard(every: Sequence[Tensor], sizes: Sizes, strides: Sizes) -> Callable[..., bool]:
    """Whether tensors are like these in everything but what is None."""
    guards: Any = torch._C._dynamo.guards  # compiled: part of torch._C, not of torch._dynamo
    made = guards.TensorGuards(*every, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = made.check
    return check
