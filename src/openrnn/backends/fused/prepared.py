"""Loops of a layer and direction as far as sizes decide them, kept for all calls.

What is left to a call are addresses, so that its host spends its time on launches.
"""

from openrnn.backends.fused import kernels
from openrnn.backends.fused.layer import LayerKernels, LoopOptions
from openrnn.backends.fused.stepwise import StepwiseLoop
from openrnn.codegen.config import StepwiseBackwardConfig, StepwiseForwardConfig
from openrnn.codegen.tiles import tiles_of
from openrnn.kernels.cuda.args import LOOPS
from openrnn.kernels.cuda.table import PreparedArgs
from openrnn.memo import memo


class PreparedLoop:
    """A time loop, forward or backward as `options` say, for a batch size.

    Args:
        loops: how many such loops the device is to hold at once.
        layers: that one launch runs, each with arguments of its own.

    Attributes:
        kernel, config: of the loop.
        args: its arguments, of which each launch gives addresses, T and the strides of tensors that
            are not its own.
        polls: its blocks wait for values in a flag buffer, which may be y or the gate gradients.
        parts: of the sums over rows that backward leaves.
        has_flag_buffer: the loop polls a buffer of its own. Else it polls y, in backward the gate
            gradients, in a stack in clusters those of another layer. The forward loop of a grid
            needs the buffer where y is not what blocks send each other: with masks, padding or
            float16 operands.
        filled: rows of that buffer's steps that are filled before a launch; None: all of them.
    """

    def __init__(
        self, layer: LayerKernels, batch: int, options: LoopOptions, loops: int, layers: int = 1
    ) -> None:
        self.batch = batch
        self.kernel, self.config = layer.kernel(batch, options, loops, layers)
        self.polls = self.config.is_cooperative
        masked_or_padded = options.lengths or options.reset or not layer.unpadded
        self.parts = self.config.sum_parts(batch)
        forward = options.kind == "forward"
        self.has_flag_buffer = self.polls and (
            not self.config.y_flags
            or (forward and layers == 1 and (masked_or_padded or self.config.half_operands))
        )
        self.filled: int | None = None
        if self.has_flag_buffer:
            buffer = self.config.flag_buffer(layer.cell, 1, batch)
            self.filled = buffer.filled if buffer.filled < buffer.shape[1] else None
        back_in_time = forward == (layer.direction == 1)
        way = -1 if back_in_time else 1
        size, row = layer.dtype.itemsize, layer.spec.directions * layer.hidden
        shared = {
            "batch": batch, "hidden": layer.hidden, "layers": layers, "reverse": layer.direction,
            "saved_step_bytes": way * layer.saved_bytes * tiles_of(batch),
            "reset_step_bytes": way * batch,
            "first_row": 0, "delay": 0, "streamed": 0,  # `kernels.launch` sets those of a grid
            "step": 0, "products": 0, "carried": 0,  # and these `StepwiseLoop`
        }  # fmt: skip
        if forward:
            shared["h"] = 0
            gate = layer.x_gate if layer.no_input_matrix else layer.units
            shared |= {"x_gate": gate, "y_row": row, "y_step_bytes": way * batch * row * size}
        else:
            shared["d_gates_step_bytes"] = way * batch * layer.width * size
        self.args = PreparedArgs(LOOPS[options.kind], **shared)
        self._stepwise: StepwiseLoop | None = None
        if isinstance(self.config, StepwiseForwardConfig | StepwiseBackwardConfig):
            self._stepwise = StepwiseLoop(layer, batch, self.kernel, self.config)

    def launch(self, words: list[int], launch_event: int = 0) -> None:
        """Launches the loop.

        Args:
            words: as `args` makes them; this call may change them.
            launch_event: see `CudaKernel.launch`.
        """
        if self._stepwise is not None:
            self._stepwise.launch(words, launch_event)
        else:
            kernels.launch(self.kernel, self.config, words, self.batch, launch_event)


_prepared_loop = memo(4096)(PreparedLoop)


def loop_for(
    layer: LayerKernels, batch: int, options: LoopOptions, loops: int, layers: int = 1
) -> PreparedLoop:
    """The prepared loop, which is kept."""
    return _prepared_loop(layer, batch, options, loops, layers)
