"""What the two passes share: filling the arguments of a loop, by name, and running it."""

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openrnn import philox
from openrnn.backends.base import Call
from openrnn.backends.cpu.layer import LayerKernels, layer_kernels, loop_plan
from openrnn.kernels.cpu import launch
from openrnn.schedule.operations import FinishWeights, Loop

if TYPE_CHECKING:
    from openrnn.kernels.cpu.args import LoopArgs
    from openrnn.kernels.cpu.objects import CompiledFunction
    from openrnn.kernels.cpu.plan import LoopPlan

# fields of `LoopArgs`: the weights in order, then what the layout's `widths` are of
WEIGHTS = "w_ih", "w_hh", "bias_x", "bias_r", "w_hr", "unit_vectors"
SAVED = "saved_gates", "saved_recurrent", "saved_states", "saved_unprojected"


class Launches:
    """The operations of one pass of a call.

    Args:
        call: as `tensors.readable` makes it.
        order: the batch rows by falling length, where there are lengths.
    """

    def __init__(self, call: Call, order: Tensor | None) -> None:
        self.call, self.order, self.spec = call, order, call.problem.spec
        self.steps, self.batch = call.x.shape[0], call.x.shape[1]

    def side_stream(self) -> AbstractContextManager[object]:
        """Nothing: operations run one after the other, on all threads."""
        return nullcontext()

    def abandon(self) -> None:
        """Nothing runs beside the operation that failed."""

    def kernels(self, operation: Loop | FinishWeights) -> LayerKernels:
        """The layer and direction of an operation."""
        layer, direction = operation.layer, operation.direction
        return layer_kernels(self.spec, layer, direction, self.call.x.dtype)

    def weights(self, layer: LayerKernels) -> list[Tensor | None]:
        """w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors; None where one is absent."""
        params = self.call.params
        return [None if place is None else params[place] for place in layer.places]

    def plan(self, layer: LayerKernels, operation: Loop, purpose: str) -> "LoopPlan":
        """How a loop runs; for `purpose` see `kernels.cpu.plan`."""
        call = self.call
        return loop_plan(
            layer.layout, purpose, self.steps, self.batch, launch.threads(),
            operation.direction == 1, layer.places[0] is None, call.lengths is not None,
            call.reset is not None,
        )  # fmt: skip

    def fill(
        self, args: "LoopArgs", layer: LayerKernels, operation: Loop, x: Tensor, y: Tensor,
        weights: Sequence[Tensor | None], saved: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Sets the arguments that both loops take.

        Args:
            x: what the layer reads (T, B, I); y: its output (T, B, D*O).
            weights: in the order of `WEIGHTS`, as the kernel reads them.
            saved: memory for saved activations, or these; empty in inference.
        """
        call = self.call
        args.x = x.data_ptr()
        args.x_step, args.x_row, _ = x.stride()
        args.y, args.y_step, args.y_row = self.part(operation, y)
        for name, weight in zip(WEIGHTS, weights):
            if weight is not None:
                setattr(args, name, weight.data_ptr())
        if call.lengths is not None and self.order is not None:
            args.lengths, args.order = call.lengths.data_ptr(), self.order.data_ptr()
        if call.reset is not None:
            args.reset = call.reset.data_ptr()
        for place, tensor in zip(layer.layout.saved_places, saved):
            setattr(args, SAVED[place], tensor.data_ptr())
        if call.states:
            args.initial = addresses(layer, call.states)
        if call.reset_states:
            args.reset_state = addresses(layer, call.reset_states)
        if operation.layer and call.problem.drops and call.seed is not None:
            self._drop(args, operation.layer - 1, call.seed)

    def _drop(self, args: "LoopArgs", below: int, seed: Tensor) -> None:
        """The dropout mask of the output of the layer below."""
        p = self.spec.dropout
        args.drop = 1
        args.drop_low, args.drop_high, offset = philox.split(seed)
        args.drop_word = (below + 256 * offset) & philox.WORD
        args.drop_threshold, args.drop_scale = philox.threshold(p), philox.scale(p)

    def part(self, operation: Loop, y: Tensor) -> tuple[int, int, int]:
        """Address and strides of a direction's part of (T, B, D*O)."""
        offset = operation.direction * self.spec.output_size * y.element_size()
        return y.data_ptr() + offset, y.stride(0), y.stride(1)

    def run(self, loop: "CompiledFunction", args: "LoopArgs", plan: "LoopPlan") -> None:
        """Runs a loop, with memory of its own beside the tensors."""
        scratch = torch.empty(plan.scratch, dtype=torch.uint8, device="cpu")
        args.scratch = scratch.data_ptr()
        if plan.counters:
            counters = (ctypes.c_int64 * plan.counters)()
            args.counters = ctypes.addressof(counters)
        launch.run(loop, args, plan.tasks)


def padded(vectors: Sequence[Tensor | None], width: int) -> Tensor | None:
    """Per-unit vectors as rows (vectors, width), the padding zero; None where there are none."""
    if not vectors:
        return None
    rows = torch.stack([vector for vector in vectors if vector is not None])
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))


def addresses(layer: LayerKernels, states: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Where this layer and direction lies in each of the states (L*D, ...); 0 where absent."""
    return tuple(
        0 if state is None else state.data_ptr() + layer.chain * state.stride(0) * state.itemsize
        for state in states
    )
