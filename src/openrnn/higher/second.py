"""The derivative of a loop's backward pass, by runs of kernels and products over all steps.

The gradients of a loop, taken along a direction u of its inputs, are the derivative along u of
<what reaches its results, its results>. So u, which reaches the gradients, is carried forward
through the loop as tangents of the results, and back again:

1. forward once more, for the states of all steps;
2. the loop of the tangent cell: its results are what reaches the gradients of the results;
3. its backward: by the tangents of the gates these are the gate gradients of the first backward, by
   the other gates what each step's second derivative adds;
4. the loop's own backward, from what 3 left for the states before each step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn import problem_key
from openrnn.backends.base import Backend, Call, Cotangents, Gradients, Needs
from openrnn.higher import wide
from openrnn.higher.along import gate_parts, tangent_inputs
from openrnn.higher.loop import Direction, Run, Weights, before
from openrnn.higher.tangent import Tangent, spec_of, tangent_of
from openrnn.params import places


def second(
    backend: Backend, call: Call, grads: Cotangents, along: Direction, needs: Needs
) -> tuple[Gradients, Cotangents]:
    """What reaches the inputs of a loop, and `grads`, from what reaches its gradients.

    Args:
        call: of one layer and direction that is not reverse, without projection.
        grads: what reaches the loop's results; not all None.
        along: what reaches the gradients of its inputs.
        needs: which inputs are wanted.
    """
    dtype = call.x.dtype
    if dtype not in wide.NARROW:
        return _second(backend, call, grads, along, needs)
    widened = wide.call_of(call), wide.cotangents_of(grads), wide.direction_of(along)
    own, reached = _second(backend, *widened, needs)
    return wide.gradients_of(own, dtype), wide.cotangents_of(reached, dtype)


def _second(
    backend: Backend, call: Call, grads: Cotangents, along: Direction, needs: Needs
) -> tuple[Gradients, Cotangents]:
    """Second derivatives of a call whose numbers have 32 bits or more."""
    run = Run(backend, call)
    tangent = tangent_of(call.problem.spec)
    loop = _tangent_call(run, tangent, along, bool(grads.all_states))
    out = backend.forward(loop)
    reached = Cotangents(out.y, [*out.finals], [*out.all_states])
    if not any(needs.flat):
        none = Gradients(None, *([None] * len(group) for group in needs[1:]))  # type: ignore[arg-type]
        return none, reached
    wanted = Needs(
        True, (False,) * len(loop.states), (False, *(True,) * len(loop.params[1:])),
        (False,) * len(loop.reset_states),
    )  # fmt: skip
    back = backend.backward(loop, out.y, out.reserve, grads, wanted)
    if back.x is None:
        raise ValueError("a backward pass has not returned the gradient of x")
    parts = _parts(run, tangent, back.x)
    own = _collected(run, parts, along, needs)
    w_hh, unit = Weights.of(run.spec, own.params)[1], places(run.spec)[0][5:]
    if w_hh is not None:
        w_hh.addmm_(parts.d_r.flatten(0, 1).T, before(loop, 0, out.y).flatten(0, 1))
    vectors = (own.params[index] for index in unit if index is not None)
    for vector, more in zip(vectors, back.params[1:]):
        if vector is not None and more is not None:
            vector.add_(more)
    return own, reached


def _tangent_call(run: Run, tangent: Tangent, along: Direction, every: bool) -> Call:
    """The loop of the tangent cell along a direction; `every`: it returns all states."""
    call, hidden = run.call, run.spec.hidden_size
    gates = call.x.new_empty(*call.x.shape[:2], len(tangent.cell.gates), hidden)
    for index, parts in enumerate(gate_parts(run, tangent, along)):
        out = gates[:, :, index]
        if not parts:
            out.zero_()
            continue
        out.copy_(parts[0])  # each may be of the shape (H,)
        for part in parts[1:]:
            out.add_(part)
    inputs = tangent_inputs(run, tangent, along, gates.flatten(2))
    problem = problem_key.for_backend(
        spec_of(run.spec), call.x.dtype, call.x.device.type, grad=True, training=False,
        lengths=call.lengths is not None, reset=call.reset is not None, return_states=every,
        precision=call.problem.precision,
    )  # fmt: skip
    return Call(problem, *inputs)


class _Parts(NamedTuple):
    """What the backward pass of the tangent cell's loop tells of the gates, each (T, B, G*H).

    Args:
        d_x, d_r: gate gradients of the first backward, of both sides.
        more_x, more_r: what second derivatives add to the gate gradients of the second.
        states: the same of the states before each step, each (T, B, H) or None.
    """

    d_x: Tensor
    d_r: Tensor
    more_x: Tensor
    more_r: Tensor
    states: list[Tensor | None]


def _parts(run: Run, tangent: Tangent, gates: Tensor) -> _Parts:
    """The gradients (T, B, gates * H) of the gates of the tangent cell, sorted."""
    hidden, count = run.spec.hidden_size, len(run.spec.gates)
    indices = {name: index for index, name in enumerate(tangent.cell.gates)}

    def gathered(one: str, other: str) -> Tensor:
        """The tangent gates `one` + number, or `other` + number, of each gate: (T, B, G*H)."""
        wanted = [indices.get(f"{one}{g}", indices.get(f"{other}{g}")) for g in range(count)]
        first = wanted[0]
        if first is not None and wanted == [*range(first, first + count)]:
            return gates[..., first * hidden : (first + count) * hidden]
        zeros = gates.new_zeros(()).expand(*gates.shape[:2], hidden)
        found = [zeros if n is None else gates[..., n * hidden : (n + 1) * hidden] for n in wanted]
        return torch.cat(found, -1)

    states = [indices.get(f"s{k}") for k in range(len(run.spec.states))]
    return _Parts(
        gathered("x", "r"), gathered("r", "r"), gathered("a", "b"), gathered("a", "c"),
        [None if n is None else gates[..., n * hidden : (n + 1) * hidden] for n in states],
    )  # fmt: skip


def _collected(run: Run, parts: _Parts, along: Direction, needs: Needs) -> Gradients:
    """The gradients of the loop's inputs, but for what the tangents of h add to that of W_hh."""
    call, spec = run.call, run.spec
    to, extra = Weights.of(spec, along.params), [*parts.states]
    to_h = parts.more_r @ run.recurrent
    if to.w_hh is not None:
        to_h += parts.d_r @ to.w_hh
    extra[0] = to_h if extra[0] is None else extra[0] + to_h
    own = _carried_back(run, extra, needs)
    _add_states(run, own, extra)
    if own.x is not None:
        own.x += run.to_x(parts.more_x)
        if to.w_ih is not None:
            own.x += parts.d_x @ to.w_ih
    wanted = Weights.of(spec, own.params)
    rows_x, rows_r = parts.more_x.flatten(0, 1), parts.more_r.flatten(0, 1)
    if wanted.w_ih is not None:
        wanted.w_ih.addmm_(rows_x.T, call.x.flatten(0, 1))
        if along.x is not None:
            wanted.w_ih.addmm_(parts.d_x.flatten(0, 1).T, run.within(along.x).flatten(0, 1))
    if wanted.w_hh is not None:
        wanted.w_hh.addmm_(rows_r.T, run.before[0].flatten(0, 1))
    if wanted.b_ih is not None:
        wanted.b_ih.add_(rows_x.sum(0))
    if wanted.b_hh is not None:
        wanted.b_hh.add_(rows_r.sum(0))
    return own


def _carried_back(run: Run, extra: list[Tensor | None], needs: Needs) -> Gradients:
    """The loop's own backward, from what reaches the states before each step."""
    reset, every = run.call.reset, list[Tensor | None]()
    for each in extra:
        if each is None:
            every.append(None)
            continue
        # the state before a step is that after the step before
        kept = each if reset is None else torch.where(reset[..., None], 0, each)
        every.append(torch.cat([kept[1:], torch.zeros_like(kept[:1])])[None])
    grads = Cotangents(None, [None] * len(extra), every)
    return run.backend.backward(run.call, run.out.y, run.out.reserve, grads, needs)


def _add_states(run: Run, own: Gradients, extra: list[Tensor | None]) -> None:
    """Adds what reaches initial states and reset states as states before a step."""
    reset = run.call.reset
    for state, each in zip(own.states, extra):
        if state is not None and each is not None:
            first = each[0] if reset is None else torch.where(reset[0, :, None], 0, each[0])
            state.add_(first)
    for state, each in zip(own.reset_states, extra):
        if state is not None and each is not None and reset is not None:
            state.add_(torch.where(reset[..., None], each, 0).sum(0))
