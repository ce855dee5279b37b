"""The forward pass on the GPU."""

from dataclasses import replace

from torch import Tensor

from openrnn.backends.base import Call
from openrnn.backends.fused.dropout import masked
from openrnn.backends.fused.forward_loop import ForwardLoops
from openrnn.backends.fused.lengths import SortedLengths
from openrnn.backends.fused.pass_runner import fill_flags, pad_all
from openrnn.backends.fused.prepared import PreparedLoop
from openrnn.backends.fused.single_step import launch_forward
from openrnn.schedule.operations import (
    BeginLayer,
    Dropout,
    FillFlags,
    Loop,
    OfChunk,
    StackLoop,
    Step,
)
from openrnn.tuning import chunks


class ForwardPass(ForwardLoops):
    """The operations of a forward pass.

    Args:
        saved: memory of each layer and direction for saved activations (T, ...), or with recompute
            for the states between chunks; empty in inference.
        lower: memory for y of all layers but the last (L - 1, T, B, D*H); None: each gets its own.
        all_states: memory for the states of all steps, in the order of the cell's states, or empty.

    Attributes:
        finals: the final states, in the same order.
        outputs: y of each layer (T, B, D*H).
        inputs: what each layer reads: x, then outputs with their dropout masks.
    """

    def __init__(
        self,
        call: Call,
        lengths: SortedLengths | None,
        saved: list[Tensor],
        lower: Tensor | None,
        all_states: list[Tensor],
        spin_limit: int = 0,
    ) -> None:
        super().__init__(call, lengths, spin_limit)
        self.saved, self.lower, self.all_states = saved, lower, all_states
        chains, batch = self.spec.chains, self.batch
        self.finals = call.results[1:] or [
            self.empty(chains, batch, width) for width in self.spec.state_sizes
        ]
        self.outputs: list[Tensor] = []
        self.inputs = [call.x]
        # a copy of `lower` with padded rows, for which the layers of a stack in one launch poll
        self._padded_lower: Tensor | None = None
        self._recompute = self.spec.recompute == "gates"
        save = bool(saved) and not self._recompute
        self._options = self.forward_options(bool(all_states), save)
        # the states that the previous chunk left, of each layer and direction
        self._carried_states: dict[tuple[int, int], Tensor | None] = {}

    def begin_layer(self, operation: BeginLayer) -> None:
        self._begun[operation.layer, operation.direction] = operation
        if operation.direction == 0:
            width = self.spec.directions * self.spec.hidden_size
            if operation.dropout:
                self.inputs.append(self.empty(self.steps, self.batch, width))
            elif len(self.inputs) == len(self.outputs):  # no mask after the layer below
                self.inputs.append(self.outputs[-1])
            last = operation.layer == self.spec.num_layers - 1
            if operation.layers > 1 and self.lower is None:
                self.lower = self.empty(operation.layers - 1, self.steps, self.batch, width)
            if last and self.call.results:
                y = self.call.results[0]
            elif last or self.lower is None:
                y = self.empty(self.steps, self.batch, width)
            else:
                y = self.lower[operation.layer]
            self.outputs.append(y)
        if operation.layers == 1:  # else `pad_all` makes those of all layers
            # made here, on the main stream, before any loop is launched
            _ = self.weights(operation.layer, operation.direction).recurrent

    def dropout(self, operation: Dropout) -> None:
        layer, chunk, y = operation.layer, operation.chunk, self.outputs[operation.layer]
        if chunk is None:
            self.inputs.append(masked(self.call, layer, y))
        else:
            masked(self.call, layer, chunk.of(y), chunk.begin, chunk.of(self.inputs[layer + 1]))

    def chunk_input(self, operation: OfChunk) -> Tensor:
        return operation.chunk.of(self.inputs[operation.layer])

    def chunk_output(self, operation: OfChunk) -> Tensor:
        return operation.chunk.of(self.outputs[operation.layer])

    def forward_loop(self, layer: int, direction: int) -> PreparedLoop:
        return self.loop_of(self._begun[layer, direction], self._options)

    def loop(self, operation: Loop) -> None:
        chunk, reverse, key = operation.chunk, operation.direction, operation.loop_key
        saved, states_out = None, None
        if self.saved:
            saved = self.saved[operation.layer * self.spec.directions + reverse]
        if chunk.begin > 0 if reverse else chunk.end < self.steps:
            kept = self._kept_states(operation)
            states_out = self.chunk_states() if kept is None else kept
        self.launch_forward(
            operation, self.chunk_output(operation),
            None if saved is None or self._recompute else chunk.of(saved),
            (self._carried_states.get(key), states_out), self.finals, self.all_states,
            operation.signals,
        )  # fmt: skip
        self._carried_states[key] = states_out

    def _kept_states(self, operation: Loop) -> Tensor | None:
        """With recompute memory for the states after a chunk, if a chunk of backward ends there.

        The chunks of a wavefront may be shorter than those of backward.
        """
        if not (self.saved and self._recompute):
            return None
        layer = self.weights(*operation.loop_key).layer
        count = layer.kept_chunks(self.steps, self.batch)
        edges, reverse = chunks.even(count, self.steps), operation.direction
        edge = operation.chunk.begin if reverse else operation.chunk.end
        if edge not in edges:
            return None
        number = edges.index(edge)
        return self.saved[layer.index][count - 1 - number if reverse else number - 1]

    def fill_flags(self, operation: FillFlags) -> None:
        loop = self.inputs_of(operation).loop
        if self.lower is None or loop.config.layers == 1 or loop.has_flag_buffer:
            super().fill_flags(operation)
            return
        polled = self.lower  # y of a layer, by the layer above
        if not self.weights(0, 0).layer.unpadded:
            shape = *polled.shape[:-1], loop.config.units
            polled = self._padded_lower = self.empty(*shape)
        fill_flags(polled.flatten(0, 1))

    def stack_loop(self, operation: StackLoop) -> None:
        words: list[int] = []
        first = self.inputs_of(OfChunk(0, 0, operation.chunk))
        pad_all([self.weights(layer, 0) for layer in range(self.spec.num_layers)])
        for layer, y in enumerate(self.outputs):
            flags = first.flag_buffer
            if self._padded_lower is not None:
                flags = self._padded_lower[layer] if layer < len(self._padded_lower) else None
            inputs = replace(first, weights=self.weights(layer, 0), flag_buffer=flags)
            saved = self.saved[layer] if self.saved and not self._recompute else None
            words += self.forward_words(
                OfChunk(layer, 0, operation.chunk), inputs, y, saved, (None, None), self.finals,
                self.all_states,
            )  # fmt: skip
        first.loop.launch(words)

    def step(self, operation: Step) -> None:
        layer, direction = operation.layer, operation.direction
        saved = self.saved[layer * self.spec.directions + direction] if self.saved else None
        launch_forward(
            self, self.weights(layer, direction), self.inputs[layer], self.outputs[layer], saved,
            self.finals, self.all_states,
        )  # fmt: skip
