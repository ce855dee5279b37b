"""One guard in place of all checks of a call's tensors, where they are like those of another call.

The guard is compiled (of `torch._C._dynamo`). It sees types, dtypes, devices, sizes, strides,
requires_grad and dispatch keys, and with these also autocast, inference mode, the transforms of
`torch.func` and dispatch modes. It does not see memory, grad mode, forward-mode differentiation and
the tracer of `torch.jit`.
"""

from collections.abc import Callable, Sequence
from operator import add, ge, mul
from typing import Any

import torch
from torch import Tensor, nn

from openrnn import tensors

_TYPES = frozenset((Tensor, nn.Parameter))

_offset, _storage = Tensor.storage_offset, Tensor.untyped_storage
_bytes: Any = torch.UntypedStorage.nbytes
_nested: Any = Tensor.is_nested.__get__  # type: ignore[attr-defined]  # a property
_tracing: Any = torch._C._get_tracing_state
_forward_mode = torch.autograd.forward_ad


def unseen() -> bool:
    """Whether something is active that no guard sees, and that looks at what we do."""
    return _tracing() is not None or _forward_mode._current_level >= 0


def guardable(every: Sequence[Any]) -> bool:
    """Whether a guard may look at them: tensors with sizes; else it would end the process."""
    return _TYPES.issuperset(map(type, every)) and not any(map(_nested, every))


class Alike:
    """Whether tensors are like these, of a call that was right: then theirs is right, too.

    Args:
        every: the tensors of that call, all plain.
        records: whether the call records a gradient; None if it never does.
    """

    def __init__(self, every: Sequence[Tensor], records: bool | None = None) -> None:
        self._count, self._check, self._records = len(every), _guard(every), records
        self._grad = records is not None and any(tensor.requires_grad for tensor in every)
        # bytes of an element, and from the first to the end of the last
        self._widths = [tensor.itemsize for tensor in every]
        self._extents = [*map(tensors.extent, every)]
        self._held: tuple[int, ...] = ()  # sizes of storages and offsets in them, last seen

    def __call__(self, every: Sequence[Tensor]) -> bool:
        """Whether they are, and the call records a gradient as that did; for `guardable` ones."""
        if self._grad and torch.is_grad_enabled() != self._records:
            return False
        return self.same(every)

    def same(self, every: Sequence[Tensor]) -> bool:
        """Whether they are, whatever the call records."""
        return len(every) == self._count and self._check(*every) and self._holds(every)

    def _holds(self, every: Sequence[Tensor]) -> bool:
        """Whether storages have all elements: they may shrink, and no guard sees it."""
        held = (*map(_bytes, map(_storage, every)), *map(_offset, every))
        if held == self._held:
            return True
        ends = map(add, self._extents, map(mul, held[self._count :], self._widths))
        if not all(map(ge, held, ends)):
            return False
        self._held = held
        return True


def _guard(every: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors are like these in everything but address and offset."""
    sizes: Any = [[*tensor.shape] for tensor in every]
    strides: Any = [[*tensor.stride()] for tensor in every]
    guards: Any = torch._C._dynamo.guards  # compiled: part of torch._C, not of torch._dynamo
    made = guards.TensorGuards(*every, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = made.check
    return check
