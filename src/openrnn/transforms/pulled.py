"""Gradients by the reference in a form that anything may differentiate or map in turn."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from openrnn import reference
from openrnn.backends.base import Call, Needs
from openrnn.transforms.folding import Group


def by_reference(call: Call, grads: Group, needs: Needs) -> list[Tensor | None]:
    """The gradients of a call that are wanted, in the order of `Needs.flat`."""
    every = [call.x, *call.states, *call.params, *call.reset_states]
    flags = needs.flat

    def outputs(*wanted: Tensor) -> list[Tensor]:
        again = _call_of(call, _filled(every, flags, wanted))
        out = reference.run(again)
        results = [out.y, *out.finals, *out.all_states]
        return [value for value, grad in zip(results, grads) if grad is not None]

    _, pull, *_ = torch.func.vjp(outputs, *_chosen(every, flags))
    return _spread(pull([grad for grad in grads if grad is not None]), flags)


def by_reference_again(
    call: Call, grads: Group, needs: Needs, reached: Group, flags: Sequence[bool]
) -> list[Tensor | None]:
    """What reaches the inputs of a call and `grads`, from what reaches its gradients.

    Args:
        reached: in the order of `Needs.flat`.
        flags: which are wanted of the inputs, as `Needs.flat`, and of `grads`.
    """
    every = [call.x, *call.states, *call.params, *call.reset_states, *grads]
    flags = [flag and tensor is not None for flag, tensor in zip(flags, every)]
    count = len(needs.flat)

    def gradients(*wanted: Tensor) -> list[Tensor]:
        filled = _filled(every, flags, wanted)
        found = by_reference(_call_of(call, filled[:count]), filled[count:], needs)
        pairs = zip(found, reached)
        return [grad for grad, one in pairs if grad is not None and one is not None]

    _, pull, *_ = torch.func.vjp(gradients, *_chosen(every, flags))
    return _spread(pull([one for one in reached if one is not None]), flags)


def _chosen(every: Group, flags: Sequence[bool]) -> list[Tensor]:
    return [tensor for tensor, flag in zip(every, flags) if flag and tensor is not None]


def _filled(every: Group, flags: Sequence[bool], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    """All tensors, with others in the places of those that are wanted."""
    rest = iter(wanted)
    return [next(rest) if flag else tensor for tensor, flag in zip(every, flags)]


def _spread(found: Sequence[Tensor], flags: Sequence[bool]) -> list[Tensor | None]:
    """The results in the places of what they belong to, None elsewhere."""
    rest = iter(found)
    return [next(rest) if flag else None for flag in flags]


def _call_of(call: Call, flat: Group) -> Call:
    """The call of tensors in the order of `Needs.flat`."""
    rest = iter([tensor for tensor in flat if tensor is not None])
    return replace(
        call, x=next(rest), states=[next(rest) for _ in call.states],
        params=[next(rest) for _ in call.params],
        reset_states=[next(rest) for _ in call.reset_states],
    )  # fmt: skip
