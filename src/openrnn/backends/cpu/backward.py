"""The backward pass on the CPU."""

import torch
from torch import Tensor

from openrnn.backends.base import Call, Cotangents, Gradients, Needs, zeros_of
from openrnn.backends.cpu.launches import Launches, addresses, padded
from openrnn.backends.cpu.reserve import Saved
from openrnn.backends.cpu.tensors import contiguous, contiguous_rows, converted
from openrnn.codegen import build
from openrnn.schedule.operations import BeginLayer, FinishWeights, Loop


class Backward(Launches):
    """The operations of a backward pass.

    Args:
        y: the output of the call (T, B, D*O).
        saved: what forward saved.
        grads: of the outputs of the call; needs: which gradients are wanted.
    """

    def __init__(
        self,
        call: Call,
        order: Tensor | None,
        y: Tensor,
        saved: Saved,
        grads: Cotangents,
        needs: Needs,
    ) -> None:
        super().__init__(call, order)
        dtype = call.x.dtype
        self.saved, self.needs = saved, needs
        self.inputs = [call.x, *saved.outputs]  # of each layer
        self.outputs = [*saved.outputs, converted(y, dtype)]
        self.d_finals = contiguous(grads.finals, dtype)
        self.d_all_states = contiguous(grads.all_states, dtype)
        self.d_initial = zeros_of(call.states, needs.states)
        self.d_reset_states = zeros_of(call.reset_states, needs.reset_states)
        self.d_params: list[Tensor | None] = [None] * len(call.params)
        self._dy = converted(grads.y, dtype)  # of the current layer's output
        self._dx: Tensor | None = None  # of what it reads
        self._weights: list[Tensor | None] = []  # of the current layer and direction
        self._sums: Tensor | None = None  # of their gradients, a row for each team of threads

    def begin_layer(self, operation: BeginLayer) -> None:
        if operation.direction:
            return
        if operation.layer < self.spec.num_layers - 1:
            self._dy = self._dx
        self._dy = None if self._dy is None else contiguous_rows(self._dy)
        self._dx = None
        if operation.layer or self.needs.x:
            # the loops write nothing past the end of a sequence
            make = torch.empty_like if self.call.lengths is None else torch.zeros_like
            x = self.inputs[operation.layer]
            self._dx = make(x, memory_format=torch.contiguous_format)

    def loop(self, operation: Loop) -> None:
        from openrnn.kernels.cpu.matrices import plain

        layer, x, dx, dy = self.kernels(operation), self.inputs[operation.layer], self._dx, self._dy
        layout, weights = layer.layout, self.weights(layer)
        plan = self.plan(layer, operation, "backward")
        w_ih, w_hh, b_ih, b_hh, w_hr, *vectors = weights
        if dx is None:
            w_ih = None
        needs = self.needs
        if self.steps == 1 and not any(needs.states) and not any(needs.reset_states):
            w_hh = None  # nothing goes back beyond the first step
        if plan.packs:
            w_ih = plain(w_ih, layout.gates, layout.padded)
            w_hh = plain(w_hh, layout.gates, layout.padded)
        w_hr = plain(w_hr, 1, layout.outputs)
        unit_vectors = padded(vectors, layout.padded)
        sums: Tensor | None = None
        wanted = [at is not None and needs.params[at] for at in layer.places]
        if unit_vectors is not None or any(wanted):
            sums = x.new_empty(plan.teams, sum(layout.sums))
        loop, derivative = build.backward(layer.cell, layout.dtype)
        args = plan.args()
        y, saved = self.outputs[operation.layer], self.saved.activations[layer.chain]
        read = w_ih, w_hh, b_ih, b_hh, w_hr, unit_vectors
        self.fill(args, layer, operation, x, y, read, saved)
        args.row_function = derivative
        if dy is not None:
            args.dy, args.dy_step, args.dy_row = self.part(operation, dy)
        if dx is not None:
            args.dx, args.dx_add = dx.data_ptr(), operation.direction
            args.dx_step, args.dx_row, _ = dx.stride()
        if sums is not None:
            args.sums = sums.data_ptr()
        if any(needs.states):
            args.d_initial = addresses(layer, self.d_initial)
        if any(needs.reset_states):
            args.d_reset_state = addresses(layer, self.d_reset_states)
        if self.d_finals:
            args.d_final = addresses(layer, self.d_finals)
        if self.d_all_states:
            args.d_all_states = addresses(layer, self.d_all_states)
        self.run(loop, args, plan)
        self._weights, self._sums = weights, sums

    def finish_weights(self, operation: FinishWeights) -> None:
        from openrnn.kernels.cpu.matrices import gradients

        if self._sums is None:
            return
        layer = self.kernels(operation)
        found = gradients(layer.layout, self._sums, self._weights)
        self._sums = None
        for place, grad in zip(layer.places, found):
            if place is not None and self.needs.params[place]:
                self.d_params[place] = grad

    @property
    def gradients(self) -> Gradients:
        """What the call asked for."""
        return Gradients(
            self._dx if self.needs.x else None, self.d_initial, self.d_params, self.d_reset_states
        )
