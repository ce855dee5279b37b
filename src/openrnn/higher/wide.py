"""Loops of 16-bit numbers in float32: derivatives of each are computed so, and then rounded.

A derivative takes several runs of kernels. What lies between them, pre-activations and states of
all steps, is not rounded to 16 bits so: on a CPU forward mode of a GRU has two thirds of the error
(H 32; second derivatives have the same). On a GPU it takes the kernels of the tangent cell that are
tested, in tf32, whose 11 bits hold every 16-bit operand.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openrnn.backends.base import Call, Cotangents, Gradients, Outputs
from openrnn.higher.loop import Direction
from openrnn.spec import Problem

NARROW = torch.float16, torch.bfloat16


def problem_of(problem: Problem) -> Problem:
    """The problem in float32; itself if its numbers have 32 bits or more."""
    if problem.dtype not in NARROW:
        return problem
    precision = "tf32" if problem.device == "cuda" else problem.precision
    return replace(problem, dtype=torch.float32, precision=precision)


def call_of(call: Call) -> Call:
    """The call with all tensors in float32."""
    return replace(
        call, problem=problem_of(call.problem), x=call.x.float(),
        states=[state.float() for state in call.states],
        params=[param.float() for param in call.params],
        reset_states=[state.float() for state in call.reset_states],
    )  # fmt: skip


def outputs_of(out: Outputs) -> Outputs:
    """The visible results in float32."""
    finals, states = ([state.float() for state in group] for group in (out.finals, out.all_states))
    return Outputs(out.y.float(), finals, states, [])


def direction_of(along: Direction) -> Direction:
    """The direction with all tensors in float32."""
    return Direction(*_cast(torch.float32, *along))


def cotangents_of(grads: Cotangents, dtype: torch.dtype = torch.float32) -> Cotangents:
    """The cotangents, cast to a dtype."""
    return Cotangents(*_cast(dtype, grads.y, grads.finals, grads.all_states))


def gradients_of(grads: Gradients, dtype: torch.dtype) -> Gradients:
    """The gradients, cast to a dtype."""
    return Gradients(*_cast(dtype, grads.x, grads.states, grads.params, grads.reset_states))


def _cast(dtype: torch.dtype, one: Tensor | None, *groups: Sequence[Tensor | None]) -> list[Any]:
    """A tensor and groups of tensors in a dtype; None stays."""
    (first,), *others = (
        [None if tensor is None else tensor.to(dtype) for tensor in group]
        for group in ([one], *groups)
    )
    return [first, *others]
