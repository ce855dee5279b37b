"""One chunk of a forward time loop: its input product, its flag buffer, its launch.

The forward pass runs every chunk once, and backward with recompute once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.base import Call
from openrnn.backends.fused import prepared, products
from openrnn.backends.fused.copies import aligned, copied, padded_gates, padded_to_16_bytes
from openrnn.backends.fused.layer import LayerKernels
from openrnn.backends.fused.lengths import SortedLengths
from openrnn.backends.fused.pass_runner import PassRunner, Weights, address, fill_flags
from openrnn.memory import allocator_for
from openrnn.schedule.operations import AllocateInputs, FillFlags, InputProduct, OfChunk


class SharedInputs(NamedTuple):
    """Memory that all chunks of a layer use in turn, of the longest one's size: see `Inputs`."""

    x_gates: Tensor
    flag_buffer: Tensor | None


@dataclass(slots=True)
class Inputs:
    """What a forward loop reads besides states and masks.

    Attributes:
        weights, loop: of the layer and direction.
        x_gates: x W_ih^T (T, B, G*units), or x itself, padded to all units, without a matrix.
        flag_buffer: None where y is it, or where there is none.
    """

    weights: Weights
    loop: prepared.PreparedLoop
    x_gates: Tensor
    flag_buffer: Tensor | None


class ForwardLoops(PassRunner):
    """The operations of a chunk that the forward pass and backward with recompute share."""

    def __init__(self, call: Call, lengths: SortedLengths | None, spin_limit: int = 0) -> None:
        super().__init__(call, lengths, spin_limit)
        self._inputs: dict[tuple[int, int, int], Inputs] = {}
        self._shared: dict[tuple[int, int], SharedInputs] = {}  # of layers whose chunks have one

    def chunk_input(self, operation: OfChunk) -> Tensor:
        """What the layer reads in the chunk (T, B, I)."""
        raise NotImplementedError

    def chunk_output(self, operation: OfChunk) -> Tensor:
        """Where the chunk's y (T, B, D*H) is written."""
        raise NotImplementedError

    def forward_loop(self, layer: int, direction: int) -> prepared.PreparedLoop:
        """The loop of a layer and direction."""
        raise NotImplementedError

    def inputs_of(self, operation: OfChunk) -> Inputs:
        """What the chunk's loop will read, with memory for it."""
        found = self._inputs.get(operation.chunk_key)
        if found is None:
            found = self._inputs[operation.chunk_key] = self._new_inputs(operation)
        return found

    def _new_inputs(self, operation: OfChunk) -> Inputs:
        weights, x = self.weights(operation.layer, operation.direction), self.chunk_input(operation)
        layer, steps = weights.layer, operation.chunk.steps
        loop = self.forward_loop(operation.layer, operation.direction)
        shared = self._shared.get(operation.loop_key)
        if shared is not None:
            flags = None if shared.flag_buffer is None else shared.flag_buffer[:steps]
            return Inputs(weights, loop, shared.x_gates[:steps], flags)
        flag_buffer = self._flags_of(loop, layer, steps)
        if not layer.no_input_matrix:
            return Inputs(weights, loop, self._x_gates(layer, steps), flag_buffer)
        if not (layer.unpadded and x.stride(-1) == 1 and aligned(x)):
            x = (
                padded_gates(x, layer.gates, layer.units)
                if layer.x_gate
                else copied(x, layer.units)
            )
        return Inputs(weights, loop, x, flag_buffer)

    def _x_gates(self, layer: LayerKernels, steps: int) -> Tensor:
        return self.empty(steps, self.batch, layer.gates * layer.units)

    def _flags_of(
        self, loop: prepared.PreparedLoop, layer: LayerKernels, steps: int
    ) -> Tensor | None:
        """The flag buffer of a loop that needs one besides."""
        if not loop.has_flag_buffer:
            return None
        half = loop.config.half_operands
        empty = allocator_for(torch.float16, self.call.x.device).empty if half else self.empty
        return empty(*loop.config.flag_buffer(layer.cell, steps, self.batch).shape)

    def allocate_inputs(self, operation: AllocateInputs) -> None:
        if operation.shared:
            weights = self.weights(operation.layer, operation.direction)
            layer, steps = weights.layer, operation.chunk.steps
            self._shared[operation.loop_key] = SharedInputs(
                self._x_gates(layer, steps),
                self._flags_of(
                    self.forward_loop(operation.layer, operation.direction), layer, steps
                ),
            )  # fmt: skip
            # made here, on the main stream
            if weights.w_ih is not None and self._pads_inputs(layer, weights.w_ih.shape[1]):
                _ = weights.input_padded
        else:
            self.inputs_of(operation)

    def input_product(self, operation: InputProduct) -> None:
        inputs = self.inputs_of(operation)
        layer, w_ih = inputs.weights.layer, inputs.weights.w_ih
        if w_ih is None:
            return
        x, rows = self.chunk_input(operation), operation.chunk.steps * self.batch
        padded = self._pads_inputs(layer, x.shape[2])
        if padded:
            x, w_ih = padded_to_16_bytes(x), inputs.weights.input_padded
        elif not x.is_contiguous():
            x = copied(x)
        product = products.input_product(layer, x.shape[2], rows, padded=padded)
        product.run(x.data_ptr(), w_ih.data_ptr(), inputs.x_gates.data_ptr())

    def _pads_inputs(self, layer: LayerKernels, inner: int) -> bool:
        # of all steps, so that it is the same for all chunks
        return products.pads_inputs(layer, inner, self.steps * self.batch)

    def fill_flags(self, operation: FillFlags) -> None:
        inputs = self.inputs_of(operation)
        flag_buffer = inputs.flag_buffer
        if flag_buffer is None:  # y is the flag buffer
            hidden = self.spec.hidden_size
            start = operation.direction * hidden
            flag_buffer = self.chunk_output(operation)[..., start : start + hidden]
        elif inputs.loop.filled is not None:
            flag_buffer = flag_buffer[:, : inputs.loop.filled]
        fill_flags(flag_buffer)

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
        """Launches the loop; y to all_states: see `forward_words`."""
        inputs = self._inputs.pop(operation.chunk_key)
        self.keep(operation, inputs)
        words = self.forward_words(operation, inputs, y, saved, chunk_states, finals, all_states)
        inputs.loop.launch(words, self.launch_event(signals))

    def forward_words(
        self,
        operation: OfChunk,
        inputs: Inputs,
        y: Tensor,
        saved: Tensor | None,
        chunk_states: tuple[Tensor | None, Tensor | None],
        finals: Sequence[Tensor],
        all_states: Sequence[Tensor],
    ) -> list[int]:
        """The arguments of a loop.

        Args:
            y, saved: of the steps of the chunk.
            chunk_states: what the previous chunk left, and memory for what this one leaves.
            finals, all_states: of all steps.
        """
        direction, chunk = operation.direction, operation.chunk
        several_layers = inputs.loop.config.layers > 1
        weights, size = inputs.weights, y.element_size()
        layer = weights.layer
        x_step, x_row, _ = inputs.x_gates.stride()
        (lengths, order, reset), (chunk_in, chunk_out) = self.mask_addresses(chunk), chunk_states
        return inputs.loop.args.words(
            weight=weights.recurrent.data_ptr(),
            w_ih=weights.stack_input.data_ptr() if operation.layer and several_layers else 0,
            x=inputs.x_gates.data_ptr(),
            x_step_bytes=(-x_step if direction else x_step) * size,
            x_row=x_row,
            y=y.data_ptr() + direction * layer.hidden * size,
            flag_buffer=address(inputs.flag_buffer),
            saved=address(saved),
            bias_x=address(weights.b_ih),
            bias_r=address(weights.b_hh),
            vectors=address(weights.unit_vectors),
            lengths=lengths,
            order=order,
            reset=reset,
            chunk_in=address(chunk_in),
            chunk_out=address(chunk_out),
            steps=chunk.steps,
            initial=self.states(layer, self.call.states),
            reset_state=self.states(layer, self.call.reset_states),
            final=self.states(layer, finals),
            all_states=self.states(layer, all_states, chunk.begin),
        )
