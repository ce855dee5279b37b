"""Calls that repeat: where a call is like an earlier one, only its memory is looked at again.

At T = 1 the checks and choices of a call cost more than its step. So a module remembers calls that
record no gradient, from the second of a kind on. One compiled guard then stands for all checks of
the tensors: their types, dtypes, devices, sizes, strides and dispatch keys, and with these also
autocast, inference mode, the transforms of `torch.func` and dispatch modes. What it does not see
is asked here, or part of the key.
"""

from collections.abc import Callable, Sequence
from operator import add, ge, mul
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from openrnn import functional, op, request, tensors
from openrnn.backends.base import Repeat

KEYS = 256  # that a module remembers
CALLS = 4  # of each key: with states or without, in inference mode or not

_offset, _storage = Tensor.storage_offset, Tensor.untyped_storage
_bytes: Any = torch.UntypedStorage.nbytes
_nested: Any = Tensor.is_nested.__get__  # type: ignore[attr-defined]  # a property
_TYPES = frozenset((Tensor, nn.Parameter))
_tracing: Any = torch._C._get_tracing_state
_is_any_autocast_enabled: Any = torch._C._is_any_autocast_enabled
_forward_mode = torch.autograd.forward_ad


Key = tuple[str, tuple[int, ...], str, bool, float]


class Module(Protocol):
    """A layer or a one-step module."""

    _names: list[str]  # of its parameters
    _parameters: dict[str, Any]
    backend: str
    training: bool
    dropout: float


class _Known:
    """A call that was made before.

    Args:
        every: its tensors: x, parameters, states.
        run: makes it again, with others.
    """

    def __init__(self, every: Sequence[Tensor], run: Repeat) -> None:
        self.count, self.run = len(every), run
        self.grad = any(tensor.requires_grad for tensor in every)
        self.check = _guard(every)
        # bytes of an element, and from the first to the end of the last
        self._widths = [tensor.itemsize for tensor in every]
        self._extents = [*map(tensors.extent, every)]
        self._held: tuple[int, ...] = ()  # sizes of storages and offsets in them, last seen

    def holds(self, every: Sequence[Tensor]) -> bool:
        """Whether storages have all elements: they may shrink, and no guard sees it."""
        held = (*map(_bytes, map(_storage, every)), *map(_offset, every))
        if held == self._held:
            return True
        ends = map(add, self._extents, map(mul, held[self.count :], self._widths))
        if not all(map(ge, held, ends)):
            return False
        self._held = held
        return True


class Repeats:
    """The calls that a module remembers. It is no part of the module's state, nor of its copies."""

    def __init__(self) -> None:
        # of each key the latest first; None where the backend that runs it cannot repeat it
        self._known: dict[Key, tuple[_Known, ...] | None] = {}

    def run(self, module: Module, kind: str, x: Any, hx: Any) -> list[Tensor] | None:
        """y and the final states of a call like an earlier one; None if it is not known to be one.

        Args:
            kind: which method of the module is called, with nothing but these two.
            hx: the states: None, a tensor, or a tuple of them.
        """
        known = self._known
        if not known or _tracing() is not None or _forward_mode._current_level >= 0:
            return None
        own: Any = module._parameters
        try:
            every = _every(x, [own[name] for name in module._names], hx)
        except KeyError:  # a parametrized one is computed anew at each call
            return None
        # the guard ends the process where a tensor has no strides
        if not _TYPES.issuperset(map(type, every)) or any(map(_nested, every)):
            return None
        for call in known.get(_key(module, kind, x)) or ():
            if call.count == len(every) and call.check(*every):
                if (call.grad and torch.is_grad_enabled()) or not call.holds(every):
                    return None
                made = call.run(every)
                if made is not None:
                    return made
        return None

    def remember(
        self,
        module: Module,
        kind: str,
        given: tuple[Tensor, Any],
        call: functional.Plain,
        results: Sequence[Tensor],
    ) -> None:
        """Remembers a call that came to a good end.

        Only from the second of a kind on, as sizes that come once are not worth it, and only one
        that recorded no gradient and that no mode watched or changed.

        Args:
            given: x and hx as the module got them; call: the same as `functional` got it.
            results: y, time-major, and the final states as the module returns them.
        """
        x, hx = given
        # training comes here at each call, so this is asked first
        if results[0].requires_grad or _is_any_autocast_enabled() or op.watched(x):
            return
        key = _key(module, kind, x)
        if key not in self._known:
            if len(self._known) >= KEYS:
                self._known.clear()
            self._known[key] = ()
            return
        before = self._known[key]
        every = _every(x, call.params, hx)
        if before is None or len(before) >= CALLS or not _TYPES.issuperset(map(type, every)):
            return
        if tensors.plain(*every) and not request.transformed():
            run = functional.repeat(call, [tuple(result.shape) for result in results])
            self._known[key] = None if run is None else (_Known(every, run), *before)


def _key(module: Module, kind: str, x: Tensor) -> Key:
    """What a call is beyond its tensors; of x the sizes, by which calls differ most."""
    return kind, x.shape, module.backend, module.training, module.dropout


def _every(x: Any, params: Sequence[Any], hx: Any) -> tuple[Any, ...]:
    """The tensors of a call in the order in which they are looked at."""
    states = () if hx is None else hx if type(hx) is tuple else (hx,)
    return (x, *params, *states)


def _guard(every: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors are like these in everything but address and offset."""
    sizes: Any = [[*tensor.shape] for tensor in every]
    strides: Any = [[*tensor.stride()] for tensor in every]
    guards: Any = torch._C._dynamo.guards  # compiled: part of torch._C, not of torch._dynamo
    made = guards.TensorGuards(*every, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = made.check
    return check
