"""A call and its backward pass as functions that torch.func transforms.

`vmap` folds its dimension into B, so that kernels run as for any call. At the bottom, where no
level is left, both are what `op` has for plain calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openrnn import arguments, op
from openrnn.backends.base import Call, Needs, Outputs
from openrnn.dispatch import BACKENDS
from openrnn.higher import functions, network, wide
from openrnn.higher.loop import Direction
from openrnn.higher.second import second
from openrnn.higher.tangent import spec_of
from openrnn.route import Route, call_of
from openrnn.tensors import check_own_memory
from openrnn.transforms import levels
from openrnn.transforms.folding import (
    Counts,
    Dims,
    Group,
    flat_dims,
    fold,
    in_turn,
    result_rows,
    unfold,
)
from openrnn.transforms.pulled import by_reference, by_reference_again
from openrnn.transforms.tangents import inputs_of, loop_route, tangent_loop

# rows of a call that computes several gradients of one at a time, where B is at most a quarter of
# them: a loop of 32 rows takes little longer than one of a few
ROWS = 32


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call is apart from its tensors; torch takes it as one argument.

    Args:
        needs: of a backward pass, which gradients are wanted.
    """

    route: Route
    counts: Counts
    needs: Needs | None = None

    @property
    def rows(self) -> list[int]:
        """Which dimension of each visible result is B."""
        return result_rows(len(self.route.problem.spec.states), self.route.visible)


def run(route: Route, *inputs: Any) -> tuple[Tensor, ...]:
    """A call as `op.recurrence` takes it, under transforms."""
    x, states, params, lengths, reset, resets, seed = inputs
    plan = Plan(route, Counts(len(states), len(params), len(resets)))
    return forward(plan, [x, *states, *params, lengths, reset, *resets, seed])


def by_loops(route: Route, *inputs: Any) -> list[Tensor]:
    """The visible results of a call that is differentiated forward, each loop on its own."""
    grad = route.constants.grad

    def loop(name: str, call: Call) -> Outputs:
        route = loop_route(name, call.problem.spec, call, grad=grad)
        found = run(route, *inputs_of(call))
        count = len(call.problem.spec.states)
        every = [*found[1 + count : 1 + 2 * count]]
        kept = every if call.problem.return_states else []
        return Outputs(found[0], [*found[1 : 1 + count]], kept, [])

    out = network.network(route.constants.backend, call_of(route, inputs), loop)
    return [out.y, *out.finals, *out.all_states]


def forward(plan: Plan, tensors: Group) -> tuple[Tensor, ...]:
    """The results and the reserve of a call whose tensors come flat."""
    if levels.transformed() or levels.active().forward:
        out: tuple[Tensor, ...] = _forward(plan, *tensors)
        return out
    inputs = op.unflatten(plan.counts, tensors)
    return tuple(op.run(plan.route, *inputs))


class Forward(torch.autograd.Function):
    """y, final states, all states where asked for, reserve."""

    @staticmethod
    def forward(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        inputs = op.unflatten(plan.counts, tensors)
        return tuple(
            op.eager(plan.route, *arguments.check_operator_inputs(plan.route.problem.spec, inputs))
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plan, *tensors = inputs
        visible = plan.route.visible
        ctx.plan, ctx.kept = plan, len(output) - visible
        ctx.save_for_backward(*tensors, output[0], *output[visible:])
        ctx.mark_non_differentiable(*output[visible:])
        ctx.save_for_forward(*tensors, *output[:visible])
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, counts, visible = ctx.plan, ctx.plan.counts, ctx.plan.route.visible
        saved = ctx.saved_tensors
        call = call_of(plan.route, op.unflatten(counts, saved[: counts.total]))
        results, states = saved[counts.total :], len(call.problem.spec.states)
        out = Outputs(results[0], results[1 : 1 + states], results[1 + states :], [])
        x, of_states, of_params, _, _, of_resets, _ = op.unflatten(counts, tangents)
        along = Direction(x, of_states, of_params, of_resets)
        constants, dtype = plan.route.constants, call.x.dtype
        if dtype in wide.NARROW:
            call, out = wide.call_of(call), wide.outputs_of(out)
            along = wide.direction_of(along)
        inner = tangent_loop(constants.backend, call, out, along)
        route = loop_route(constants.backend, spec_of(call.problem.spec), call, grad=constants.grad)
        found = run(route, *inner, None)[:visible]  # no seed
        return (*(one.to(dtype) for one in found), *[None] * ctx.kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        counts, end = plan.counts, 1 + plan.counts.states + plan.counts.params
        saved, flags = ctx.saved_tensors, ctx.needs_input_grad[1:]
        tensors, y, reserve = saved[: counts.total], saved[counts.total], saved[counts.total + 1 :]
        needs = Needs(
            flags[0], flags[1 : 1 + counts.states], flags[1 + counts.states : end],
            flags[end + 2 : end + 2 + counts.resets],
        )  # fmt: skip
        reached = grads[: plan.route.visible]
        if levels.active().forward:
            found = by_reference(call_of(plan.route, op.unflatten(counts, tensors)), reached, needs)
        else:
            wanted = Plan(plan.route, counts, needs)
            made = iter(_backward(wanted, *tensors, y, *reserve, *reached))
            found = [next(made) if need else None for need in needs.flat]
        return (None, *found[:end], None, None, *found[end:], None)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, plan: Plan, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        size, rows, dims = info.batch_size, plan.rows, flat_dims(in_dims[1:])
        if plan.counts.maps_params(dims):
            made = in_turn(partial(forward, plan), tensors, dims, size)
            return made, (0,) * len(made)
        out = forward(plan, _folded(plan, size, tensors, dims))
        results = [unfold(value, row, size) for value, row in zip(out, rows)]
        # in the order of the folded call, which its backward runs again
        reserve = out[len(rows) :]
        return (*results, *reserve), (*rows, *[None] * len(reserve))


class Backward(torch.autograd.Function):
    """The gradients that are wanted, from the inputs, y, the reserve, and what reaches results."""

    @staticmethod
    def forward(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        inputs, y, reserve, grads = _parts(plan, tensors)
        needs, route = _needs(plan), plan.route
        reached = [check_own_memory("a gradient", grad) for grad in grads]
        every = op.unflatten(plan.counts, inputs)
        found = op.eager_backward(route, every, check_own_memory("y", y), reserve, reached, needs)
        return tuple(grad for grad in found if grad is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plan, *tensors = inputs
        given, _, reserve, grads = _parts(plan, tensors)
        ctx.plan, ctx.kept = plan, 1 + len(reserve)
        ctx.save_for_backward(*given, *grads)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *reached: Tensor | None) -> tuple[Any, ...]:
        plan, needs = ctx.plan, _needs(ctx.plan)
        counts, total = plan.counts, plan.counts.total
        saved, flags = ctx.saved_tensors, ctx.needs_input_grad[1:]
        call = call_of(plan.route, op.unflatten(counts, saved[:total]))
        end = 1 + counts.states + counts.params
        wanted = [*flags[:end], *flags[end + 2 : total - 1], *flags[total + ctx.kept :]]
        rest = iter(reached)
        filled = [next(rest) if need else None for need in needs.flat]
        name, grads = plan.route.constants.backend, saved[total:]
        if _by_kernels(name, call, [*saved, *filled]):
            found = _second(name, call, grads, needs, filled, wanted)
        else:
            found = by_reference_again(call, grads, needs, filled, wanted)
        count, none = len(needs.flat), [None] * ctx.kept
        first, middle, others = found[:end], found[end:count], found[count:]
        return (None, *first, None, None, *middle, None, *none, *others)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, plan: Plan, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size, total, needs = info.batch_size, plan.counts.total, _needs(plan)
        dims = flat_dims(in_dims[1:])
        mapped = any(dim is not None for dim in dims[:total])
        batch = tensors[0].shape[1] if isinstance(tensors[0], Tensor) else 1
        if not mapped and not any(needs.params) and 4 * batch <= ROWS:
            return _grouped(plan, size, tensors, dims, ROWS // batch)
        if any(needs.params) or plan.counts.maps_params(dims) or not mapped:
            return _each(plan, size, tensors, dims)
        inputs, y, reserve, grads = _parts(plan, tensors)
        inside = _folded(plan, size, inputs, dims[:total])
        reached = _reaching(plan, size, grads, dims)
        return _opened(plan, size, [*inside, fold(y, dims[total], 1, size), *reserve, *reached])


_forward: Any = Forward.apply
_backward: Any = Backward.apply


def _by_kernels(name: str, call: Call, tensors: Sequence[Tensor | None]) -> bool:
    """Whether kernels differentiate a backward pass, and nothing differentiates that in turn."""
    problem, x = call.problem, call.x
    if torch.is_grad_enabled() or not functions.untouched(*tensors):
        return False
    if not network.is_loop(problem.spec) or not x.numel():
        return False
    return network.refusal(name, problem, x.device, *x.shape[:2]) is None


def _second(
    name: str, call: Call, grads: Group, needs: Needs, filled: Group, flags: Sequence[bool]
) -> list[Tensor | None]:
    """What reaches the inputs of a loop and `grads`, by kernels."""
    count = len(needs.flat)
    along, wanted = functions.direction_of(call, filled), functions.needs_of(call, flags[:count])
    found, back = second(BACKENDS[name], call, op.cotangents(call, grads), along, wanted)
    others = [back.y, *back.finals, *back.all_states]
    return [*found.flat, *(one if flag else None for one, flag in zip(others, flags[count:]))]


def backward(plan: Plan, tensors: Group) -> tuple[Tensor, ...]:
    """The gradients that are wanted of tensors as `Backward` takes them."""
    out: tuple[Tensor, ...] = _backward(plan, *tensors)
    return out


def _needs(plan: Plan) -> Needs:
    if plan.needs is None:
        raise ValueError("a backward pass needs to know which gradients are wanted")
    return plan.needs


def _parts(plan: Plan, tensors: Sequence[Any]) -> tuple[list[Any], Any, list[Any], list[Any]]:
    """The inputs, y, the reserve, and what reaches the results."""
    total, end = plan.counts.total, len(tensors) - plan.route.visible
    return [*tensors[:total]], tensors[total], [*tensors[total + 1 : end]], [*tensors[end:]]


def _folded(plan: Plan, size: int, tensors: Group, dims: Dims) -> list[Tensor | None]:
    return [
        fold(tensor, dim, row, size) for tensor, dim, row in zip(tensors, dims, plan.counts.rows)
    ]


def _again(plan: Plan, inputs: Group) -> list[Tensor]:
    """y and the reserve of a call that is made once more."""
    out = forward(plan, inputs)
    return [out[0], *out[plan.route.visible :]]


def _reaching(plan: Plan, size: int, grads: Group, dims: Dims) -> list[Tensor | None]:
    """What reaches the results of a folded call; `dims` of all that `Backward` takes."""
    own = dims[len(dims) - len(grads) :]
    return [fold(grad, dim, row, size) for grad, dim, row in zip(grads, own, plan.rows)]


def _opened(plan: Plan, size: int, tensors: Group) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The gradients of a folded call, none of which is a parameter's, and where V is in each."""
    wanted = zip(plan.counts.gradients, _needs(plan).flat)
    rows = tuple(row or 0 for row, need in wanted if need)
    found = backward(plan, tensors)
    return tuple(unfold(grad, row, size) for grad, row in zip(found, rows)), rows


def _grouped(
    plan: Plan, size: int, tensors: Group, dims: Dims, most: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Many gradients of one call, so many at a time: their rows are one call, made once more."""
    inputs, _, _, grads = _parts(plan, tensors)
    none: list[int | None] = [None] * len(tensors)
    made: dict[int, list[Any]] = {}
    found: list[tuple[Tensor, ...]] = []
    rows: tuple[int, ...] = ()
    for start in range(0, size, most):
        count = min(most, size - start)
        if count not in made:
            inside = _folded(plan, count, inputs, none)
            made[count] = [*inside, *_again(plan, inside)]
        part = [
            grad if grad is None or dim is None else grad.narrow(dim, start, count)
            for grad, dim in zip(grads, dims[len(dims) - len(grads) :])
        ]
        out, rows = _opened(plan, count, [*made[count], *_reaching(plan, count, part, dims)])
        found.append(out)
    return tuple(torch.cat(parts, row) for parts, row in zip(zip(*found), rows)), rows


def _each(
    plan: Plan, size: int, tensors: Group, dims: Dims
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The gradients of each member by a backward pass of its own."""
    # the reserve of a folded call is of no use to its members
    again = dims[plan.counts.total] is not None and not plan.counts.maps_params(dims)

    def one(given: Group) -> Sequence[Tensor]:
        if not again:
            return backward(plan, given)
        inputs, _, _, grads = _parts(plan, given)
        return backward(plan, [*inputs, *_again(plan, inputs), *grads])

    found = in_turn(one, tensors, dims, size)
    return found, (0,) * len(found)
