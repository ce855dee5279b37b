"""The tensors of a call beside each other: dtypes, devices, shapes and memory, looked at once."""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import add, ge, mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrnn.errors import counted
from openrnn.guards import TYPES, Sizes, guard, nested
from openrnn.params import check as check_shapes
from openrnn.params import module_slots
from openrnn.spec import Spec
from openrnn.tensors import Group, check_own_memory, has_storage, held, is_plain, mixed, settle

_tracing: Any = torch._C._get_tracing_state  # of torch.jit, else None
# for `map`: a loop over tensors costs the host a microsecond
_storage, _offset, _address = Tensor.untyped_storage, Tensor.storage_offset, Tensor.data_ptr
_bytes: Any = torch.UntypedStorage.nbytes


def names_of(spec: Spec, params: int, states: int, resets: int) -> list[str]:
    """What x and so many parameters, states and reset states are called in messages."""
    slots = module_slots(spec)
    weights = [slots[k].name if k < len(slots) else f"params[{k}]" for k in range(params)]
    words = [*spec.states, *(f"state {k}" for k in range(states + resets))]
    initial = [f"{word}_0" for word in words[:states]]
    return ["x", *weights, *initial, *(f"reset_state {word}" for word in words[:resets])]


class _ArgumentGuard(NamedTuple):
    """One test of all tensors of a call in place of seven of each, made of some that passed."""

    check: Callable[..., bool]  # keys, type, dtype, device, requires_grad; sizes but for T and B
    grad: bool  # any requires one


class _Known(NamedTuple):
    """What is known of calls of one network."""

    sizes: tuple[int, ...]  # of the parameters, in bytes
    fits: tuple[_ArgumentGuard, ...]


FITS = 8  # kept of each: x and others with gradients or not, autocast and inference mode or not
_seen: dict[tuple[Any, ...], _Known] = {}


def _fit(key: tuple[Any, ...], x: Tensor, params: Group, others: Group) -> _ArgumentGuard | None:
    """What says that no tensor of a call needs another look.

    Args:
        others: states and reset states, no tensor twice.
    """
    known = _seen.get(key)
    if known is None or len(params) != len(known.sizes):
        return None
    tensors = (x, *params, *others)
    try:
        # first of all because the guards end the process where a tensor has no strides
        if not TYPES.issuperset(map(type, tensors)) or any(map(nested, tensors)):
            return None
        # asked of every call: a storage that shrinks leaves no trace, and may stay where it was
        if not has_storage(x) or not _hold(params, known.sizes, x.itemsize):
            return None
        if others and not all(map(has_storage, others)):
            return None
    except RuntimeError:  # one has no storage
        return None
    for fit in known.fits:
        if fit.check(*tensors):
            return fit
    return None


def _hold(params: Group, sizes: tuple[int, ...], width: int) -> bool:
    """Whether storages reach to the end of dense tensors of so many bytes, `width` a value."""
    ends = map(add, sizes, map(mul, map(_offset, params), repeat(width)))
    return all(map(ge, map(_bytes, map(_storage, params)), ends)) and all(map(_address, params))


def _remember_guard(key: tuple[Any, ...], x: Tensor, params: Group, others: Group) -> None:
    """Remembers what tensors are that were found to be right."""
    every = (x, *params, *others)
    if any(type(tensor) not in TYPES for tensor in every) or not all(
        tensor.is_contiguous() for tensor in params
    ):
        return
    sizes: Sizes = [[*tensor.shape] for tensor in every]
    steps: Sizes = [[*tensor.stride()] for tensor in every]
    sizes[0][:-1] = [None] * (x.dim() - 1)
    steps[0] = [None] * x.dim()
    for index in range(1 + len(params), len(every)):
        sizes[index][1], steps[index] = None, [None] * 3
    grad = any(tensor.requires_grad for tensor in every)
    if len(_seen) >= 4096:
        _seen.clear()
    before = _seen[key].fits if key in _seen else ()
    extents = tuple(tensor.nbytes for tensor in params)
    _seen[key] = _Known(
        extents, (_ArgumentGuard(guard(every, sizes, steps), grad), *before[: FITS - 1])
    )


def check_inputs(
    spec: Spec, x: Tensor, params: Group, states: Group, resets: Group, rows: int | None = None
) -> tuple[Tensor, Group, Group, Group, bool, str]:
    """The tensors of a call settled; whether any requires a gradient; why not to take addresses.

    The groups come back as they are, the same objects, only where nothing needed a longer look.

    Args:
        rows: B of a packed x (N, I).

    Raises:
        TypeError: one is no tensor.
        ValueError: one is not dense, or dtypes, devices, shapes and memory do not fit.
    """
    key: tuple[Any, ...] = ()
    others: Group = ()
    if isinstance(x, Tensor) and _tracing() is None:
        if states or resets:
            others = (*states, *resets)
            if len(others) > 1 and others[0] is others[1]:  # zeros, say
                others = others[1:]
        key = spec.text, x.dtype, len(states), len(resets), len(others), rows is None
        fit = _fit(key, x, params, others)
        if fit is not None:
            batch = x.shape[1] if rows is None else rows
            if all(state.shape[1] == batch for state in others):
                return x, params, states, resets, fit.grad, ""
    return _check_each(key, others, spec, x, params, states, resets, rows)


def _check_each(
    key: tuple[Any, ...],
    others: Group,
    spec: Spec,
    x: Tensor,
    params: Group,
    states: Group,
    resets: Group,
    rows: int | None,
) -> tuple[Tensor, Group, Group, Group, bool, str]:
    """The long way of `check_inputs`, tensor by tensor; no sizes are compared while jit traces."""
    names = names_of(spec, len(params), len(states), len(resets))
    (x, *rest), why = settle(names, (x, *params, *states, *resets))
    why = why or mixed(names, (x, *rest))
    a, b = len(params), len(params) + len(states)
    params, states, resets = rest[:a], rest[a:b], rest[b:]
    if not key:
        return x, params, states, resets, check_same_dtype_and_device(x, rest), why
    shape = x.shape
    if len(shape) != (3 if rows is None else 2) or shape[-1] != spec.input_size:
        lead = "T, B" if rows is None else "N"
        raise ValueError(f"x must have shape ({lead}, {spec.input_size}), got {tuple(shape)}")
    check_shapes(spec, params)
    check_states(spec, shape[1] if rows is None else rows, states, resets)
    grad = check_same_dtype_and_device(x, rest)
    for name, tensor in zip(names, (x, *rest)):
        if is_plain(tensor):  # others say themselves what they have; torch reads past the end, too
            held(name, tensor)
    if is_plain(x, *rest):
        # settled tensors are right, those that came instead of them may not be
        single = len({id(tensor) for tensor in (x, *params, *others)}) == 1 + a + len(others)
        if single and is_plain(*others):
            _remember_guard(key, x, params, others)
    return x, params, states, resets, grad, why


def check_operator_inputs(spec: Spec, given: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of an operator, settled, where they do not come from `functional`.

    The dispatcher brings them, or the autograd engine, which kept them: meanwhile they may have
    changed.

    Raises:
        ValueError: the address of one must not be taken.
    """
    x, states, params, lengths, reset, resets, seed = given
    rows = lengths.numel() if lengths is not None and x.dim() == 2 else None
    x, weights, states, resets, _, why = check_inputs(spec, x, params, states, resets, rows)
    if why or (weights is not params and not is_plain(x, *weights, *states, *resets)):
        raise ValueError(why or "tensors of a call must have memory of their own")
    if lengths is not None or reset is not None or seed is not None:
        lengths = check_own_memory("lengths", lengths)
        reset = check_own_memory("reset", reset)
        seed = check_own_memory("seed", seed)
    return x, states, weights, lengths, reset, resets, seed


def check_same_dtype_and_device(x: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether any requires a gradient; ValueError unless all have one dtype and device."""
    dtype, device, grad = x.dtype, x.device, x.requires_grad
    for tensor in others:
        if tensor.dtype is not dtype:  # there is one object of each
            raise ValueError(
                f"x, states and parameters must have one dtype, got {dtype} and {tensor.dtype}"
            )
        if tensor.device != device:
            raise ValueError(
                f"x, states and parameters must be on one device, got {device} and {tensor.device}"
            )
        grad = grad or tensor.requires_grad
    return grad


def check_states(spec: Spec, batch: int | None, states: Group, resets: Group) -> None:
    """Raises ValueError unless there is a tensor of its shape for each state, or none.

    A batch of None is not compared: a graph must not depend on it.
    """
    for group in (states, resets):
        if group and len(group) != len(spec.states):
            raise ValueError(
                f"needs {counted(len(spec.states), 'state')} ({', '.join(spec.states)}), "
                f"got {len(group)}"
            )
        for state, width in zip(group, spec.state_sizes):
            wanted = spec.chains, state.shape[1] if batch is None else batch, width
            if state.shape != wanted:
                raise ValueError(f"a state must have shape {wanted}, got {tuple(state.shape)}")
