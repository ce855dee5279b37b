"""Products over all steps of a chunk: dx, dW_ih and dW_hh from gate gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.fused import kernels, products
from openrnn.backends.fused.copies import copied, narrowed, padded_to_16_bytes, whole_pieces
from openrnn.backends.fused.layer import LayerKernels, permute_blocks
from openrnn.backends.fused.pass_runner import PassRunner, Weights
from openrnn.codegen.tiles import whole_tiles
from openrnn.kernels.cuda.args import PermuteWeightsArgs
from openrnn.memory import allocator_for, template
from openrnn.schedule import Chunk
from openrnn.spec import dtype_name


class Rows(NamedTuple):
    """A matrix in memory: where it begins, and elements from one row to the next.

    Attributes:
        batch_stride: elements to the same matrix of the next layer.
        transposed: it lies there transposed.
    """

    address: int
    stride: int
    batch_stride: int = 0
    transposed: bool = False


def transposed_rows(matrix: Rows, rows: int, columns: int, like: Tensor) -> Tensor:
    """A matrix (rows, columns) as (columns, rows rounded up to a multiple of 8), zeros past rows.

    Args:
        like: a tensor of its dtype and device.
    """
    width = whole_tiles(rows)
    out = allocator_for(like.dtype, like.device).empty(columns, width)
    kernel = kernels.plain("permute_weights", dtype_name(like.dtype), like.device.index or 0)
    args = PermuteWeightsArgs(
        matrix=matrix.address, row=matrix.stride, out=out.data_ptr(), units=width, hidden=rows,
        across=columns, columns=columns, gates=1, order=0, transposed=True,
    )  # fmt: skip
    kernel.launch(permute_blocks(1, width, columns), args.words())
    return out


class WeightGradient:
    """The gradient (G*H, N) of a matrix, or of several layers, to which products of chunks add.

    Until it is finished it is padded to all units and to the columns of `padded_to_16_bytes`. The
    sum over several chunks is float32.

    Args:
        spans: the gates in the order of the planes, as ranges of consecutive gates.
        columns: N.
        chunked: there is more than one chunk.
        layers: their gradients follow each other in `sum`.
    """

    def __init__(
        self, weights: Weights, spans: list[tuple[int, int]], columns: int, chunked: bool,
        layers: int = 1,
    ) -> None:  # fmt: skip
        self.weights, self.layer = weights, weights.layer
        self.columns, self.spans = columns, spans
        self.float32_out = chunked
        layer = self.layer
        width = whole_pieces(columns, layer.dtype.itemsize)
        self.padded = width > columns
        dtype = torch.float32 if chunked else layer.dtype
        rows = layers * layer.gates * layer.units
        self.sum = allocator_for(dtype, weights.w_hh.device).empty(rows, width)
        self.layers, self.written = layers, False

    def add(self, gradients: Rows, other: Rows, rows: int) -> None:
        """Adds gradients^T (G*units, rows) times other (rows, N), which is `padded_to_16_bytes`."""
        layer, size, columns = self.layer, self.layer.dtype.itemsize, self.sum.shape[1]
        if self.layers == 1 and products.transposes_rows(layer, columns, rows):
            made = transposed_rows(other, rows, columns, self.weights.w_hh)
            other = Rows(made.data_ptr(), made.shape[1], transposed=True)
        done, start, gate = 0, self.sum.data_ptr(), layer.units * columns * self.sum.element_size()
        strides = gradients.stride, other.stride
        batch_strides = gradients.batch_stride, other.batch_stride
        for span in self.spans:
            first, end = span
            product = products.weight_gradient(
                layer, span, columns, rows, strides, self.float32_out, batch_strides, self.layers,
                other.transposed,
            )  # fmt: skip
            at = gradients.address + done * layer.units * size
            product.run(at, other.address, start + first * gate, self.written)
            done += end - first
        self.written = True

    def overwritten(self) -> Tensor:
        """Memory for all of it, padded, which the caller writes."""
        self.written = True
        return self.sum

    def of_layers(self) -> list[Tensor]:
        """That of each layer, padded."""
        rows = self.sum.shape[0] // self.layers
        return [self.sum[begin : begin + rows] for begin in range(0, rows * self.layers, rows)]

    def finished(self) -> Tensor:
        """The gradient in the shape and dtype of its matrix."""
        found, layer = self.sum, self.layer
        if not self.written:  # no step read anything but zeros
            shape = layer.gates * layer.hidden, self.columns
            return torch.zeros_like(template(shape, layer.dtype, found.device))
        if self.padded or not layer.unpadded:
            found = found.unflatten(0, (layer.gates, layer.units))
            found = copied(found[:, : layer.hidden, : self.columns]).flatten(0, 1)
        return narrowed(found, layer.dtype)


def write_dx(weights: Weights, dx: Tensor, d_gates: Tensor, add: bool, transposed: bool) -> None:
    """Writes dx (T, B, I), or adds to it: the input side's gate gradients times W_ih.

    Without a matrix they are added up over the gates for a skip input, or put in their order.

    Args:
        dx: rows that are padded become zero past I.
        transposed: W_ih is read transposed, as `products.transposes_input` says.
    """
    layer = weights.layer
    if weights.w_ih is None:
        width = layer.gates * layer.units
        gates = d_gates[..., :width].unflatten(-1, (layer.gates, layer.units))
        if layer.x_gate:
            _write_dx_of_gates(layer, dx, gates[..., : layer.hidden], add)
            return
        found = torch.sum(gates[..., : layer.hidden], -2, out=None if add else dx)
        if add:
            dx.add_(found)
        return
    steps, batch, _ = dx.shape
    product = products.dx(layer, dx.stride(1), steps * batch, transposed)
    matrix = weights.input_transposed if transposed else weights.input_by_planes
    product.run(d_gates.data_ptr(), matrix.data_ptr(), dx.data_ptr(), add)


def _write_dx_of_gates(layer: LayerKernels, dx: Tensor, gates: Tensor, add: bool) -> None:
    """Writes dx (T, B, G*H), or adds to it: gates (T, B, G, H) in the order of the planes."""
    out, done = dx.unflatten(-1, (layer.gates, layer.hidden)), 0
    for first, end in layer.input_spans:
        part, found = out[..., first:end, :], gates[..., done : done + end - first, :]
        if add:
            part.add_(found)
        else:
            part.copy_(found)
        done += end - first


def add_w_ih(weights: Weights, x: Tensor, d_gates: Tensor, found: WeightGradient) -> None:
    """Adds a chunk to dW_ih: the input side's gate gradients times x (T, B, I)."""
    inputs = padded_to_16_bytes(x)
    steps, batch, inner = inputs.shape
    other = Rows(inputs.data_ptr(), inner)
    found.add(Rows(d_gates.data_ptr(), weights.layer.width), other, steps * batch)


def add_w_hh(
    runner: PassRunner, weights: Weights, chunk: Chunk, y: Tensor, d_gates: Tensor,
    found: WeightGradient,
) -> None:  # fmt: skip
    """Adds a chunk to dW_hh: the recurrent side's gate gradients times the h that each step read.

    Args:
        y: of all steps (T, B, D*H); d_gates: of the chunk.
    """
    layer, call, batch = weights.layer, runner.call, runner.batch
    reverse, width = layer.direction == 1, layer.width
    offset = width - layer.gates * layer.units
    reset, steps = runner.reset, runner.steps
    # step t read h of t - 1, in reverse of t + 1; the first one read the initial state
    begin, end = (
        (chunk.begin, min(chunk.end, steps - 1)) if reverse else (max(chunk.begin, 1), chunk.end)
    )
    if end > begin:
        size, start = y.element_size(), layer.direction * layer.hidden
        other = begin + (1 if reverse else -1)
        before = Rows(y.data_ptr() + (start + other * y.stride(0)) * size, y.stride(1))
        if reset is not None or found.padded:
            h = y[other : other + end - begin, :, start : start + layer.hidden]
            mask: Tensor | None = None
            if reset is not None:  # past the lengths gradients are 0, and in reverse h is
                later = max(begin, other)
                mask = reset[later : later + end - begin]
            h = copied(h, whole_pieces(layer.hidden, size), mask=mask)
            before = Rows(h.data_ptr(), h.shape[2])
        at = d_gates.data_ptr() + (offset + (begin - chunk.begin) * batch * width) * size
        found.add(Rows(at, width), before, (end - begin) * batch)
    if call.states:
        first = _first_step(runner, reverse, chunk, d_gates[..., offset:])
        if first is not None:
            if reset is not None and not reverse:
                first = copied(first[None], mask=reset[:1])[0]
            initial = padded_to_16_bytes(call.states[0][layer.index, None])[0]
            found.add(_rows(first), _rows(initial), batch)
    if call.reset_states and reset is not None:
        # the gradients of all steps that read a reset state, added up for each sequence
        taken, where = d_gates[..., offset:], _replaced(runner, reset)[..., None]
        if reverse:
            taken, where = taken[:-1], where[1:]
        gathered = taken.masked_fill(~where, 0).sum(0, dtype=torch.float32).to(y.dtype)
        state = padded_to_16_bytes(call.reset_states[0][layer.index, None])[0]
        found.add(_rows(gathered), _rows(state), batch)


def _replaced(runner: PassRunner, reset: Tensor) -> Tensor:
    """Where (T, B) a reset replaced the state that step t reads; in reverse, that t - 1 reads."""
    if runner.lengths is None:
        return reset
    steps = torch.arange(runner.steps, device=reset.device)[:, None]
    return reset & (steps < runner.lengths.lengths)


def _rows(tensor: Tensor) -> Rows:
    # the stride of a single row may be anything: contiguous() leaves it as it was
    rows, columns = tensor.shape
    return Rows(tensor.data_ptr(), tensor.stride(0) if rows > 1 else columns)


def _first_step(runner: PassRunner, reverse: bool, chunk: Chunk, d_gates: Tensor) -> Tensor | None:
    """A chunk's d_gates (T, B, G*units) at each row's first step; None if it has no such step.

    In reverse, a row's first step is the last of its length.
    """
    if not reverse:
        return d_gates[0] if chunk.begin == 0 else None
    if runner.lengths is None:
        return d_gates[-1] if chunk.end == runner.steps else None
    last = runner.lengths.lengths - 1 - chunk.begin
    beyond = (last < 0) | (last >= chunk.steps)
    rows = torch.arange(runner.batch, device=d_gates.device)
    picked = d_gates[last.clamp(0, chunk.steps - 1), rows]
    return picked.masked_fill(beyond[:, None], 0)
