"""The backward pass on the GPU: reverse time loops, then products over the steps of each chunk."""

import torch
from torch import Tensor

from openrnn.backends.base import Call, Cotangents, Gradients, Needs, wanted_like
from openrnn.backends.fused import prepared
from openrnn.backends.fused.copies import copied
from openrnn.backends.fused.dropout import masked
from openrnn.backends.fused.forward_loop import ForwardLoops
from openrnn.backends.fused.layer import LayerKernels
from openrnn.backends.fused.layer_gradients import Dx, LayerGradients, LayerTensors
from openrnn.backends.fused.lengths import SortedLengths
from openrnn.backends.fused.pass_runner import address, fill_flags, transpose_all
from openrnn.backends.fused.single_step import launch_backward
from openrnn.backends.fused.stack_gradients import weights_of_stack
from openrnn.schedule import Chunking
from openrnn.schedule.operations import (
    BeginLayer,
    Dropout,
    FillFlags,
    FinishWeights,
    GradientProducts,
    Loop,
    OfChunk,
    StackGradients,
    StackLoop,
    Step,
)


class BackwardPass(ForwardLoops):
    """The operations of a backward pass.

    Args:
        saved: what forward saved of each layer and direction, see `ForwardPass`.
        outputs: y of each layer (T, B, D*H).
        grads: of the outputs of the call; needs: which gradients are wanted.
        chunkings: of each layer, of each direction.

    Attributes:
        d_initial, d_reset_states, d_params: the gradients, None where not wanted.
    """

    def __init__(
        self,
        call: Call,
        lengths: SortedLengths | None,
        saved: list[Tensor],
        outputs: list[Tensor],
        grads: Cotangents,
        needs: Needs,
        chunkings: tuple[tuple[Chunking, ...], ...],
        spin_limit: int = 0,
    ) -> None:
        super().__init__(call, lengths, spin_limit)
        self.saved, self.outputs, self.chunkings, self.needs = saved, outputs, chunkings, needs
        self.d_finals = [None if grad is None else grad.contiguous() for grad in grads.finals]
        self.d_all_states = [
            None if grad is None else grad.contiguous() for grad in grads.all_states
        ]
        # kernels write every row and unit, also of rows of length 0; but single steps, which run
        # only without a mask of resets then, know no gradients of reset states
        self.d_initial = wanted_like(call.states, needs.states, torch.empty_like)
        like = torch.zeros_like if chunkings[0][0].mode == "single_step" else torch.empty_like
        self.d_reset_states = wanted_like(call.reset_states, needs.reset_states, like)
        self.d_params: list[Tensor | None] = [None] * len(call.params)
        self._options = self.backward_options(
            any(grad is not None for grad in self.d_all_states),
            any(grad is not None for grad in self.d_reset_states),
        )
        self._dy = grads.y  # of the layer that began last
        self._dx: dict[int, Dx | None] = {}  # of layers whose lower layer has not begun
        self._input = call.x  # what the layer that began last read
        self._masked: Tensor | None = None  # the same, where a dropout mask precedes it
        self._current: dict[tuple[int, int], LayerGradients] = {}  # by layer and direction
        self._backward_loops: dict[tuple[int, int], prepared.PreparedLoop] = {}
        self._flag_buffers: dict[tuple[int, int], list[Tensor]] = {}  # of loops with their own
        self._all_d_gates: Tensor | None = None  # of a stack
        # gradients of states that the previous chunk left, of each layer and direction
        self._carried_states: dict[tuple[int, int], Tensor | None] = {}
        # y and saved activations of a chunk whose forward loop runs again
        self._recomputed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def begin_layer(self, operation: BeginLayer) -> None:
        layer, direction = operation.layer, operation.direction
        if direction == 0:
            if layer < self.spec.num_layers - 1:
                above = self._dx.pop(layer + 1)
                self._dy = None if above is None else above.memory
            self._input = self._input_of(layer)
        weights = self.weights(layer, direction)
        chunking, parts = self.chunkings[layer][direction], 0
        if chunking.mode != "single_step":
            loop = self.loop_of(operation, self._options)
            self._backward_loops[layer, direction], parts = loop, loop.parts
            if loop.has_flag_buffer and not (chunking.mode == "one_launch" and layer):
                shape = loop.config.flag_buffer(weights.layer.cell, 1, self.batch).shape
                # two where the next chunk's is filled beside a chunk's loop
                alone = chunking.mode != "both_directions"
                some = 1 + (chunking.overlap and alone and len(chunking.chunks) > 1)
                buffers = [self.empty(*shape) for _ in range(some)]
                self._flag_buffers[layer, direction] = buffers
        if chunking.mode == "wavefront" and weights.layer.recompute:
            # made here, on the main stream; all chunks use it in turn
            steps = max(chunk.steps for chunk in chunking.chunks)
            self._recomputed[layer, direction] = self._room_for_recompute(weights.layer, steps)
        # both directions add to one dx
        tensors = LayerTensors(
            self._input, self.outputs[layer], self._dy, self._dx.get(layer) if direction else None
        )
        below, *of_params = weights.layer.wanted(self.needs)
        d_gates: Tensor | None = None
        if chunking.mode == "one_launch":
            below = below and layer == 0  # else it stays in the loop
            d_gates = self._stack_d_gates(weights.layer.width)[layer]
        at = self._current[layer, direction] = LayerGradients(
            self, weights, chunking, parts, tensors, (below, *of_params), d_gates
        )
        self._dx[layer] = at.dx

    def _stack_d_gates(self, width: int) -> Tensor:
        """Memory for the gate gradients of all layers of a stack (L, T, B, width)."""
        if self._all_d_gates is None:
            layers = self.spec.num_layers
            self._all_d_gates = self.empty(layers, self.steps, self.batch, width)
        return self._all_d_gates

    def _input_of(self, layer: int) -> Tensor:
        """What a layer read: x, or the output of the layer below, with its mask."""
        if layer == 0:
            x = self.call.x
            return x if self.lengths is None else copied(x, lengths=self.lengths.lengths)
        found, self._masked = self._masked, None
        return self.outputs[layer - 1] if found is None else found

    def dropout(self, operation: Dropout) -> None:
        if not operation.gradient:
            self._masked = masked(self.call, operation.layer, self.outputs[operation.layer])
            return
        above, chunk = operation.layer + 1, operation.chunk
        found = self._dx[above] if chunk is None else self._current[above, 0].dx
        if found is not None:
            # columns that are padding stay zero
            dx = found.memory if chunk is None else chunk.of(found.memory)
            masked(self.call, operation.layer, dx, 0 if chunk is None else chunk.begin, dx)

    def _at(self, operation: OfChunk) -> LayerGradients:
        return self._current[operation.loop_key]

    # recomputed activations

    def chunk_input(self, operation: OfChunk) -> Tensor:
        return operation.chunk.of(self._at(operation).x)

    def chunk_output(self, operation: OfChunk) -> Tensor:
        return self._recomputed_of(operation)[0]

    def _recomputed_of(self, operation: OfChunk) -> tuple[Tensor, Tensor]:
        """Memory for y and saved activations of a chunk whose forward loop runs again."""
        steps, layer = operation.chunk.steps, self._at(operation).layer
        found = self._recomputed.get(operation.loop_key)
        if found is None:
            found = self._room_for_recompute(layer, steps)
            self._recomputed[operation.loop_key] = found
        y, saved = found
        return y[:steps], saved[:steps]

    def _room_for_recompute(self, layer: LayerKernels, steps: int) -> tuple[Tensor, Tensor]:
        y = self.empty(steps, self.batch, self.spec.directions * layer.hidden)
        return y, self.empty(*layer.saved_shape(steps, self.batch))

    def forward_loop(self, layer: int, direction: int) -> prepared.PreparedLoop:
        return prepared.loop_for(
            self.weights(layer, direction).layer, self.batch, self.forward_options(False, True), 1
        )

    def fill_flags(self, operation: FillFlags) -> None:
        if not operation.backward:
            super().fill_flags(operation)
        elif (buffer := self._flag_buffer(operation)) is not None:
            fill_flags(buffer[:, : self._backward_loops[operation.loop_key].filled])
        elif self._all_d_gates is not None:  # each layer polls for those of the layer above
            fill_flags(self._all_d_gates[1:].flatten(0, 1))
        else:
            fill_flags(self._at(operation).d_gates(operation.chunk))

    def _flag_buffer(self, operation: OfChunk) -> Tensor | None:
        """The flag buffer of a chunk's backward loop, None where the gate gradients are it."""
        buffers = self._flag_buffers.get(operation.loop_key)
        return buffers[operation.chunk.number % len(buffers)] if buffers else None

    def loop(self, operation: Loop) -> None:
        if operation.kind == "recompute":
            self._recompute(operation)
        else:
            self._backward(operation)

    def _recompute(self, operation: Loop) -> None:
        """Runs a chunk's forward loop again, for its saved activations."""
        chunk, index = operation.chunk, self._at(operation).layer.index
        y, saved = self._recomputed_of(operation)
        before = self.saved[index][chunk.number - 1] if chunk.number else None
        # the states that the chunk ends with are not read: forward has written them
        self.launch_forward(operation, y, saved, (before, self.chunk_states()), (), ())

    def _backward(self, operation: Loop) -> None:
        chunk, key = operation.chunk, operation.loop_key
        saved = self._recomputed_of(operation)[1] if key in self._recomputed else None
        states_out = self.chunk_states() if chunk.number else None
        words = self._words(operation, saved, self._flag_buffer(operation), states_out)
        self._backward_loops[key].launch(words, self.launch_event(operation.signals))
        self._carried_states[key] = states_out
        if self.chunkings[operation.layer][operation.direction].mode != "wavefront":
            self._recomputed.pop(key, None)

    def stack_loop(self, operation: StackLoop) -> None:
        each = [OfChunk(layer, 0, operation.chunk) for layer in range(self.spec.num_layers)]
        transpose_all([self.weights(one.layer, 0) for one in each])
        flag_buffer, words = self._flag_buffer(each[0]), list[int]()
        for one in each:
            words += self._words(one, None, flag_buffer, None)
        self._backward_loops[0, 0].launch(words)

    def _words(
        self, operation: OfChunk, saved: Tensor | None, flag_buffer: Tensor | None,
        states_out: Tensor | None,
    ) -> list[int]:  # fmt: skip
        """The arguments of a chunk's loop.

        Args:
            saved: recomputed activations of the chunk; None: forward saved them.
            flag_buffer: None where the gate gradients are it, or where there is none.
            states_out: memory for the gradients of states that the chunk leaves.
        """
        at, chunk, key = self._at(operation), operation.chunk, operation.loop_key
        layer, dy, d_gates = at.layer, at.dy, at.d_gates(chunk)
        saved = chunk.of(self.saved[layer.index]) if saved is None else saved
        dy_step, dy_row, _ = (0, 0, 0) if dy is None else dy.stride()
        way = 1 if operation.direction else -1  # against that of the forward loop
        lengths, order, reset = self.mask_addresses(chunk)
        loop, above = self._backward_loops[key], 0
        if loop.config.layers > 1 and operation.layer + 1 < self.spec.num_layers:
            above = address(self.weights(operation.layer + 1, 0).input_transposed)
        return loop.args.words(
            weight=at.weights.recurrent_transposed.data_ptr(),
            w_above=above,
            saved=saved.data_ptr(),
            dy=0 if dy is None else chunk.of(dy).data_ptr(),
            dy_step_bytes=way * dy_step * d_gates.element_size(),
            dy_row=dy_row,
            d_gates=d_gates.data_ptr(),
            flag_buffer=address(flag_buffer),
            sums=at.sums_of(chunk),
            vectors=address(at.weights.unit_vectors),
            lengths=lengths,
            order=order,
            reset=reset,
            chunk_in=address(self._carried_states.get(key)),
            chunk_out=address(states_out),
            steps=chunk.steps,
            d_final=self.states(layer, self.d_finals),
            d_all_states=self.states(layer, self.d_all_states, chunk.begin),
            d_initial=self.states(layer, self.d_initial),
            d_reset_state=self.states(layer, self.d_reset_states),
        )

    def step(self, operation: Step) -> None:
        at = self._at(operation)
        saved, grads = self.saved[at.layer.index], (self.d_finals, self.d_all_states)
        launch_backward(self, at, operation.chunk, saved, grads, self.d_initial)

    def gradient_products(self, operation: GradientProducts) -> None:
        self._at(operation).products(self, operation.chunk, operation.of)

    def stack_gradients(self, operation: StackGradients) -> None:
        each = [self._current[layer, 0] for layer in range(self.spec.num_layers)]
        weights_of_stack(self, each, operation.chunk)

    def finish_weights(self, operation: FinishWeights) -> None:
        at = self._current.pop((operation.layer, operation.direction))
        self._flag_buffers.pop((operation.layer, operation.direction), None)
        for index, grad in zip(at.layer.param_indices, at.finished()):
            if index is not None:
                self.d_params[index] = grad

    @property
    def gradients(self) -> Gradients:
        """What the call asked for."""
        dx = self._dx.get(0) if self.needs.x else None
        return Gradients(
            None if dx is None else dx.dense, self.d_initial, self.d_params,
            self.d_reset_states,
        )  # fmt: skip
