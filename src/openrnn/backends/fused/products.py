"""Products of a layer and direction as far as sizes decide them, kept for all calls."""

from openrnn.backends.fused.layer import LayerKernels
from openrnn.memo import memo
from openrnn.native.cublaslt import Layout, Product, product_for


@memo(1024)
def input_product(layer: LayerKernels, inner: int, rows: int, float32_out: bool = False) -> Product:
    """x_gates (rows, G*units) = x (rows, inner) W_ih^T; of one step also h R^T.

    Where H is no multiple of 8, gate by gate: the padding between gates is not read.

    Args:
        float32_out: x_gates are float32.
    """
    width = layer.gates * layer.units
    columns, count = (width, 1) if layer.unpadded else (layer.hidden, layer.gates)
    return product_for(
        layer.dtype, layer.device, (rows, columns, inner), Layout(inner),
        Layout(inner, True, columns * inner), Layout(width, False, layer.units), float32_out, count,
    )  # fmt: skip


@memo(1024)
def dx(layer: LayerKernels, inner: int, rows: int) -> Product:
    """dx (rows, inner) = the input side's gate gradients (rows, G*units) W_ih.

    Of one step also dh, from the recurrent side's gate gradients and R.
    """
    return product_for(
        layer.dtype, layer.device, (rows, inner, layer.gates * layer.units),
        Layout(layer.width), Layout(inner), Layout(inner),
    )  # fmt: skip


@memo(1024)
def weight_gradient(
    layer: LayerKernels, span: tuple[int, int], columns: int, rows: int, strides: tuple[int, int],
    float32_out: bool, batch_strides: tuple[int, int], layers: int,
) -> Product:  # fmt: skip
    """A matrix's gradient (gates of a span * units, columns): gate gradients^T times what it read.

    Args:
        span: consecutive gates [begin, end).
        rows: T*B of the chunk.
        strides: from row to row of the gate gradients and of what the matrix read.
        float32_out: the gradient is float32.
        batch_strides: from layer to layer of the same two, where several are multiplied at once.
        layers: that are; their gradients (G * units, columns) follow each other.
    """
    begin, end = span
    (a, b), (far_a, far_b) = strides, batch_strides
    gradients, other = Layout(a, batch_stride=far_a), Layout(b, batch_stride=far_b)
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
