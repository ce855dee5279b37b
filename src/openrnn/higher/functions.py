"""A loop and its backward pass as functions that autograd differentiates once more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openrnn import problem_key
from openrnn import tensors as checks
from openrnn.backends.base import Call, Cotangents, Needs, Outputs
from openrnn.dispatch import BACKENDS
from openrnn.higher.loop import Direction
from openrnn.higher.second import second
from openrnn.reference import differentiate
from openrnn.untraced import untraced

Pass = Callable[[], Sequence[Tensor | None]]  # a backward pass: what `Needs.flat` says, in order


class Backward(torch.autograd.Function):
    """The backward pass of a loop, as a function of its inputs and of what reaches its results."""

    @staticmethod
    def forward(
        ctx: Any, backend: str, call: Call, grads: Cotangents, needs: Needs, run: Pass,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        # without the tensors, which may be changed by hooks of saved ones
        ctx.how = backend, _emptied(call), needs
        ctx.counts = len(grads.finals), len(grads.all_states)
        found = [grad for grad in run() if grad is not None]
        # a view of what the pass made could not be changed in place
        return tuple(grad if grad._base is None else grad.clone() for grad in found)

    @staticmethod
    @untraced  # autograd may call it from compiled code
    def backward(ctx: Any, *reached: Tensor | None) -> tuple[Any, ...]:
        name, empty, needs = ctx.how
        inputs, grads = _sorted(empty, ctx.counts, ctx.saved_tensors)
        flags = ctx.needs_input_grad[5:]
        if all(each is None for each in reached):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled() or not untouched(*ctx.saved_tensors, *reached):
            return (None,) * 5 + _by_reference(inputs, grads, needs, reached, flags)
        rest = iter(reached)
        filled = [next(rest) if need else None for need in needs.flat]
        along = direction_of(inputs, filled)
        count = len(needs.flat)
        wanted = needs_of(inputs, flags[:count])
        of_inputs, of_grads = second(BACKENDS[name], inputs, grads, along, wanted)
        back = [of_grads.y, *of_grads.finals, *of_grads.all_states]
        back = [one if flag else None for one, flag in zip(back, flags[count:])]
        return (None,) * 5 + (*of_inputs.flat, *back)


class Loop(torch.autograd.Function):
    """One layer and direction, by the kernels of a backend: y, final states, all states."""

    @staticmethod
    def forward(ctx: Any, backend: str, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        inside, _ = _sorted(_emptied(call), (0, 0), tensors)
        out = BACKENDS[backend].forward(inside)
        ctx.how, ctx.kept = (backend, _emptied(call)), len(out.reserve)
        ctx.save_for_backward(*tensors, out.y, *out.reserve)
        ctx.counts = len(out.finals), len(out.all_states)
        return (out.y, *out.finals, *out.all_states)

    @staticmethod
    @untraced  # autograd may call it from compiled code
    def backward(ctx: Any, *reached: Tensor | None) -> tuple[Any, ...]:
        (backend, empty), saved = ctx.how, ctx.saved_tensors
        tensors, rest = saved[: -1 - ctx.kept], saved[-1 - ctx.kept :]
        call, _ = _sorted(empty, (0, 0), tensors)
        finals = ctx.counts[0]
        grads = Cotangents(reached[0], [*reached[1 : 1 + finals]], [*reached[1 + finals :]])
        needs = needs_of(call, ctx.needs_input_grad[2:])
        if not untouched(*saved, *reached):
            found = differentiate(call, grads, needs, torch.is_grad_enabled())
            return (None, None, *found)
        y, reserve = rest[0], [*rest[1:]]

        def run() -> Sequence[Tensor | None]:
            return BACKENDS[backend].backward(call, y, reserve, grads, needs).flat

        return (None, None, *backward(backend, call, grads, needs, run))


_apply_loop: Any = Loop.apply
_apply_backward: Any = Backward.apply


def backward(
    backend: str, call: Call, grads: Cotangents, needs: Needs, run: Pass
) -> Sequence[Tensor | None]:
    """A loop's backward pass, differentiable where gradients are recorded.

    Args:
        run: the pass itself.
    """
    if not torch.is_grad_enabled():
        return run()
    tensors = [*_inputs(call), grads.y, *grads.finals, *grads.all_states]
    found = iter(_apply_backward(backend, call, grads, needs, run, *tensors))
    return [next(found) if need else None for need in needs.flat]


def loop(backend: str, call: Call) -> Outputs:
    """A loop that can be differentiated twice, and by the reference as often as anybody likes."""
    found = _apply_loop(backend, call, *_inputs(call))
    count = len(call.problem.spec.states)
    return Outputs(found[0], [*found[1 : 1 + count]], [*found[1 + count :]], [])


def untouched(*tensors: Tensor | None) -> bool:
    """Whether kernels may read these tensors, and nothing watches."""
    if torch._C._len_torch_dispatch_stack() or problem_key.transformed():
        return False
    return checks.is_plain(*(tensor for tensor in tensors if tensor is not None))


def _inputs(call: Call) -> list[Tensor]:
    return [call.x, *call.states, *call.params, *call.reset_states]


def _emptied(call: Call) -> Call:
    """The call with as many tensors, none of which autograd knows."""
    none = call.x.new_empty(0)
    return replace(
        call, x=none, states=[none] * len(call.states), params=[none] * len(call.params),
        reset_states=[none] * len(call.reset_states),
    )  # fmt: skip


def _sorted(call: Call, counts: tuple[int, int], tensors: Sequence[Any]) -> tuple[Call, Cotangents]:
    """The call of these tensors, in the order of `_inputs`, and what follows as gradients."""
    rest = iter(tensors)

    def take(count: int) -> list[Any]:
        return [next(rest) for _ in range(count)]

    x, states, params = next(rest), take(len(call.states)), take(len(call.params))
    made = replace(
        call, x=x, states=states, params=params, reset_states=take(len(call.reset_states))
    )
    return made, Cotangents(next(rest, None), take(counts[0]), take(counts[1]))


def _groups(call: Call, flat: Sequence[Any]) -> tuple[Any, ...]:
    """What belongs to x, states, parameters and reset states."""
    a = 1 + len(call.states)
    b = a + len(call.params)
    return flat[0], flat[1:a], flat[a:b], flat[b:]


def needs_of(call: Call, flags: Sequence[bool]) -> Needs:
    """Flags in the order of `Needs.flat`, sorted."""
    x, *groups = _groups(call, flags)
    return Needs(x, *map(tuple, groups))


def direction_of(call: Call, flat: Sequence[Tensor | None]) -> Direction:
    """Tensors in the order of `Needs.flat`, sorted."""
    x, *groups = _groups(call, flat)
    return Direction(x, *map(list, groups))


def _by_reference(
    call: Call, grads: Cotangents, needs: Needs, reached: Sequence[Tensor | None],
    flags: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What `Backward.backward` returns, in operators that can be differentiated again."""
    again, counts = torch.is_grad_enabled(), (len(grads.finals), len(grads.all_states))
    with torch.enable_grad():
        # other names, as one may be made of another, whose own gradient that is not
        inputs = [
            None if tensor is None else tensor.view_as(tensor)
            for tensor in (*_inputs(call), grads.y, *grads.finals, *grads.all_states)
        ]
        call, grads = _sorted(call, counts, inputs)
        made = [grad for grad in differentiate(call, grads, needs, True) if grad is not None]
    pairs = [
        (grad, one) for grad, one in zip(made, reached) if one is not None and grad.requires_grad
    ]
    wanted = [tensor for tensor, flag in zip(inputs, flags) if flag and tensor is not None]
    found: Iterator[Tensor | None] = iter([None] * len(wanted))
    if pairs and wanted:
        values, ones = zip(*pairs)
        found = iter(
            torch.autograd.grad(values, wanted, ones, create_graph=again, allow_unused=True)
        )
    return tuple(
        next(found) if flag and tensor is not None else None for tensor, flag in zip(inputs, flags)
    )
