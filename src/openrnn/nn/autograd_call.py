"""Calls that repeat and that autograd records: one node, of tensors as the caller has them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openrnn import op, prepared_calls, tensors
from openrnn.backends.base import Needs, PreparedGradCall, lengths_reset_seed, result_shapes
from openrnn.nn.call_guard import CallGuard, can_guard, has_unguarded_mode
from openrnn.route import Route
from openrnn.untraced import untraced

_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


class AutogradCall:
    """Makes a call again that recorded gradients: a `PreparedCall`.

    Args:
        guard: whether tensors are like those of that call.
        call: that call as `functional` got it.
        batch_first: x is (B, T, I).
        route, run: how `prepared_calls.prepare_grad` makes it again.
    """

    def __init__(
        self,
        guard: CallGuard,
        call: prepared_calls.RecurrentCall,
        batch_first: bool,
        route: Route,
        run: PreparedGradCall,
    ) -> None:
        self.guard, self.route, self.run = guard, route, run
        self.visible, self._states_begin = 1 + len(call.spec.states), 1 + len(call.params)
        self._states_end = self._states_begin + len(call.states)  # then come masks
        self._batch_first = batch_first
        self._x_shape, self._state_shapes = call.x.shape, [state.shape for state in call.states]
        self._result_shapes = result_shapes(route.problem, call.x.shape[0], call.x.shape[1])

    def ready(self, every: Sequence[Tensor]) -> bool:
        """Whether they have memory, and there are no hooks of saved tensors.

        A checkpoint compares what its two passes save, and the call may come to be remembered
        between them.
        """
        return _hooks(False) is None and self.run.ready(every)

    def __call__(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """Y and the final states, of those that are ready; None of others."""
        if not self.ready(every):
            return None
        try:
            return list(_apply(self, *every))
        except torch.OutOfMemoryError:  # the usual way needs less at a time
            return None

    def backward(
        self,
        every: Sequence[Tensor],
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The gradients of `every` but its masks; `outputs` are y and the reserve."""
        given, plain = tensors.gradients(grads)
        seen = every[:-1] if self.route.problem.drops else every  # the seed is new at each call
        if (
            not plain
            or torch.is_grad_enabled()
            or has_unguarded_mode()
            or not self._kept(outputs)
            or not can_guard(every)
            or not self.guard(seen, backward=True)  # modes are seen, too
            or not self.run.ready(every)
        ):
            return self._general_backward(every, outputs, grads, needs)
        found = self.run.backward(every, outputs, given, needs)
        if self._batch_first and found[0] is not None:
            found[0] = found[0].transpose(0, 1)
        return found

    def _kept(self, outputs: Sequence[Tensor]) -> bool:
        """Whether y and the reserve are what forward made, and not what a hook made of them.

        All of it: their storages may have shrunk since.
        """
        kinds = [(output.shape, output.dtype) for output in outputs]
        if kinds != self.run.saved or not tensors.is_plain(*outputs):
            return False
        return all(output.is_contiguous() and tensors.has_storage(output) for output in outputs)

    def _general_backward(
        self,
        every: Sequence[Tensor],
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """Gradients by the usual way: second derivatives, and tensors that no program takes."""
        x, count, last = every[0], self._states_begin, self._states_end
        params, states = list(every[1:count]), every[count:last]
        lengths, reset, seed = lengths_reset_seed(self.route.problem, every[last:])
        if reset is not None:  # of a step (B,)
            reset = reset.reshape(self._x_shape[:2])
        inputs: tuple[Any, ...] = (
            x.transpose(0, 1) if self._batch_first else x.reshape(self._x_shape),
            [state.reshape(shape) for state, shape in zip(states, self._state_shapes)],
            params, lengths, reset, [], seed,
        )  # fmt: skip
        shaped = [
            None if grad is None else grad.reshape(shape)
            for grad, shape in zip(grads, self._result_shapes)
        ]
        y, *reserve = outputs
        wanted = Needs.of_prepared(needs, len(params), len(states))
        y = y.reshape(self._result_shapes[0])
        dx, *rest = op.gradients(self.route, inputs, y, reserve, shaped, wanted)
        d_states, d_params = rest[: len(states)], rest[len(states) :]
        if dx is not None:
            dx = dx.transpose(0, 1) if self._batch_first else dx.reshape(x.shape)
        back = [
            None if grad is None else grad.reshape(state.shape)
            for grad, state in zip(d_states, states)
        ]
        return [dx, *d_params, *back]


class _AutogradCallFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AutogradCall, *every: Tensor) -> tuple[Tensor, ...]:
        made = call.run.forward(every)
        ctx.call = call
        ctx.save_for_backward(*every, made[0], *made[call.visible :])
        ctx.set_materialize_grads(False)
        return tuple(made[: call.visible])

    @staticmethod
    @untraced  # autograd may call it from compiled code
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        count = len(needs)
        found = ctx.call.backward(saved[:count], saved[count:], grads, needs)
        return (None, *found, *[None] * (count - len(found)))  # masks have none


# what `Function.apply` adds is of use to the transforms of torch.func alone, and costs 4 us
_apply: Any = super(torch.autograd.Function, _AutogradCallFunction).apply
