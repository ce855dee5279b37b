"""The tangent cell: the derivative of a cell along a direction, as a cell of its own.

Its states are the tangents of the cell's states, and its recurrent product is the cell's, of the
tangent of h. What the derivative depends on comes as further gates, whose rows of the recurrent
matrix are zero. So the kernels that run any cell run it, forward and backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrnn.backends.base import traced
from openrnn.cells import Cell, Clip, cell, lookup
from openrnn.memo import memo, resource
from openrnn.names import Names
from openrnn.spec import Spec


@dataclass(frozen=True, eq=False)
class Tangent:
    """A tangent cell.

    Its gates, g being a gate and k a state of the cell: `r{g}`, for every gate, the tangent of the
    recurrent side, and with it that of the input side where the cell reads only their sum; `x{g}`
    the tangent of the input side where it does not; of the place where the derivative is taken
    `a{g}`, the sum of both sides, or `b{g}`, the input side, and `c{g}`, the recurrent side, and
    `s{k}`, the state before the step, as far as the derivative depends on them. The states are
    `h{k}`, the vectors `p{n}` and their tangents `v{n}`.

    Args:
        apart: the gates whose sides the cell does not only read as a sum.
    """

    cell: Cell
    apart: frozenset[int]


@memo(256)
def tangent_of(spec: Spec) -> Tangent:
    """The tangent cell of a network's cell.

    Raises:
        CellError: the cell cannot be traced.
    """
    return _tangent(spec.cell, traced(spec).summed, traced(spec).derivative.reads)


def spec_of(spec: Spec) -> Spec:
    """The network of the tangent cell for a loop of the cell."""
    made = tangent_of(spec).cell
    return made.spec(
        len(made.gates) * spec.hidden_size, spec.hidden_size, input_mode="gates", bias_mode="none",
        cell_clip=spec.cell_clip, precision=spec.precision, algorithm=spec.algorithm,
    )  # fmt: skip


@resource  # for as long as the registry of cells, where each call would make another
def _tangent(key: str, summed: frozenset[str], reads: frozenset[str]) -> Tangent:
    of = lookup(key)
    gates, states = range(len(of.gates)), range(len(of.states))
    vectors = range(len(of.unit_params))
    apart = [g for g in gates if of.gates[g] not in summed]
    names = [*(f"r{g}" for g in gates), *(f"x{g}" for g in apart)]
    for letter, kind, every in (
        ("a", "a", of.gates), ("b", "x", of.gates), ("c", "r", of.gates), ("s", "s", of.states)
    ):  # fmt: skip
        names += [f"{letter}{n}" for n, name in enumerate(every) if f"{kind}_{name}" in reads]

    def function(x: object, r: object, s: object, p: object, clip: Clip) -> tuple[Tensor, ...]:
        along_states = [getattr(s, f"h{k}") for k in states]
        zero, one = (make(along_states[0]) for make in (torch.zeros_like, torch.ones_like))

        def read(name: str) -> Tensor:
            if name not in names:
                return zero
            # both sides, though one is zero: kernels are the quickest where all gates are sums
            value: Tensor = getattr(x, name) + getattr(r, name)
            return value

        at = [read(f"a{g}" if g not in apart else f"b{g}") for g in gates]
        at += [read(f"c{g}") for g in gates] + [read(f"s{k}") for k in states]
        along = [read(f"r{g}" if g not in apart else f"x{g}") for g in gates]
        along += [read(f"r{g}") if g in apart else zero for g in gates] + along_states
        # of the shape of a state, as the derivative by a vector would be a sum
        at += [getattr(p, f"p{n}") * one for n in vectors]
        along += [getattr(p, f"v{n}") * one for n in vectors]

        def step(*flat: Tensor) -> tuple[Tensor, ...]:
            count, others = len(gates), 2 * len(gates)
            end = others + len(states)
            return of.step(flat[:count], flat[count:others], flat[others:end], flat[end:], clip)

        return derivative(step, at, along)

    def bare(x: object, r: object, s: object, clip: Clip) -> tuple[Tensor, ...]:
        return function(x, r, s, Names((), ()), clip)

    params = [f"{letter}{n}" for letter in "pv" for n in vectors]
    register = cell(names, [f"h{k}" for k in states], params, name=f"{of.name}.tangent")
    return Tangent(register(function if params else bare), frozenset(apart))


def derivative(
    step: Callable[..., tuple[Tensor, ...]], at: Sequence[Tensor], along: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """J t for the Jacobian J of a step: the derivative by v of <J^T v, t>, elementwise as J^T v."""
    with torch.enable_grad():
        at = [value if value.requires_grad else value.detach().requires_grad_() for value in at]
        new = step(*at)
        v = [torch.zeros_like(value).requires_grad_() for value in new]
        pairs = [(value, seed) for value, seed in zip(new, v) if value.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(v)
        if pairs:
            values, seeds = zip(*pairs)
            back = torch.autograd.grad(values, at, seeds, create_graph=True, allow_unused=True)
            taken = [
                (grad, t) for grad, t in zip(back, along) if grad is not None and grad.requires_grad
            ]
            if taken:  # else the derivative is zero everywhere
                grads, ts = zip(*taken)
                found = torch.autograd.grad(grads, v, ts, create_graph=True, allow_unused=True)
        zero = torch.zeros_like(along[0])
        return tuple(zero if value is None else value for value in found)
