"""What one call asks, as a `Problem`: made here for layers, operators, `explain` and commands."""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn import dispatch
from openrnn.memo import memo
from openrnn.spec import Problem, Spec

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Request(NamedTuple):
    """One call as values.

    Args:
        spec: the text of the network's spec.
        precision: of float32 products, as `openrnn.spec.precision_of` says now.
        batch: B, as a `size_class` where it decides; steps, reset_state: where they are shown.
        capability: the compute capability to suppose; None for the device's own.

    The others are those of `Problem`.
    """

    spec: str
    dtype: torch.dtype
    device: torch.device
    precision: str
    grad: bool = False
    training: bool = False
    lengths: bool = False
    reset: bool = False
    return_states: bool = False
    transform: bool = False
    generator: bool = False
    batch: int | None = None
    opaque: str = ""
    steps: int | None = None
    capability: tuple[int, int] | None = None
    reset_state: bool = False


@memo(4096)
def problem(request: Request) -> Problem:
    """The problem of a call whose backend is to be chosen.

    Raises:
        ValueError: no network has numbers of this type.
    """
    check_dtype(request.dtype)
    capability, processors = request.capability, None
    if capability is None:
        capability, processors = dispatch.place_of(request.device)
    return Problem(
        Spec.parse(request.spec), request.dtype, request.device.type, capability, request.grad,
        request.training, request.lengths, request.reset, request.return_states,
        request.transform, request.steps, request.batch, request.generator, request.precision,
        processors, request.opaque, request.reset_state,
    )  # fmt: skip


def for_backend(
    spec: Spec,
    dtype: torch.dtype,
    device: str,
    *,
    grad: bool,
    training: bool,
    lengths: bool,
    reset: bool,
    return_states: bool,
    precision: str = "",
    opaque: str = "",
) -> Problem:
    """The problem of a call whose backend is known: without what only a choice looks at."""
    return Problem(
        spec, dtype, device, None, grad, training, lengths, reset, return_states,
        precision=precision, opaque=opaque,
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
