"""A time loop whose R no kernel holds: each step is a product by cuBLASLt, then a launch.

R is read anew in each step, from L2 or memory. What a resident loop keeps in registers from step to
step lies in memory.
"""

import torch

from openrnn.backends.base import traced
from openrnn.backends.fused import products
from openrnn.backends.fused.layer import LayerKernels
from openrnn.codegen.config import StepwiseBackwardConfig, StepwiseForwardConfig
from openrnn.kernels.cuda.args import LOOPS
from openrnn.memory import memory_for
from openrnn.native.nvrtc import CudaKernel
from openrnn.spec import Problem
from openrnn.tuning import plan


def stepwise_kinds(problem: Problem) -> list[str]:
    """Which loops of a problem, "forward" or "backward", have an R that no kernel holds.

    By values alone: nothing is compiled. None where the device is not known.
    """
    spec, capability = problem.spec, problem.capability
    if capability is None:
        return []
    cell, dtype = traced(spec), str(problem.dtype).removeprefix("torch.")
    masks = problem.lengths, problem.reset, problem.return_states
    kinds = plan.kinds(spec, problem.grad, *masks)
    firsts = {
        kind: next(plan.holding(
            kind, cell, dtype, spec.hidden_size, 1, flags, capability, problem.processors
        ))
        for kind, flags in kinds
    }  # fmt: skip
    return [kind for kind, first in firsts.items() if first.stepwise]


class StepwiseLoop:
    """The launches and products of such a loop, forward or backward as `config` says.

    Args:
        kernel: the cell's step, or its derivative.
    """

    def __init__(
        self, layer: LayerKernels, batch: int, kernel: CudaKernel,
        config: StepwiseForwardConfig | StepwiseBackwardConfig,
    ) -> None:  # fmt: skip
        self.layer, self.batch, self._kernel = layer, batch, kernel
        self._forward, self._blocks = config.kind == "forward", config.blocks(batch)
        self._place = LOOPS[config.kind].place

    def launch(self, words: list[int], launch_event: int = 0) -> None:
        """Gives all steps to torch's current stream.

        Args:
            words: the arguments of a loop; this call changes them.
            launch_event: see `CudaKernel.launch`.
        """
        if self._forward:
            self._run_forward(words, launch_event)
        else:
            self._run_backward(words, launch_event)

    def _run_forward(self, words: list[int], launch_event: int) -> None:
        layer, place = self.layer, self._place
        device = torch.device("cuda", layer.device)
        h = memory_for(layer.dtype, device).empty(self.batch, layer.hidden)
        found = self._give_memory(words, device, layer.gates * layer.units, 1)
        words[place("flag_buffer")] = h.data_ptr()
        weight, product = (
            words[place("weight")],
            products.input_product(layer, layer.hidden, self.batch, full=True),
        )
        self._step(words, -1, launch_event)  # the first states, and h
        for step in range(words[place("steps")]):
            product.run(h.data_ptr(), weight, found[0].data_ptr())
            self._step(words, step)

    def _run_backward(self, words: list[int], launch_event: int) -> None:
        layer, place = self.layer, self._place
        # of the gradients of states, and of reset states
        found = self._give_memory(words, torch.device("cuda", layer.device), layer.units, 2)
        weight, product = words[place("weight")], products.hidden_gradient(layer, self.batch)
        steps, apart = words[place("steps")], words[place("d_gates_step_bytes")]
        right = (layer.width - layer.gates * layer.units) * layer.dtype.itemsize
        d_gates = words[place("d_gates")] + right
        if not words[place("reverse")]:  # it begins at the last step, and `apart` is negative
            d_gates -= (steps - 1) * apart
        for step in range(steps):
            self._step(words, step, 0 if step else launch_event)
            product.run(d_gates + step * apart, weight, found[0].data_ptr())
        self._step(words, steps)  # the gradients of the first states

    def _give_memory(
        self, words: list[int], device: torch.device, columns: int, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for products (B, columns) and for some groups of states, put into the words."""
        layer, empty = self.layer, memory_for(torch.float32, device).empty
        made = (
            empty(self.batch, columns),
            empty(groups * len(layer.spec.states), self.batch, layer.hidden),
        )
        words[self._place("products")], words[self._place("states")] = (
            made[0].data_ptr(),
            made[1].data_ptr(),
        )
        return made

    def _step(self, words: list[int], step: int, launch_event: int = 0) -> None:
        words[self._place("step")] = step
        self._kernel.launch(self._blocks, words, launch_event)
