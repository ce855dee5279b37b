"""Loops and products of a layer and direction as far as sizes decide them, kept for all calls.

What is left to a call are addresses, so that its host spends its time on launches.
"""

from openrnn.backends.fused import kernels
from openrnn.backends.fused.layer import Flags, LayerKernels
from openrnn.kernels.cuda.args import LOOPS, PreparedArgs
from openrnn.memo import memo
from openrnn.native.cublaslt import Layout, Product, product_for


class PreparedLoop:
    """A time loop, forward or backward as `flags` say, for a batch size.

    Args:
        loops: how many such loops the device is to hold at once.
        layers: that one launch runs, each with arguments of its own.

    Attributes:
        kernel, config: of the loop.
        args: its arguments, of which each launch gives addresses, T and the strides of tensors that
            are not its own.
        polls: its blocks wait for values in a flag buffer, which may be y or the gate gradients.
        parts: of the sums over rows that backward leaves.
        own_flags: it needs a flag buffer besides: forward where y does not hold exactly the values
            that blocks send each other, and kernels that use no other.
        filled: rows of that buffer's steps that are filled before a launch; None: all of them.
    """

    def __init__(
        self, layer: LayerKernels, batch: int, flags: Flags, loops: int, layers: int = 1
    ) -> None:
        self.batch = batch
        self.kernel, self.config = layer.kernel(batch, flags, loops, layers)
        self.polls = self.config.clusters > 1
        masks = flags.lengths or flags.reset
        self.parts = self.config.sum_parts(batch)
        forward = flags.kind == "forward"
        self.own_flags = self.polls and (
            not self.config.y_flags
            or (forward and (masks or not layer.exact or self.config.half_operands))
        )
        self.filled: int | None = None
        if self.own_flags:
            buffer = self.config.flag_buffer(layer.cell, 1, batch)
            self.filled = buffer.filled if buffer.filled < buffer.shape[1] else None
        back_in_time = forward == (layer.direction == 1)
        way = -1 if back_in_time else 1
        size, row = layer.dtype.itemsize, layer.spec.directions * layer.hidden
        shared = {
            "batch": batch, "units": layer.hidden, "layers": layers, "reverse": layer.direction,
            "saved_step_bytes": way * layer.saved_bytes * ((batch + 7) // 8),
            "reset_step_bytes": way * batch,
            "first_row": 0, "delay": 0,  # those of a grid `kernels.launch` sets
        }  # fmt: skip
        if forward:
            gate = layer.x_gate if layer.skips else layer.units
            shared |= {"x_gate": gate, "y_row": row, "y_step_bytes": way * batch * row * size}
        else:
            shared["d_gates_step_bytes"] = way * batch * layer.width * size
        self.args = PreparedArgs(LOOPS[flags.kind], **shared)

    def launch(self, words: list[int], launch_event: int = 0) -> None:
        """Launches the loop.

        Args:
            words: as `args` makes them; this call may change them.
            launch_event: see `CudaKernel.launch`.
        """
        kernels.launch(self.kernel, self.config, words, self.batch, launch_event)


_prepared_loop = memo(4096)(PreparedLoop)


def loop_for(
    layer: LayerKernels, batch: int, flags: Flags, loops: int, layers: int = 1
) -> PreparedLoop:
    """The prepared loop, which is kept."""
    return _prepared_loop(layer, batch, flags, loops, layers)


@memo(1024)
def input_product(layer: LayerKernels, inner: int, rows: int, full: bool = False) -> Product:
    """x_gates (rows, G*units) = x (rows, inner) W_ih^T; of a single step also h R^T.

    Where H is no multiple of 8, gate by gate: the padding between gates is not read.

    Args:
        full: x_gates are float32.
    """
    width = layer.gates * layer.units
    columns, count = (width, 1) if layer.exact else (layer.hidden, layer.gates)
    return product_for(
        layer.dtype, layer.device, (rows, columns, inner), Layout(inner),
        Layout(inner, True, columns * inner), Layout(width, False, layer.units), full, count,
    )  # fmt: skip


@memo(1024)
def input_gradient(layer: LayerKernels, inner: int, rows: int) -> Product:
    """dx (rows, inner) = the input side's gate gradients (rows, G*units) W_ih."""
    return product_for(
        layer.dtype, layer.device, (rows, inner, layer.gates * layer.units),
        Layout(layer.width), Layout(inner), Layout(inner),
    )  # fmt: skip


@memo(1024)
def weight_gradient(
    layer: LayerKernels, span: tuple[int, int], columns: int, rows: int, strides: tuple[int, int],
    full: bool, apart: tuple[int, int], layers: int,
) -> Product:  # fmt: skip
    """A matrix's gradient (gates of a span * units, columns): gate gradients^T times what it read.

    Args:
        span: consecutive gates [begin, end).
        rows: T*B of the chunk.
        strides: from row to row of the gate gradients and of what the matrix read.
        full: the gradient is float32.
        apart: from layer to layer of the same two, where several are multiplied at once.
        layers: that are; their gradients (G * units, columns) follow each other.
    """
    begin, end = span
    gradients, other = (Layout(stride, apart=far) for stride, far in zip(strides, apart))
    matrix = layer.gates * layer.units * columns
    return product_for(
        layer.dtype, layer.device, ((end - begin) * layer.units, columns, rows),
        gradients._replace(transposed=True), other, Layout(columns, apart=matrix), full, layers,
    )  # fmt: skip
