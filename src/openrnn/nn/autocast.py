"""What autocast does to a layer: everything goes into its dtype, and float64 stays as it is."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

CHANGED = frozenset((torch.float32, torch.float16, torch.bfloat16))


def wanted(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast asks for, if on; some kinds of device, such as meta, know none."""
    # the first question is cheap and mostly answered by no
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = device.type
    if torch.compiler.is_compiling():  # torch 2.11 breaks the graph at the question below
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors, cast to the dtype that autocast asks for."""
    return [tensor.to(dtype) if tensor.dtype in CHANGED else tensor for tensor in tensors]


def applied(x: Tensor, weights: Sequence[Tensor], *states: list[Tensor] | None) -> tuple[Any, ...]:
    """What a call is given, in the dtype that autocast asks for, if on."""
    dtype = wanted(x.device)
    if dtype is None:
        return x, weights, *states
    x, *weights = cast((x, *weights), dtype)
    return x, weights, *(given and cast(given, dtype) for given in states)
