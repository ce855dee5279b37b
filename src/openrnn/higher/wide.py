"""Loops of 16-bit numbers in float32: their derivatives are computed so, and rounded at the end.

A tangent cell multiplies what the cell only adds, and sums it over all steps; in 16 bits the error
would grow with each of them. On a GPU products are tf32, whose 11 bits hold every 16-bit operand.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from openrnn.backends.base import Call, Cotangents, Gradients, Outputs
from openrnn.higher.loop import Direction
from openrnn.spec import Problem

NARROW = torch.float16, torch.bfloat16


def problem_of(problem: Problem) -> Problem:
    """The same in float32; itself if its numbers have 32 bits or more."""
    if problem.dtype not in NARROW:
        return problem
    precision = "tf32" if problem.device == "cuda" else problem.precision
    return replace(problem, dtype=torch.float32, precision=precision)


def call_of(call: Call) -> Call:
    """The same in float32."""
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
    """The same in float32."""
    groups = [along.x], along.states, along.params, along.reset_states
    (x,), *others = (as_dtype(group, torch.float32) for group in groups)
    return Direction(x, *others)


def cotangents_of(grads: Cotangents, dtype: torch.dtype = torch.float32) -> Cotangents:
    """The same of a dtype."""
    groups = (as_dtype(group, dtype) for group in ([grads.y], grads.finals, grads.all_states))
    (y,), finals, states = groups
    return Cotangents(y, finals, states)


def gradients_of(grads: Gradients, dtype: torch.dtype) -> Gradients:
    """The same of a dtype."""
    groups = [grads.x], grads.states, grads.params, grads.reset_states
    (x,), *others = (as_dtype(group, dtype) for group in groups)
    return Gradients(x, *others)


def as_dtype(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """Tensors of a dtype; None stays."""
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]
