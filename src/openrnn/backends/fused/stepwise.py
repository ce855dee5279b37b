"""A time loop that holds no R: each step is a product by cuBLASLt, then a launch of the cell.

R is read anew in each step, from L2 or memory. What other loops keep in registers from step to step
lies in memory.
"""

import torch
from torch import Tensor

from openrnn.backends.fused import products
from openrnn.backends.fused.layer import LayerKernels
from openrnn.backends.fused.loop_request import loop_of
from openrnn.codegen.config import (
    BackwardConfig,
    ForwardConfig,
    StepwiseBackwardConfig,
    StepwiseForwardConfig,
)
from openrnn.kernels.cuda.args import LOOPS
from openrnn.memory import allocator_for
from openrnn.native.nvrtc import CudaKernel
from openrnn.spec import Problem
from openrnn.tuning import plan


def first_configs(problem: Problem) -> list[ForwardConfig | BackwardConfig]:
    """The first configuration of each loop of a problem, for one row.

    By values alone: nothing is compiled. [] where the device is not known.
    """
    if problem.capability is None:
        return []
    masks = problem.lengths, problem.reset, problem.return_states
    return [
        next(plan.compilable_configs(loop_of(problem, kind, option_names, 1)))
        for kind, option_names in plan.kinds(problem.spec, problem.grad, *masks)
    ]


def stepwise_kinds(problem: Problem) -> list[str]:
    """Which loops of a problem, "forward" or "backward", have an R that no kernel holds."""
    return [*dict.fromkeys(one.kind for one in first_configs(problem) if one.stepwise)]


class StepwiseLoop:
    """The launches and products of such a loop, forward or backward as `config` says.

    Args:
        kernel: the cell's step, or its derivative.
    """

    def __init__(
        self, layer: LayerKernels, batch: int, kernel: CudaKernel,
        config: StepwiseForwardConfig | StepwiseBackwardConfig,
    ) -> None:  # fmt: skip
        self.layer, self.batch, self._kernel, self._config = layer, batch, kernel, config
        self._blocks, self._word_index = config.blocks(batch), LOOPS[config.kind].word_index
        self._device = torch.device("cuda", layer.device)

    def launch(self, words: list[int], launch_event: int = 0) -> None:
        """Gives all steps to torch's current stream.

        Args:
            words: the arguments of a loop; this call changes them.
            launch_event: see `CudaKernel.launch`.
        """
        if self._config.kind == "forward":
            self._run_forward(words, launch_event)
        else:
            self._run_backward(words, launch_event)

    def _run_forward(self, words: list[int], launch_event: int) -> None:
        layer, batch, index_of = self.layer, self.batch, self._word_index
        h = allocator_for(layer.dtype, self._device).empty(batch, layer.units)
        made = self._empty(batch, layer.gates * layer.units)
        carried = self._empty(len(layer.spec.states), batch, layer.hidden)
        self._put(words, h=h, products=made, carried=carried)
        product = products.input_product(layer, layer.units, batch, float32_out=True, padded=True)
        weight = words[index_of("weight")]
        self._step(words, -1, launch_event)  # the first states, and h
        for step in range(words[index_of("steps")]):
            product.run(h.data_ptr(), weight, made.data_ptr())
            self._step(words, step)

    def _run_backward(self, words: list[int], launch_event: int) -> None:
        layer, batch, index_of = self.layer, self.batch, self._word_index
        made = self._empty(batch, layer.units)
        # gradients of states, and of reset states
        groups = 1 + self._config.reset_state
        carried = self._empty(groups * len(layer.spec.states), batch, layer.hidden)
        self._put(words, products=made, carried=carried)
        product, weight = products.hidden_gradient(layer, batch), words[index_of("weight")]
        steps, apart = words[index_of("steps")], words[index_of("d_gates_step_bytes")]
        # where the recurrent side's gate gradients of the loop's first step lie: as forward ran,
        # that is time 0 or, where the loop goes back in time and `apart` is negative, the last
        first = words[index_of("d_gates")]
        first += (layer.width - layer.gates * layer.units) * layer.dtype.itemsize
        first += max(0, -apart) * (steps - 1)
        for step in range(steps):
            self._step(words, step, 0 if step else launch_event)
            product.run(first + step * apart, weight, made.data_ptr())
        self._step(words, steps)  # the gradients of the first states

    def _empty(self, *shape: int) -> Tensor:
        return allocator_for(torch.float32, self._device).empty(*shape)

    def _put(self, words: list[int], **memory: Tensor) -> None:
        """Puts addresses among the words; the caller keeps the memory until all is launched."""
        for name, tensor in memory.items():
            words[self._word_index(name)] = tensor.data_ptr()

    def _step(self, words: list[int], step: int, launch_event: int = 0) -> None:
        words[self._word_index("step")] = step
        self._kernel.launch(self._blocks, words, launch_event)
