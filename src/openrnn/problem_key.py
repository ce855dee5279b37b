"""What one call asks, as a `Problem`: made here for layers, operators, `explain` and commands."""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn import dispatch
from openrnn.memo import memo
from openrnn.spec import Problem, Spec, dtype_name

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ProblemKey(NamedTuple):
    """What one call asks, as values that may be a key.

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
def problem_of(key: ProblemKey) -> Problem:
    """The problem of a call whose backend is to be chosen.

    Raises:
        ValueError: no network has numbers of this type.
    """
    check_dtype(key.dtype)
    capability, processors = key.capability, None
    if capability is None:
        capability, processors = dispatch.device_info(key.device)
    return Problem(
        Spec.parse(key.spec), key.dtype, key.device.type, capability, key.grad, key.training,
        key.lengths, key.reset, key.return_states, key.transform, key.steps, key.batch,
        key.generator, key.precision, processors, key.opaque, key.reset_state,
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
        names = [dtype_name(kind) for kind in FLOATS]
        got = dtype_name(dtype)
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
