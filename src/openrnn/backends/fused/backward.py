"""The backward pass on the GPU: reverse time loops, then products over the steps of each chunk."""

from torch import Tensor

from openrnn.backends.base import Call, Cotangents, Gradients, Needs, zeros_of
from openrnn.backends.fused import prepared
from openrnn.backends.fused.copies import copied
from openrnn.backends.fused.dropout import masked
from openrnn.backends.fused.forward_loop import ForwardLoops
from openrnn.backends.fused.launches import Weights, address, fill_flags
from openrnn.backends.fused.layer_gradients import LayerGradients, LayerTensors
from openrnn.backends.fused.lengths import SortedLengths
from openrnn.schedule import Chunking
from openrnn.schedule.operations import (
    BeginLayer,
    Dropout,
    FillFlags,
    FinishWeights,
    GradientProducts,
    Loop,
    OfChunk,
)


class Backward(ForwardLoops):
    """The operations of a backward pass.

    Args:
        saved: what forward saved of each layer and direction, see `Forward`.
        outputs: y of each layer (T, B, D*H).
        grads: of the outputs of the call; needs: which gradients are wanted.
        chunkings: of each layer, of each direction.

    Attributes:
        d_initial, d_reset_states, d_params: the gradients, None where not wanted.
        dx: of the input of the current layer; the first layer's is that of the call.
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
        self.d_initial = zeros_of(call.states, needs.states)
        self.d_reset_states = zeros_of(call.reset_states, needs.reset_states)
        self.d_params: list[Tensor | None] = [None] * len(call.params)
        self._flags = self.backward_flags(
            any(grad is not None for grad in self.d_all_states),
            any(grad is not None for grad in self.d_reset_states),
        )
        self.dy = grads.y  # of the current layer
        self.dx: Tensor | None = None
        self._input = call.x  # what the current layer read
        self._masked: Tensor | None = None  # the same, where a dropout mask precedes it
        self._current: dict[int, LayerGradients] = {}  # of the layer, by direction
        self._chunk_states: Tensor | None = None  # gradients that the previous chunk left
        self._recompute_buffers: tuple[Tensor, Tensor] | None = None  # y, saved activations

    def begin_layer(self, operation: BeginLayer) -> None:
        layer, direction = operation.layer, operation.direction
        if direction == 0:
            if layer < self.spec.num_layers - 1:
                self.dy = self.dx
            self.dx, self._input = None, self._input_of(layer)
        weights = self.weights(layer, direction)
        loop = prepared.loop_for(weights.layer, self.batch, self._flags)
        self._chunk_states = None
        other = self._current.get(0)  # the other direction, if it has not finished
        dx = self.dx if other is None else other.dx
        tensors = LayerTensors(self._input, self.outputs[layer], self.dy, dx)
        self._current[direction] = LayerGradients(
            self, weights, self.chunkings[layer][direction], loop, tensors,
            weights.layer.wanted(self.needs),
        )  # fmt: skip

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
        elif self.dx is not None:
            self.dx = masked(self.call, operation.layer, self.dx)

    # recomputed activations

    def chunk_input(self, operation: OfChunk) -> Tensor:
        return operation.chunk.of(self._input)

    def chunk_output(self, operation: OfChunk) -> Tensor:
        return self._recomputed(operation)[0]

    def _recomputed(self, operation: OfChunk) -> tuple[Tensor, Tensor]:
        """Memory for y and saved activations of a chunk whose forward loop runs again."""
        if self._recompute_buffers is None:
            steps, layer = operation.chunk.steps, self._current[operation.direction].layer
            width = self.spec.directions * layer.hidden
            saved = self.empty(*layer.saved_shape(steps, self.batch))
            self._recompute_buffers = self.empty(steps, self.batch, width), saved
        return self._recompute_buffers

    def forward_loop(self, weights: Weights) -> prepared.PreparedLoop:
        return prepared.loop_for(weights.layer, self.batch, self.forward_flags(False, True))

    def fill_flags(self, operation: FillFlags) -> None:
        if operation.backward:
            fill_flags(self._current[operation.direction].d_gates(operation.chunk))
        else:
            super().fill_flags(operation)

    def loop(self, operation: Loop) -> None:
        if operation.kind == "recompute":
            self._recompute(operation)
        else:
            self._backward(operation)

    def _recompute(self, operation: Loop) -> None:
        """Runs a chunk's forward loop again, for its saved activations."""
        chunk, index = operation.chunk, self._current[operation.direction].layer.index
        y, saved = self._recomputed(operation)
        before = self.saved[index][chunk.number - 1] if chunk.number else None
        # the states that the chunk ends with are not read: forward has written them
        self.launch_forward(operation, y, saved, (before, self.chunk_states()), (), ())

    def _backward(self, operation: Loop) -> None:
        at, chunk = self._current[operation.direction], operation.chunk
        layer, dy, d_gates = at.layer, at.dy, at.d_gates(chunk)
        buffers = self._recompute_buffers
        saved = buffers[1] if buffers else chunk.of(self.saved[layer.index])
        room = self.chunk_states() if chunk.number else None
        dy_step, dy_row, _ = (0, 0, 0) if dy is None else dy.stride()
        way = 1 if operation.direction else -1  # against that of the forward loop
        lengths, order, reset = self.mask_addresses(chunk)
        words = at.loop.args.words(
            weight=at.weights.recurrent_by_planes.data_ptr(),
            saved=saved.data_ptr(),
            dy=0 if dy is None else chunk.of(dy).data_ptr(),
            dy_step_bytes=way * dy_step * d_gates.element_size(),
            dy_row=dy_row,
            d_gates=d_gates.data_ptr(),
            sums=at.sums_of(chunk),
            vectors=address(at.weights.unit_vectors),
            lengths=lengths,
            order=order,
            reset=reset,
            chunk_in=address(self._chunk_states),
            chunk_out=address(room),
            steps=chunk.steps,
            d_final=self.states(layer, self.d_finals),
            d_all_states=self.states(layer, self.d_all_states, chunk.begin),
            d_initial=self.states(layer, self.d_initial),
            d_reset_state=self.states(layer, self.d_reset_states),
        )
        at.loop.launch(words, self.launch_event(operation.signals))
        self._chunk_states, self._recompute_buffers = room, None

    def gradient_products(self, operation: GradientProducts) -> None:
        self._current[operation.direction].products(operation.chunk)

    def finish_weights(self, operation: FinishWeights) -> None:
        at = self._current.pop(operation.direction)
        for place, grad in zip(at.layer.places, at.finished()):
            if place is not None:
                self.d_params[place] = grad
        self.dx = at.dx

    @property
    def gradients(self) -> Gradients:
        """What the call asked for."""
        return Gradients(
            self.dx if self.needs.x else None, self.d_initial, self.d_params, self.d_reset_states
        )
