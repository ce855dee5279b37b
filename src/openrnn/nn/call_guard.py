"""One guard in place of all checks of a call's tensors, where they are like those of another call.

What a guard does not see (`guards` says it) is asked here.
"""

from collections.abc import Sequence
from operator import add, ge, mul
from typing import Any

import torch
from torch import Tensor

from openrnn import op, problem_key, tensors
from openrnn.guards import TYPES, guard, nested

_storage = Tensor.untyped_storage
_offset: Any = Tensor.storage_offset
_tracing: Any = torch._C._get_tracing_state
_forward_mode = torch.autograd.forward_ad
_grad_enabled = torch.is_grad_enabled
_modes: Any = torch._C._len_torch_dispatch_stack


def has_unguarded_mode() -> bool:
    """Whether something is active that no guard sees, and that looks at what we do."""
    return _tracing() is not None or _forward_mode._current_level >= 0 or _modes() > 0


def is_unobserved(x: Tensor, casts: bool = False) -> bool:
    """Whether nothing is active that watches or changes a call of x; `casts`: autocast may."""
    if (not casts and torch._C._is_any_autocast_enabled()) or op.watched(x):
        return False
    return not (has_unguarded_mode() or problem_key.transformed())


def can_guard(every: Sequence[Any]) -> bool:
    """Whether a guard may look at them: tensors with sizes; else it would end the process."""
    return TYPES.issuperset(map(type, every)) and not any(map(nested, every))


class CallGuard:
    """Tests whether tensors have the metadata of those of an earlier call, which was checked.

    Args:
        every: the tensors of that call, all plain.
        records: whether the call records a gradient; None if it never does.
    """

    def __init__(self, every: Sequence[Tensor], records: bool | None = None) -> None:
        self._count, self._records = len(every), records
        # a guard refuses a tensor that comes twice, such as one of zeros for both states
        first = {id(tensor): index for index, tensor in reversed([*enumerate(every)])}
        self._once = sorted(first.values())
        self._twins = [(n, first[id(one)]) for n, one in enumerate(every) if first[id(one)] != n]
        once = [every[index] for index in self._once]
        self._check = guard(once, [[*t.shape] for t in once], [[*t.stride()] for t in once])
        self._grad = records is not None and any(tensor.requires_grad for tensor in every)
        # bytes of an element, and from the first to the end of the last
        self._widths = [tensor.itemsize for tensor in every]
        self._extents = [*map(tensors.extent, every)]
        # the bytes of each tensor's storage, then its offset there, as they were last found right
        self._storage_layout: tuple[int, ...] = ()

    def __call__(self, every: Sequence[Tensor], backward: bool = False) -> bool:
        """Whether these tensors pass the guard.

        Call `can_guard` first: the compiled guard ends the process for tensors without strides.

        Args:
            backward: whatever the call records; else it must record a gradient as that did.
        """
        if self._grad and not backward and _grad_enabled() != self._records:
            return False
        if len(every) != self._count:
            return False
        once = every
        if self._twins:
            if any(every[one] is not every[other] for one, other in self._twins):
                return False
            once = [every[index] for index in self._once]
        if not self._check(*once):
            return False
        layout = (*map(len, map(_storage, every)), *map(_offset, every))
        return layout == self._storage_layout or self._storages_suffice(layout)

    def _storages_suffice(self, layout: tuple[int, ...]) -> bool:
        """Whether storages have all elements: they may shrink, and no guard sees it."""
        ends = map(add, self._extents, map(mul, layout[self._count :], self._widths))
        if not all(map(ge, layout, ends)):
            return False
        self._storage_layout = layout
        return True
