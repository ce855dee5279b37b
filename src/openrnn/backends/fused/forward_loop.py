"""One chunk of a forward time loop: its input product, its flag buffer, its launch.

The forward pass runs every chunk once, and backward with recompute once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from openrnn.backends.base import Call
from openrnn.backends.fused import kernels
from openrnn.backends.fused.launches import Launches, Weights, address, aligned, dense, fill_flags
from openrnn.backends.fused.lengths import SortedLengths
from openrnn.codegen.config import KernelConfig
from openrnn.kernels.cuda.args import ForwardArgs
from openrnn.native.cublaslt import Matrix, multiply
from openrnn.native.nvrtc import CudaKernel
from openrnn.schedule.operations import FillFlags, InputProduct, MakeRoom, OfChunk


@dataclass(slots=True)
class Inputs:
    """What a forward loop reads besides weights, states and masks.

    Attributes:
        x_gates: x W_ih^T (T, B, G*units), or x itself for a skip input.
        gate_stride: values from one gate to the next; 0 where all gates read the same x.
        flags: a grid's flag buffer; None where y is it, or where there is none.
        kernel, config: of the loop.
    """

    x_gates: Tensor
    gate_stride: int
    flags: Tensor | None
    kernel: CudaKernel
    config: KernelConfig


def _key(operation: OfChunk) -> tuple[int, int, int]:
    return operation.layer, operation.direction, operation.chunk.number


class ForwardLoops(Launches):
    """The operations of a chunk that the forward pass and backward with recompute share."""

    def __init__(self, call: Call, lengths: SortedLengths | None, spin_limit: int = 0) -> None:
        super().__init__(call, lengths, spin_limit)
        self._inputs: dict[tuple[int, int, int], Inputs] = {}

    def chunk_input(self, operation: OfChunk) -> Tensor:
        """What the layer reads in the chunk (T, B, I)."""
        raise NotImplementedError

    def chunk_output(self, operation: OfChunk) -> Tensor:
        """Where the chunk's y (T, B, D*H) is written."""
        raise NotImplementedError

    def forward_kernel(self, weights: Weights) -> tuple[CudaKernel, KernelConfig]:
        """The forward kernel and its configuration."""
        raise NotImplementedError

    def _inputs_of(self, operation: OfChunk) -> Inputs:
        """What the chunk's loop will read, with memory for it."""
        found = self._inputs.get(_key(operation))
        if found is None:
            found = self._inputs[_key(operation)] = self._new_inputs(operation)
        return found

    def _new_inputs(self, operation: OfChunk) -> Inputs:
        weights, x = self.weights(operation.layer, operation.direction), self.chunk_input(operation)
        layer, (kernel, config) = weights.kernels, self.forward_kernel(weights)
        flags: Tensor | None = None
        masks = self.lengths is not None or self.reset is not None
        # y is the flag buffer where it holds exactly the values that blocks send each other
        own = masks or not layer.exact or config.half_operands
        if config.clusters > 1 and own:
            sizes = (operation.chunk.steps, self.batch, layer.units)
            flags = x.new_empty(sizes, dtype=torch.float16 if config.half_operands else None)
        if weights.w_ih is not None:
            width = layer.gates * layer.units
            return Inputs(x.new_empty(*x.shape[:2], width), layer.units, flags, kernel, config)
        wide = x if layer.exact else pad(x, (0, layer.units - layer.hidden))
        ready = wide.stride(-1) == 1 and aligned(wide)
        return Inputs(wide if ready else dense(wide), 0, flags, kernel, config)

    def make_room(self, operation: MakeRoom) -> None:
        self._inputs_of(operation)

    def input_product(self, operation: InputProduct) -> None:
        weights, inputs = (
            self.weights(operation.layer, operation.direction), self._inputs_of(operation)
        )  # fmt: skip
        if weights.w_ih is None:
            return
        layer, x = weights.kernels, self.chunk_input(operation).contiguous()
        (steps, batch, inner), width = x.shape, layer.gates * layer.units
        # where H is no multiple of 8, gate by gate: the padding between gates is not read
        columns, count = (width, 1) if layer.exact else (layer.hidden, layer.gates)
        multiply(
            layer.dtype, layer.device, (steps * batch, columns, inner),
            Matrix(x.data_ptr(), inner),
            Matrix(weights.w_ih.data_ptr(), inner, True, columns * inner),
            Matrix(inputs.x_gates.data_ptr(), width, False, layer.units), count=count,
        )  # fmt: skip

    def fill_flags(self, operation: FillFlags) -> None:
        flags = self._inputs_of(operation).flags
        if flags is None:  # y is the flag buffer
            layer = self.weights(operation.layer, operation.direction).kernels
            start = operation.direction * layer.hidden
            flags = self.chunk_output(operation)[..., start : start + layer.hidden]
        fill_flags(flags)

    def launch_forward(
        self,
        operation: OfChunk,
        y: Tensor,
        saved: Tensor | None,
        chunk_states: tuple[Tensor | None, Tensor | None],
        finals: Sequence[Tensor],
        all_states: Sequence[Tensor],
        signals: bool = False,
    ) -> None:
        """Launches the loop.

        Args:
            y, saved: of the steps of the chunk.
            chunk_states: what the previous chunk left, and memory for what this one leaves.
            finals, all_states: of all steps.
        """
        weights, chunk = self.weights(operation.layer, operation.direction), operation.chunk
        layer, reverse = weights.kernels, operation.direction
        inputs = self._inputs.pop(_key(operation))
        way, size = -1 if reverse else 1, y.element_size()
        x_step, x_row, _ = inputs.x_gates.stride()
        y_step, y_row, _ = y.stride()
        args = ForwardArgs(
            **self.common(weights, chunk, chunk_states, way),
            weight=weights.recurrent.data_ptr(),
            x=inputs.x_gates.data_ptr(),
            x_step_bytes=way * x_step * size,
            x_row=x_row,
            x_gate=inputs.gate_stride,
            y=y.data_ptr() + reverse * layer.hidden * size,
            y_step_bytes=way * y_step * size,
            y_row=y_row,
            flag_buffer=address(inputs.flags),
            saved=address(saved),
            bias_x=address(weights.b_ih),
            bias_r=address(weights.b_hh),
            initial=self.states(layer, self.call.states),
            reset_state=self.states(layer, self.call.reset_states),
            final=self.states(layer, finals),
            all_states=self.states(layer, all_states, chunk.begin),
        )
        kernels.launch(inputs.kernel, inputs.config, args, self.launch_event(signals))
