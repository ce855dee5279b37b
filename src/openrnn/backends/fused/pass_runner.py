"""What the forward and the backward pass of a call share: weights, masks, streams."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.base import Call
from openrnn.backends.fused import kernels
from openrnn.backends.fused.copies import ALIGNMENT, dense, stacked, whole_pieces
from openrnn.backends.fused.layer import (
    BackwardOptions,
    ForwardOptions,
    LayerKernels,
    LoopOptions,
    layer_of_call,
)
from openrnn.backends.fused.lengths import SortedLengths, cut_lengths
from openrnn.backends.fused.prepared import PreparedLoop, loop_for
from openrnn.codegen.tiles import whole_tiles
from openrnn.kernels.cuda.args import FillFlagsArgs
from openrnn.memory import allocator_for
from openrnn.native.recording import CURRENT, RecordedWait, RecordedWaitForLaunch
from openrnn.native.side_stream import Streams, streams
from openrnn.schedule import Chunk
from openrnn.schedule.operations import (
    MAIN,
    BeginLayer,
    CutMasks,
    Operation,
    Wait,
    WaitForLaunch,
)


def address(tensor: Tensor | None) -> int:
    """Where a tensor begins, 0 for None: a field of a launch."""
    return 0 if tensor is None else tensor.data_ptr()


def fill_flags(buffer: Tensor) -> None:
    """Sets all bits of a flag buffer (T, B, columns): "not arrived yet", a NaN or a -1.

    Its rows are multiples of 16 bytes, and `stride(1)` apart, also from a step's last to the next.
    """
    steps, batch, columns = buffer.shape
    size = buffer.element_size()
    pieces = columns * size // ALIGNMENT
    # the kernel looks at no values: one compiled for float32 serves every dtype
    kernel = kernels.plain("fill_flags", "float32", buffer.device.index or 0)
    args = FillFlagsArgs(
        buffer=buffer.data_ptr(), rows=steps * batch, row_bytes=buffer.stride(1) * size,
        pieces=pieces,
    )  # fmt: skip
    kernel.launch(-(-steps * batch * pieces // kernel.threads), args.words())


class Weights:
    """The parameters of one layer and direction in a call, as kernels and products read them.

    Args:
        layer: what no call changes of the layer and direction.

    Attributes:
        w_ih (G*H, I), None without one; w_hh (G*H, H); b_ih, b_hh (G*H,) or None.
        unit_vectors: (number, H), or None.
    """

    def __init__(self, call: Call, layer: LayerKernels) -> None:
        self.layer = layer
        w_ih, w_hh, b_ih, b_hh = self.layer.matrix_indices
        params = call.params
        self.w_ih = None if w_ih is None else params[w_ih].contiguous()
        self.w_hh = params[w_hh].contiguous()
        self.b_ih = None if b_ih is None else params[b_ih].contiguous()
        self.b_hh = None if b_hh is None else params[b_hh].contiguous()
        self.unit_vectors: Tensor | None = None
        if self.layer.vectors:
            self.unit_vectors = stacked([params[index] for index in self.layer.vector_indices])
        self._recurrent: Tensor | None = None
        self._input_padded: Tensor | None = None
        self._input_by_planes: Tensor | None = None
        self._stack_input: Tensor | None = None
        self._input_transposed: Tensor | None = None
        self._recurrent_transposed: Tensor | None = None
        self._recurrent_by_planes: Tensor | None = None

    def _with_all_units(self, matrix: Tensor) -> Tensor:
        """A matrix (G*H, H) as (G*units, units)."""
        layer = self.layer
        if layer.unpadded:
            return dense(matrix)
        return layer.permuted(matrix, layer.own_order, False, layer.units)

    # made when first read, and not by cached_property, whose lock costs 2 us before Python 3.12

    @property
    def recurrent(self) -> Tensor:
        """R (G*units, units) as the forward loop reads it, zeros past H."""
        if self._recurrent is None:
            self._recurrent = self._with_all_units(self.w_hh)
        return self._recurrent

    @property
    def input_matrix(self) -> Tensor:
        """W_ih (G*H, I) of a layer that has one."""
        if self.w_ih is None:
            raise ValueError("this layer has no input matrix")
        return self.w_ih

    @property
    def input_padded(self) -> Tensor:
        """W_ih (G, units, I padded to rows of 16 bytes), zeros past H and past I."""
        if self._input_padded is None:
            layer, matrix = self.layer, self.input_matrix
            width = whole_pieces(matrix.shape[1], matrix.element_size())
            self._input_padded = layer.permuted(matrix, layer.own_order, False, width)
        return self._input_padded

    @property
    def input_transposed(self) -> Tensor:
        """W_ih (width, G, units) transposed, zeros past I.

        The width is I rounded up to a multiple of 8, or all units where the layer below has padded
        ones. Gates are in the order of the gate gradients' first planes. Backward of a stack reads
        it, too, for the layer below.
        """
        if self._input_transposed is None:
            layer, matrix = self.layer, self.input_matrix
            width = layer.units if layer.feeds_padded else whole_tiles(matrix.shape[1])
            self._input_transposed = layer.permuted(matrix, layer.input_order, True, width)
        return self._input_transposed

    @property
    def input_by_planes(self) -> Tensor:
        """W_ih (G*units, I) with its gates in the order of the gate gradients' first planes."""
        if self._input_by_planes is None:
            layer, weight = self.layer, self.input_matrix
            as_it_is = layer.unpadded and len(layer.input_spans) == 1
            made = weight if as_it_is else layer.permuted(weight, layer.input_order, False)
            self._input_by_planes = made
        return self._input_by_planes

    @property
    def stack_input(self) -> Tensor:
        """W_ih (G*units, units) as the forward loop of a stack reads it, zeros past H."""
        if self._stack_input is None:
            self._stack_input = self._with_all_units(self.input_matrix)
        return self._stack_input

    @property
    def recurrent_transposed(self) -> Tensor:
        """R (units, G, units) transposed, its gates in the order of the last planes."""
        if self._recurrent_transposed is None:
            layer = self.layer
            made = layer.permuted(self.w_hh, layer.recurrent_order, True, layer.units)
            self._recurrent_transposed = made
        return self._recurrent_transposed

    @property
    def recurrent_by_planes(self) -> Tensor:
        """R (G*H, H) with its gates in the order of the gate gradients' last planes.

        Only where units are not padded.
        """
        if self._recurrent_by_planes is None:
            layer = self.layer
            as_it_is = len(layer.recurrent_spans) == 1
            self._recurrent_by_planes = (
                self.w_hh if as_it_is else layer.permuted(self.w_hh, layer.recurrent_order, False)
            )
        return self._recurrent_by_planes


def transpose_all(layers: Sequence[Weights]) -> None:
    """Transposes all matrices that backward of a stack reads, by one launch."""
    layer = layers[0].layer
    recurrent, inputs = _permuted(layers, layer.recurrent_order, layer.input_order, True)
    for one, made in zip(layers, recurrent):
        one._recurrent_transposed = made
    for one, made in zip(layers[1:], inputs):
        one._input_transposed = made


def pad_all(layers: Sequence[Weights]) -> None:
    """Pads all matrices that forward of a stack reads, by one launch, where units are padded."""
    layer = layers[0].layer
    if layer.unpadded:
        return
    recurrent, inputs = _permuted(layers, layer.own_order, layer.own_order, False)
    for one, made in zip(layers, recurrent):
        one._recurrent = made
    for one, made in zip(layers[1:], inputs):
        one._stack_input = made


def _permuted(
    layers: Sequence[Weights], recurrent_order: tuple[int, ...], input_order: tuple[int, ...],
    transposed: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """R of all layers and W_ih of all but the first, see `LayerKernels.permuted`."""
    layer = layers[0].layer
    jobs = [layer.permutation(one.w_hh, recurrent_order, transposed, layer.units) for one in layers]
    jobs += [
        layer.permutation(one.input_matrix, input_order, transposed, layer.units)
        for one in layers[1:]
    ]
    blocks = jobs[0][2]  # all matrices have one shape
    words = [words for _, words, _ in jobs]
    kernels.launch_several("permute_weights", layer.dtype_name, layer.device, words, blocks)
    made = [made for made, _, _ in jobs]
    return made[: len(layers)], made[len(layers) :]


class Masks(NamedTuple):
    """Lengths and resets inside a chunk."""

    lengths: SortedLengths | None
    reset: Tensor | None


class PassRunner:
    """The state of one pass, which its operations share.

    Args:
        call: with contiguous states.
        lengths: sorted, or None where every row has all steps.
        spin_limit: see `kernels.kernel`.

    Attributes:
        empty: gives fresh memory of x's dtype.
    """

    def __init__(self, call: Call, lengths: SortedLengths | None, spin_limit: int = 0) -> None:
        self.call, self.lengths, self.spin_limit = call, lengths, spin_limit
        self.spec = call.problem.spec
        self.device = call.x.device.index or 0
        self.steps, self.batch = call.x.shape[0], call.x.shape[1]
        self.empty = allocator_for(call.x.dtype, call.x.device).empty
        self.reset = None if call.reset is None else call.reset.contiguous()
        self._weights: dict[tuple[int, int], Weights] = {}
        self._masks: dict[Chunk, Masks] = {}
        self._sides: dict[int, list[object]] = {}  # side streams with work, and what that reads
        self._begun: dict[tuple[int, int], BeginLayer] = {}  # by layer and direction

    def weights(self, layer: int, direction: int) -> Weights:
        """The parameters of a layer and direction."""
        found = self._weights.get((layer, direction))
        if found is None:
            index = layer * self.spec.directions + direction
            here = layer_of_call(
                self.spec, index, self.call.x.dtype, self.device, self.steps, self.batch,
                self.spin_limit,
            )  # fmt: skip
            found = self._weights[layer, direction] = Weights(self.call, here)
        return found

    def masks(self, chunk: Chunk) -> Masks:
        """Lengths and resets of a chunk, counted from its first step."""
        if chunk.steps == self.steps:
            return Masks(self.lengths, self.reset)
        found = self._masks.get(chunk)
        if found is None:
            lengths = None if self.lengths is None else cut_lengths(self.lengths, chunk)
            reset = None if self.reset is None else self.reset[chunk.begin : chunk.end]
            found = self._masks[chunk] = Masks(lengths, reset)
        return found

    def mask_addresses(self, chunk: Chunk) -> tuple[int, int, int]:
        """Where the lengths, the order of rows and the resets of a chunk lie, 0 for none."""
        if self.lengths is None and self.reset is None:
            return 0, 0, 0
        lengths, reset = self.masks(chunk)
        if lengths is None:
            return 0, 0, address(reset)
        return lengths.lengths.data_ptr(), lengths.order.data_ptr(), address(reset)

    def forward_options(self, all_states: bool, save: bool) -> ForwardOptions:
        """What the forward kernel does besides."""
        masks = self.lengths is not None, self.reset is not None
        return ForwardOptions(*masks, all_states, bool(self.call.reset_states), save)

    def backward_options(self, all_states: bool, reset_state: bool) -> BackwardOptions:
        """What the backward kernel does besides."""
        masks = self.lengths is not None, self.reset is not None
        return BackwardOptions(*masks, all_states, reset_state)

    def empty_float32(self, *shape: int) -> Tensor:
        """Fresh memory for values that are summed over chunks, rows or steps."""
        return allocator_for(torch.float32, self.call.x.device).empty(*shape)

    def chunk_states(self) -> Tensor:
        """Memory for the states between two chunks: float32 (states, B, H)."""
        return self.empty_float32(len(self.spec.states), self.batch, self.spec.hidden_size)

    def loop_of(self, begun: BeginLayer, options: LoopOptions) -> PreparedLoop:
        """The loop of a layer and direction that has begun."""
        layer = self.weights(begun.layer, begun.direction).layer
        return loop_for(layer, self.batch, options, begun.loops, begun.layers)

    def states(
        self, layer: LayerKernels, group: Sequence[Tensor | None], begin: int = 0
    ) -> Sequence[int]:
        """Addresses of the layer's and direction's part of each state (L*D, ...); 0 for None.

        Of states of all steps (L*D, T, ...), those from `begin` on.
        """
        index = layer.index
        if not group:
            return layer.nulls
        return [
            0 if state is None
            else state.data_ptr()
            + (index * state.stride(0) + begin * state.stride(1)) * state.element_size()
            for state in group
        ]  # fmt: skip

    # streams

    @cached_property
    def _streams(self) -> Streams:
        return streams(self.device)

    def on_stream(self, number: int) -> AbstractContextManager[object]:
        """Within it, what is launched goes to a side stream."""
        self._sides.setdefault(number, [])
        if CURRENT.recording is not None:
            return CURRENT.recording.on(number)
        return torch.cuda.stream(self._streams.side(number))

    def launch_event(self, signals: bool) -> int:
        """The event that a loop's launch records for a side stream; or 0."""
        return self._streams.launch_event if signals else 0

    def cut_masks(self, operation: CutMasks) -> None:
        self.masks(operation.chunk)

    def wait_for_launch(self, operation: WaitForLaunch) -> None:
        if CURRENT.recording is not None:
            CURRENT.recording.operations.append(RecordedWaitForLaunch(operation.stream))
        else:
            self._streams.wait_for_launch(operation.stream)

    def wait(self, operation: Wait) -> None:
        self._wait(operation.stream, operation.other, operation.of_fork)
        if operation.stream == MAIN:
            self._sides.pop(operation.other, None)

    def on_failure(self) -> None:
        for number in self._sides:
            self._wait(MAIN, number)

    def keep(self, operation: Operation, what: object) -> None:
        """Keeps what an operation on a side stream reads until the main stream has waited for it.

        Memory that is free may be written on the main stream at once.
        """
        if operation.stream != MAIN:
            self._sides[operation.stream].append(what)

    def _wait(self, stream: int, other: int, of_fork: bool = False) -> None:
        if CURRENT.recording is not None:
            CURRENT.recording.operations.append(RecordedWait(stream, other, of_fork))
        else:
            self._streams.wait(stream, other)
