"""Which transforms of torch.func and dual levels are active, and what of them tensors belong to."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from openrnn.tensors import is_plain

_functorch: Any = torch._C._functorch
_KIND: Any = _functorch.TransformType


class Active(NamedTuple):
    """How many levels of each kind are active.

    Args:
        maps: of `vmap`.
        reverse: that differentiate backward, as `grad`, `vjp` and `jacrev` do.
        forward: that differentiate forward, as `jvp` and `jacfwd` do, and a dual level of torch.
        others: such as `functionalize`.
    """

    maps: int
    reverse: int
    forward: int
    others: int


def active() -> Active:
    """The levels now."""
    kinds = [level.key() for level in _functorch.get_interpreter_stack() or ()]
    maps, reverse, jvps = (kinds.count(kind) for kind in (_KIND.Vmap, _KIND.Grad, _KIND.Jvp))
    # a jvp of torch.func enters torch's dual level, too
    duals = max(jvps, 1 + forward_ad._current_level)
    return Active(maps, reverse, duals, len(kinds) - maps - reverse - jvps)


def transformed() -> bool:
    """Whether a level of torch.func is active: its own rules come before those of autograd."""
    return _functorch.peek_interpreter_stack() is not None


def layers(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor and what it wraps, down to the one that no transform made."""
    while True:
        yield tensor
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return
        tensor = _functorch.get_unwrapped(tensor)


class Wrapped(NamedTuple):
    """What the levels make of some tensors.

    Args:
        plain: below all wrappers each is a tensor with memory of its own.
        grad: autograd or a level records gradients of one, or of its tangent.
        batched: the levels of `vmap` that map one, and how many members each has.
        tracked: the levels that differentiate one backward.
    """

    plain: bool
    grad: bool
    batched: dict[int, int]
    tracked: frozenset[int]


def _moved(tensor: Tensor) -> bool:
    """Whether gradients of a tensor's tangent are recorded.

    `unpack_dual` has no rule for `vmap`, so a mapped tensor is looked at below its wrapper.
    """
    if _functorch.is_batchedtensor(tensor):
        return False
    tangent = forward_ad.unpack_dual(tensor).tangent
    return tangent is not None and any(inner.requires_grad for inner in layers(tangent))


def seen(tensors: Iterable[Tensor | None]) -> Wrapped:
    """What the levels make of these."""
    every, grad, batched, tracked = True, False, dict[int, int](), set[int]()
    for given in tensors:
        if given is None:
            continue
        inner = given
        for inner in layers(given):
            grad = grad or inner.requires_grad or _moved(inner)
            if _functorch.is_batchedtensor(inner):
                size = _functorch.get_unwrapped(inner).shape[_functorch.maybe_get_bdim(inner)]
                batched[_functorch.maybe_get_level(inner)] = size
            elif _functorch.is_gradtrackingtensor(inner):
                tracked.add(_functorch.maybe_get_level(inner))
        every = every and is_plain(inner)
    return Wrapped(every, grad, batched, frozenset(tracked))
