"""Calls that repeat: where a call is like an earlier one, only its memory is looked at again.

At T = 1 the checks and choices of a call cost more than its step. So a module remembers calls, from
the second of a kind on.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from openrnn import functional, philox, prepared_calls, tensors
from openrnn.backends.base import ModuleCache, PreparedCall
from openrnn.nn import autocast
from openrnn.nn.apply_warning import WarnsOnApply
from openrnn.nn.autograd_call import AutogradCall
from openrnn.nn.call_guard import CallGuard, can_guard, has_unguarded_mode, is_unobserved
from openrnn.profiled import is_profiled, named

KEYS = 256  # that a module remembers
CALLS = 4  # of each key: recorded or not, in inference mode or not, of other strides

Key = tuple[Hashable, ...]
Copied = TypeVar("Copied", bound="CachingModule")
Stored = tuple[dict[str, Any], list[str]]


class Masks(NamedTuple):
    """What masks a call, as kernels read it: lengths (B,) int64, resets (T, B) bool, contiguous."""

    lengths: Tensor | None = None
    reset: Tensor | None = None

    @property
    def given(self) -> list[Tensor]:
        """Those that there are."""
        return [mask for mask in self if mask is not None]


NO_MASKS = Masks()


class _CachedCall(NamedTuple):
    """A call that is kept.

    Attributes:
        guard: whether tensors are like its own.
        run: makes it again; None where its backend cannot.
        drops: it draws dropout masks, and takes their seed last.
    """

    guard: CallGuard
    run: PreparedCall | None
    drops: bool


class Module(Protocol):
    """A layer or a one-step module.

    Attributes:
        _settings: gives those attributes of the module that its calls follow.
    """

    _settings: ClassVar[Any]

    def _reads(self) -> Stored:
        """The tensors that a call reads beside x and states, by name, and these names in order."""


class CallCache:
    """The calls that a module remembers."""

    def __init__(self) -> None:
        self._calls: dict[Key, tuple[_CachedCall, ...]] = {}  # of each key the latest first
        self._params_of: Callable[[dict[str, Any]], Sequence[Tensor]] = _nothing_of
        self.module_cache: ModuleCache = {}

    def run(
        self, module: Module, kind: str, x: Any, hx: Any, masks: Masks = NO_MASKS,
        params: Sequence[Tensor] | None = None,
    ) -> list[Tensor] | None:  # fmt: skip
        """y and the final states of a call like an earlier one; None if it is not known to be one.

        Args:
            kind: which method of the module is called, with nothing but what follows.
            hx: the states: None, a tensor, or a tuple of them.
            params: what the call reads in place of the parameters of the module.
        """
        known = self._calls
        if not known or has_unguarded_mode():
            return None
        if params is None:
            try:
                params = self._params_of(module._reads()[0])
            except KeyError:  # a parametrized one is computed anew at each call
                return None
        every = _every(x, params, hx, masks)
        if not can_guard(every):
            return None
        for guard, run, drops in known.get(_key(module, kind, x, type(hx), masks), ()):
            # a little cheaper in CPython than calls of the objects
            if run is None or not guard.__call__(every):
                continue
            given = every
            if drops:
                if not run.ready(every):  # a seed that nothing uses would change those that follow
                    continue
                given = (*every, philox.draw(x.device))
            if is_profiled():  # asked here, too: `named` costs each call a frame
                made = named("openrnn::forward", run.__call__, given)
            else:
                made = run.__call__(given)
            if made is not None:
                return made
        return None

    def remember(
        self,
        module: Module,
        kind: str,
        given: tuple[Tensor, Any, Masks],
        call: prepared_calls.RecurrentCall,
        results: Sequence[Tensor],
        batch_first: bool = False,
    ) -> None:
        """Remembers a call that came to a good end.

        Only from the second of a kind on, as sizes that come once are not worth it, and only one
        that no mode but autocast watched or changed.

        Args:
            given: x and hx as the module got them, and masks; call: as `functional` got it.
            results: y, time-major, and the final states as the module returns them.
            batch_first: x is (B, T, I).
        """
        x, hx, masks = given
        dtype = autocast.wanted(x.device)
        if not is_unobserved(x, dtype is not None):
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # memory of a dry run would stay in the pool of the graph
        key = _key(module, kind, x, type(hx), masks)
        before = self._calls.get(key)
        if before is None:
            self._params_of = _getter(module._reads()[1])
            if len(self._calls) >= KEYS:
                self._calls.clear()
            self._calls[key] = ()
            return
        every = _every(x, call.params, hx, masks)
        if len(before) >= CALLS or not can_guard(every) or not tensors.is_plain(*every):
            return
        if not any(one.run is None and one.guard(every) for one in before):
            prepare = self._prepare if dtype is None else partial(self._prepare_cast, dtype)
            self._calls[key] = (prepare(every, call, results, batch_first), *before)

    def _prepare_cast(
        self, dtype: torch.dtype, every: Sequence[Tensor], call: prepared_calls.RecurrentCall,
        results: Sequence[Tensor], batch_first: bool,
    ) -> _CachedCall:  # fmt: skip
        """A call to be made again whose tensors autocast casts."""
        guard = CallGuard(every, _records(results))
        if not tensors.is_ordered(call.x):  # the layout of a cast is not known
            return _CachedCall(guard, None, False)
        x, params, states = autocast.applied(call.x, call.params, list(call.states))
        call = call._replace(x=x, params=params, states=states)
        with torch.autocast(x.device.type, enabled=False):
            cast = self._prepare(autocast.cast(every, dtype), call, results, batch_first)
        run = None if cast.run is None else AutocastCall(cast, dtype)
        return cast._replace(guard=guard, run=run)

    def _prepare(
        self, every: Sequence[Tensor], call: prepared_calls.RecurrentCall,
        results: Sequence[Tensor], batch_first: bool,
    ) -> _CachedCall:  # fmt: skip
        """A call to be made again."""
        records, shapes = _records(results), [tuple(result.shape) for result in results]
        guard, drops = CallGuard(every, records), call.spec.drops(call.training)
        if not records:
            run = prepared_calls.prepare(call, shapes, self.module_cache)
            return _CachedCall(guard, run, drops)
        x, first = call.x if batch_first else every[0], 1 + len(call.params)
        states = every[first : first + len(call.states)]
        given = [tuple(each.shape) for each in (x, *states)]
        found = prepared_calls.prepare_grad(call, shapes, given)
        again = None if found is None else AutogradCall(guard, call, batch_first, *found)
        return _CachedCall(guard, again, drops)


def _nothing_of(own: dict[str, Any]) -> Sequence[Tensor]:
    return ()


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], Sequence[Tensor]]:
    """What takes the tensors of these names from a dictionary, in a third of a loop's time."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda own: [own[name] for name in names]  # itemgetter would return no sequence


def _records(results: Sequence[Tensor]) -> bool:
    """Whether a call recorded a gradient."""
    return results[0].requires_grad


def of_step(reset: Tensor | None) -> Masks:
    """The masks of a step, resets (B,)."""
    return NO_MASKS if reset is None else Masks(reset=reset)


def is_kernel_mask(reset: Any, x: Any) -> bool:
    """Whether kernels read resets as they are, so that a call with them may be remembered."""
    return (
        type(reset) is Tensor and reset.dtype is torch.bool and reset.is_contiguous()
        and type(x) is Tensor and reset.device == x.device
    )  # fmt: skip


def kernel_masks(x: Any, lengths: Any, reset: Any, batch_first: bool) -> Masks | None:
    """Masks of a call as kernels read them; None where they are not, so that none is remembered.

    Lengths are taken on a GPU alone: there a kernel sorts them. On a CPU torch does, and no
    prepared call contains that.

    Raises:
        ValueError: lengths do not go with x, or resets have no (B, T) or no memory.
    """
    if lengths is None and reset is None:
        return NO_MASKS
    if type(x) is not Tensor or has_unguarded_mode() or not can_guard((x,)) or x.dim() != 3:
        return None
    if reset is not None:
        if batch_first and type(reset) is Tensor and reset.dtype is torch.bool:
            reset = functional.transposed_mask(reset).contiguous()
        if not is_kernel_mask(reset, x):
            return None
    if lengths is not None:
        if not x.is_cuda or type(lengths) is not Tensor:
            return None
        lengths = functional.check_lengths(lengths, x.transpose(0, 1) if batch_first else x)
    return Masks(lengths, reset)


class AutocastCall:
    """Makes a call again that autocast changes: a `PreparedCall` of tensors as the caller has them.

    Args:
        cached: the call of cast tensors, without autocast; dtype: which they are cast to.
    """

    def __init__(self, cached: _CachedCall, dtype: torch.dtype) -> None:
        if cached.run is None:
            raise ValueError("a call that cannot be made again")
        self._guard, self._run, self._dtype = cached.guard, cached.run, dtype
        self._drops = cached.drops

    def ready(self, every: Sequence[Tensor]) -> bool:
        """Whether they have memory."""
        return self._run.ready(every)

    def __call__(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """Y and the final states, in autocast's dtype; autograd records the casts as any others."""
        cast = autocast.cast(every, self._dtype)
        if not torch.is_grad_enabled():  # no backward pass looks at the casts
            return self._run(cast)
        seen = cast[:-1] if self._drops else cast  # the seed is new at each call
        with torch.autocast(cast[0].device.type, enabled=False):
            return self._run(cast) if self._guard(seen) else None


def _key(module: Module, kind: str, x: Tensor, hx: type, masks: Masks) -> Key:
    """What a call is beyond its tensors; of x the sizes, by which calls differ most."""
    casts = autocast.wanted(x.device) if torch._C._is_any_autocast_enabled() else None
    settings = module._settings(module)
    return kind, x.shape, hx, masks.lengths is None, masks.reset is None, casts, settings


def _every(x: Any, params: Sequence[Any], hx: Any, masks: Masks) -> tuple[Any, ...]:
    """The tensors of a call in the order in which they are looked at."""
    states = () if hx is None else hx if type(hx) is tuple else (hx,)
    return (x, *params, *states) if masks is NO_MASKS else (x, *params, *states, *masks.given)


class CachingModule(WarnsOnApply):
    """A module that remembers calls; they are no part of its state, nor of its copies."""

    _settings: ClassVar[Any]
    _names: list[str]  # of its parameters

    def __init__(self) -> None:
        super().__init__()
        self._call_cache = CallCache()

    def _reads(self) -> Stored:
        """The tensors that a call reads beside x and states, by name, and these names in order."""
        return self._parameters, self._names

    def _cast(
        self: Any, call: prepared_calls.RecurrentCall, masks: Masks, remember: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y and the final states of a call whose tensors autocast has cast.

        Args:
            remember: as one without autocast, as its backward pass has none; not where the call is
                remembered with its casts, since two prepared calls take twice the time and memory.
        """
        x, hx = call.x, tuple(call.states) or None
        if remember:
            with torch.autocast(x.device.type, enabled=False):
                found = self._call_cache.run(self, "cast", x, hx, masks, call.params)
            if found is not None:
                return found[0], tuple(found[1:])
        y, finals, _ = functional.recurrent(
            call.spec, x, call.params, call.states or None, lengths=masks.lengths,
            reset=masks.reset, training=call.training, backend=call.backend,
        )  # fmt: skip
        if remember:
            with torch.autocast(x.device.type, enabled=False):
                self._call_cache.remember(self, "cast", (x, hx, masks), call, (y, *finals))
        return y, finals

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_call_cache"}

    def __deepcopy__(self: Copied, memo: dict[int, Any]) -> Copied:
        made: Copied = self.__new__(type(self))
        memo[id(self)] = made
        # not the class's own: a parametrized module refuses to give its state
        made.__setstate__(copy.deepcopy(CachingModule.__getstate__(self), memo))
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self._call_cache = CallCache()
