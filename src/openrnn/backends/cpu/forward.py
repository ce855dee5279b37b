"""The forward pass on the CPU."""

from torch import Tensor

from openrnn.backends.base import Call
from openrnn.backends.cpu.launches import Launches, addresses, padded
from openrnn.backends.cpu.reserve import Saved
from openrnn.codegen import build
from openrnn.schedule.operations import BeginLayer, Loop


class Forward(Launches):
    """The operations of a forward pass.

    Args:
        saved: memory for what backward reads; None in inference.
        finals, all_states: memory for the final states and those of all steps, in the order of the
            cell's states; all_states may be empty.

    Attributes:
        y: the output of the current layer (T, B, D*O); the last layer's is that of the call.
    """

    def __init__(
        self,
        call: Call,
        order: Tensor | None,
        saved: Saved | None,
        finals: list[Tensor],
        all_states: list[Tensor],
    ) -> None:
        super().__init__(call, order)
        self.saved, self.finals, self.all_states = saved, finals, all_states
        self.y = self._x = call.x  # `_x`: what the current layer reads; both until the first begins

    def begin_layer(self, operation: BeginLayer) -> None:
        if operation.direction:
            return
        spec, layer = self.spec, operation.layer
        self._x = self.y if layer else self.call.x
        if self.saved is not None and layer < spec.num_layers - 1:
            self.y = self.saved.outputs[layer]
        else:
            width = spec.directions * spec.output_size
            self.y = self.call.x.new_empty(self.steps, self.batch, width)

    def loop(self, operation: Loop) -> None:
        layer = self.kernels(operation)
        layout = layer.layout
        saved = self.saved.activations[layer.chain] if self.saved is not None else []
        plan = self.plan(layer, operation, "inference" if self.saved is None else "training")
        w_ih, w_hh, b_ih, b_hh, w_hr, *vectors = self.weights(layer)
        if plan.packs or w_hr is not None:
            from openrnn.kernels.cpu.matrices import transposed

            if plan.packs:
                w_ih = transposed(w_ih, layout.gates, layout.padded)
                w_hh = transposed(w_hh, layout.gates, layout.padded)
            w_hr = transposed(w_hr, 1, layout.width)
        unit_vectors = padded(vectors, layout.padded)
        loop, step = build.forward(layer.cell, layout.dtype)
        args = plan.args()
        read = w_ih, w_hh, b_ih, b_hh, w_hr, unit_vectors
        self.fill(args, layer, operation, self._x, self.y, read, saved)
        args.row_function = step
        args.final = addresses(layer, self.finals)
        if self.all_states:
            args.all_states = addresses(layer, self.all_states)
        self.run(loop, args, plan)
