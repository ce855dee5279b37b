"""A single step of a layer and direction, T = 1: its kernels, and their launches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openrnn.backends.fused import kernels, products
from openrnn.backends.fused.copies import aligned, copied, dense
from openrnn.backends.fused.layer import LayerKernels
from openrnn.backends.fused.layer_gradients import LayerGradients
from openrnn.backends.fused.pass_runner import PassRunner, Weights, address
from openrnn.kernels.cuda.args import STEPS
from openrnn.kernels.cuda.table import PreparedArgs
from openrnn.memo import memo
from openrnn.memory import allocator_for
from openrnn.native import nvrtc
from openrnn.native.side_stream import has_launch_events
from openrnn.schedule import Chunk
from openrnn.tuning import single_step
from openrnn.tuning.single_step import StepSizes

States = Sequence[Tensor | None]


class PreparedStep:
    """The kernel of a step of some sizes, loaded.

    Attributes:
        kernel: on the layer's device.
        args: its arguments, of which each launch gives addresses and strides.
        blocks: of a launch.
    """

    def __init__(self, layer: LayerKernels, kind: str, sizes: StepSizes) -> None:
        device = torch.cuda.get_device_properties(layer.device)
        capability = device.major, device.minor
        configs = single_step.configs(kind, sizes, capability)
        made, config = kernels.best_step(
            configs, layer.cell, layer.dtype_name, nvrtc.arch_of(capability)
        )
        shared = single_step.shared_of_launch(
            config, sizes, capability, device.multi_processor_count
        )
        self.kernel = nvrtc.loaded(
            made, 1, config.threads, shared, layer.device,
            overlaps=single_step.overlaps(capability) and has_launch_events(),
        )  # fmt: skip
        given = {"batch": sizes.batch, "hidden": sizes.hidden}
        if kind == "step_backward":
            given |= {"left": layer.input_ranks, "right": layer.recurrent_ranks}
        else:
            given["inputs"] = sizes.inputs
        self.args = PreparedArgs(STEPS[kind], **given)
        self.blocks = single_step.blocks(config, sizes.hidden, sizes.batch)


step_for = memo(4096)(PreparedStep)


def sizes_of(layer: LayerKernels, inputs: int, batch: int, has_h: bool = True) -> StepSizes:
    """The sizes of a layer's step; `inputs`: columns of W_ih, 0 without one."""
    return StepSizes(layer.gates, inputs, layer.hidden, batch, layer.dtype.itemsize, has_h)


def launch_forward(
    runner: PassRunner, weights: Weights, x: Tensor, y: Tensor, saved: Tensor | None,
    finals: States, all_states: States,
) -> None:  # fmt: skip
    """Launches the step of a layer and direction.

    Args:
        x (1, B, I), y (1, B, D*H): what the layer reads, and writes.
        saved: memory for saved activations of this layer and direction, or None.
        finals, all_states: of all layers and directions.
    """
    layer, call = weights.layer, runner.call
    if not (x.stride(-1) == 1 and aligned(x)):
        x = copied(x)
    inputs = 0 if weights.w_ih is None else x.shape[2]
    before, after_reset = (
        runner.states(layer, states) for states in (call.states, call.reset_states)
    )
    sizes = sizes_of(layer, inputs, runner.batch, bool(before[0] or after_reset[0]))
    kind = single_step.forward_kind(sizes, bool(after_reset[0]))
    step = step_for(layer, kind, sizes)
    w_ih = None if weights.w_ih is None else dense(weights.w_ih)
    x_products = h_products = None
    if kind == single_step.CELL.kind:
        if w_ih is not None:
            x = x if x.is_contiguous() else copied(x)
            x_products = multiplied(runner, layer, x.data_ptr(), w_ih, inputs)
        if before[0]:
            h_products = multiplied(runner, layer, before[0], weights.recurrent, layer.hidden)
    words = step.args.words(
        weight=weights.recurrent.data_ptr(),
        w_ih=address(w_ih),
        x=x.data_ptr(),
        x_row=x.stride(1),
        x_gate=layer.x_gate,
        x_products=address(x_products),
        h_products=address(h_products),
        y=y.data_ptr() + layer.direction * layer.hidden * y.element_size(),
        y_row=y.stride(1),
        saved=address(saved),
        bias_x=address(weights.b_ih),
        bias_r=address(weights.b_hh),
        vectors=address(weights.unit_vectors),
        reset=address(runner.reset),
        initial=before,
        reset_state=after_reset,
        final=runner.states(layer, finals),
        all_states=runner.states(layer, all_states),
    )
    step.kernel.launch(step.blocks, words)


def multiplied(
    runner: PassRunner, layer: LayerKernels, rows: int, matrix: Tensor, columns: int
) -> Tensor:
    """The products of all gates with a matrix (G*H, columns), (B, G*H) in float32.

    Args:
        rows: the address of what is multiplied, (B, columns).
    """
    batch, width = runner.batch, layer.gates * layer.hidden
    made = allocator_for(torch.float32, matrix.device).empty(batch, width)
    product = products.input_product(layer, columns, batch, float32_out=True)
    product.run(rows, matrix.data_ptr(), made.data_ptr())
    return made


def launch_backward(
    runner: PassRunner, at: LayerGradients, chunk: Chunk, saved: Tensor,
    grads: tuple[States, States], d_initial: States,
) -> None:  # fmt: skip
    """Launches the derivative of the step, and the product that passes gradients on to h before it.

    Args:
        grads: of the final states, and of the states of all steps.
        d_initial: memory for the gradients of the initial states.
    """
    layer, dy, d_gates = at.layer, at.dy, at.d_gates(chunk)
    step = step_for(layer, "step_backward", sizes_of(layer, 0, runner.batch))
    d_before, biases = runner.states(layer, d_initial), at.biases()
    words = step.args.words(
        saved=saved.data_ptr(),
        dy=address(dy),
        dy_row=0 if dy is None else dy.stride(1),
        d_gates=d_gates.data_ptr(),
        input_bias=address(biases.b_ih),
        recurrent_bias=address(biases.b_hh),
        d_vectors=address(biases.unit_vectors),
        vectors=address(at.weights.unit_vectors),
        d_final=runner.states(layer, grads[0]),
        d_all_states=runner.states(layer, grads[1]),
        d_initial=d_before,
    )
    step.kernel.launch(step.blocks, words)
    if d_before[0]:
        offset = (layer.width - layer.gates * layer.units) * d_gates.element_size()
        product = products.dx(layer, layer.hidden, runner.batch)
        rows = at.weights.recurrent_by_planes.data_ptr()
        product.run(d_gates.data_ptr() + offset, rows, d_before[0], True)
