"""Products of a layer and direction as far as sizes decide them, kept for all calls.

For some of them other matrices are made first: cuBLASLt multiplies matrices whose rows or columns
are no multiples of 16 bytes at a third to a seventh of its rate, and tf32 at half to four fifths of
it where a matrix has the dimension that is summed over down its columns. Where that pays was
measured on an H200: benchmarks/log/cuda-experiments.md, "Matrices made for products".
"""

import torch

from openrnn.backends.fused.copies import whole_pieces
from openrnn.backends.fused.layer import LayerKernels
from openrnn.codegen.tiles import whole_tiles
from openrnn.memo import memo
from openrnn.native.cublaslt import Layout, Product, product_for

# Floating-point operations of a product from which its matrices are padded, by bytes of a value.
PADDED_FROM = {2: 1e9, 4: 2e9}
# Rows and columns of dx in float32 from which W_ih is transposed for it.
TRANSPOSED_DX_FROM = 6400, 512
# Gates' rows and columns of a gradient of weights in float32, and floating-point operations, from
# which x or h is transposed for it.
TRANSPOSED_ROWS_FROM = 1024, 512, 3e9


@memo(16)
def reads_rows(device: int) -> bool:
    """Whether tensor cores take tf32 operands only with the summed dimension in a row (wgmma)."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def _misaligned(layer: LayerKernels, columns: int) -> bool:
    return whole_pieces(columns, layer.dtype.itemsize) > columns


def _flop(layer: LayerKernels, columns: int, rows: int) -> float:
    return 2.0 * rows * layer.gates * layer.hidden * columns


def _long(layer: LayerKernels, columns: int, rows: int) -> bool:
    """Whether a product takes long enough to make other matrices for it."""
    return _flop(layer, columns, rows) >= PADDED_FROM[layer.dtype.itemsize]


def pads_inputs(layer: LayerKernels, inner: int, rows: int) -> bool:
    """Whether x and W_ih are padded to rows of 16 bytes, and W_ih to all units, for x_gates."""
    misaligned = _misaligned(layer, inner) or _misaligned(layer, layer.hidden)
    return misaligned and _long(layer, inner, rows)


def dx_width(layer: LayerKernels, inner: int, rows: int) -> int:
    """Columns of the memory for dx: I, or more where padded rows make its product quicker.

    Where the layer below has padded units, it reads dx as its dy, with all of them.
    """
    if layer.feeds_padded:
        return layer.units
    pads = _misaligned(layer, inner) and _long(layer, inner, rows)
    return whole_tiles(inner) if pads else inner


def transposes_input(layer: LayerKernels, inner: int, rows: int) -> bool:
    """Whether dx is a product with W_ih transposed: always where it is padded."""
    least_rows, least_columns = TRANSPOSED_DX_FROM
    large = layer.dtype.itemsize == 4 and rows >= least_rows and inner >= least_columns
    return (large and reads_rows(layer.device)) or dx_width(layer, inner, rows) > inner


def transposes_rows(layer: LayerKernels, columns: int, rows: int) -> bool:
    """Whether x, or h, is transposed for the gradient of a matrix (G*H, columns)."""
    least_gates, least_columns, least_flop = TRANSPOSED_ROWS_FROM
    large = layer.gates * layer.hidden >= least_gates and columns >= least_columns
    large = large and layer.dtype.itemsize == 4 and _flop(layer, columns, rows) >= least_flop
    return large and reads_rows(layer.device)


@memo(1024)
def input_product(
    layer: LayerKernels, inner: int, rows: int, float32_out: bool = False, padded: bool = False
) -> Product:
    """x_gates (rows, G*units) = x (rows, inner) W_ih^T; of one step also h R^T.

    Where units are padded and W_ih is not, gate by gate: no result depends on the padding between
    gates.

    Args:
        float32_out: x_gates are float32.
        padded: W_ih or R is (G*units, inner).
    """
    width = layer.gates * layer.units
    whole = padded or layer.unpadded
    columns, count = (width, 1) if whole else (layer.hidden, layer.gates)
    return product_for(
        layer.dtype, layer.device, (rows, columns, inner), Layout(inner),
        Layout(inner, True, columns * inner), Layout(width, False, layer.units), float32_out, count,
        smaller_tiles=layer.dtype.itemsize == 2 and not float32_out,
    )  # fmt: skip


@memo(1024)
def dx(layer: LayerKernels, inner: int, rows: int, transposed: bool = False) -> Product:
    """dx (rows, inner) = the input side's gate gradients (rows, G*units) W_ih.

    Of one step also dh, from the recurrent side's gate gradients and R.

    Args:
        transposed: the matrix is (inner, G*units).
    """
    width = layer.gates * layer.units
    matrix = Layout(width, True) if transposed else Layout(inner)
    return product_for(
        layer.dtype, layer.device, (rows, inner, width), Layout(layer.width), matrix, Layout(inner)
    )


@memo(1024)
def weight_gradient(
    layer: LayerKernels, span: tuple[int, int], columns: int, rows: int, strides: tuple[int, int],
    float32_out: bool, batch_strides: tuple[int, int], layers: int, transposed: bool,
) -> Product:  # fmt: skip
    """A matrix's gradient (gates of a span * units, columns): gate gradients^T times what it read.

    Args:
        span: consecutive gates [begin, end).
        rows: T*B of the chunk.
        strides: from row to row of the gate gradients and of what the matrix read, or of that
            transposed.
        float32_out: the gradient is float32.
        batch_strides: from layer to layer of the same two, where several are multiplied at once.
        layers: that are; their gradients (G * units, columns) follow each other.
        transposed: what the matrix read is (columns, rows).
    """
    begin, end = span
    (a, b), (far_a, far_b) = strides, batch_strides
    gradients, other = Layout(a, batch_stride=far_a), Layout(b, transposed, far_b)
    matrix = layer.gates * layer.units * columns
    return product_for(
        layer.dtype, layer.device, ((end - begin) * layer.units, columns, rows),
        gradients._replace(transposed=True), other, Layout(columns, batch_stride=matrix),
        float32_out, layers,
    )  # fmt: skip


@memo(1024)
def hidden_gradient(layer: LayerKernels, rows: int) -> Product:
    """dh (rows, units) in float32 = the recurrent side's gate gradients (rows, G*units) R.

    R is transposed as the backward loop reads it, (units, G*units).
    """
    inner = layer.gates * layer.units
    return product_for(
        layer.dtype, layer.device, (rows, layer.units, inner), Layout(layer.width),
        Layout(inner, True), Layout(layer.units), True,
    )  # fmt: skip
