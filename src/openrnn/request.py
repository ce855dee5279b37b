"""What one call asks, as a `Problem`: made here for layers and explicit operators alike."""

from functools import lru_cache

import torch
from torch import Tensor

from openrnn import dispatch
from openrnn.spec import Problem, Spec

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@lru_cache(maxsize=4096)
def problem(
    text: str,
    dtype: torch.dtype,
    device: torch.device,
    grad: bool,
    training: bool,
    lengths: bool,
    reset: bool,
    return_states: bool,
    transform: bool,
    generator: bool,
    batch: int | None,
    precision: str,
    opaque: str = "",
) -> Problem:
    """The problem of a call; `text` is the spec's, `batch` a `size_class`.

    Raises:
        ValueError: no network has numbers of this type.
    """
    check_dtype(dtype)
    capability, processors = dispatch.place_of(device)
    return Problem(
        Spec.parse(text), dtype, device.type, capability, grad, training, lengths, reset,
        return_states, transform, batch=batch, generator=generator, precision=precision,
        processors=processors, opaque=opaque,
    )  # fmt: skip


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError for an x of numbers that no network has."""
    if dtype not in FLOATS:
        names = [str(kind).removeprefix("torch.") for kind in FLOATS]
        got = str(dtype).removeprefix("torch.")
        raise ValueError(f"x must be {', '.join(names[:-1])} or {names[-1]}, got {got}")


def size_class(x: Tensor) -> int | None:
    """B up to the next power of two, where it may decide which of two backends is faster."""
    if not x.is_cuda or x.dim() != 3:
        return None
    return 1 << max(0, x.shape[1] - 1).bit_length()


def transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation is active."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
