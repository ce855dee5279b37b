"""A forward pass whose weights are constants: what a program without Python runs.

The schedule is that of any forward pass of one sequence on one thread. Weights, and panels of them,
lie in one block of constant data; only the time loops are left to run.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from openrnn.backends.cpu import schedules
from openrnn.backends.cpu.forward import ForwardBuilder
from openrnn.backends.cpu.layer import LayerKernels, compute_dtype
from openrnn.backends.cpu.program import SlotRef, placed
from openrnn.backends.cpu.program_builder import ProgramKey
from openrnn.kernels.cpu.args import LINE
from openrnn.schedule import execute
from openrnn.spec import Problem

if TYPE_CHECKING:
    from openrnn.kernels.cpu.args import LoopArgs
    from openrnn.kernels.cpu.objects import CompiledFunction
    from openrnn.kernels.cpu.plan import LoopPlan

CONSTANTS = "constants"


class Loop(NamedTuple):
    """A time loop: its arguments but for those of `given`, by field or entry of an array field."""

    args: "LoopArgs"
    given: list[tuple[int, SlotRef]]  # by place among the arguments


class Baked(ForwardBuilder):
    """The forward pass, but for what follows from weights alone, which is done at once.

    Args:
        params: in the order of `module_slots`, in the dtype that kernels compute in.

    Attributes:
        loops: in their order.
        data: the constants; a value of the slot CONSTANTS counts its bytes.
    """

    def __init__(self, problem: Problem, steps: int, params: Sequence[Tensor]) -> None:
        super().__init__(ProgramKey(problem, steps, 1, 1, True, False))
        self.loops: list[Loop] = []
        self.data = bytearray()
        self._params: list[Any] = [param.detach().contiguous() for param in params]
        spec = self.spec
        execute(schedules.forward(spec.num_layers, spec.directions, steps), self)

    def _param(self, value: SlotRef) -> Tensor:
        slot: Any = value.slot
        found: Tensor = self._params[slot[1]]
        return found

    def constant(self, tensor: Tensor) -> SlotRef:
        """Adds a tensor to the data."""
        index = len(self.data)
        content = tensor.numpy().tobytes()
        self.data += content + bytes(-len(content) % LINE)
        return SlotRef(CONSTANTS, index)

    def pack_matrix(
        self, kernel: str, layer: LayerKernels, weight: SlotRef | None, shape: tuple[int, int, int],
        columns: int,
    ) -> SlotRef | None:  # fmt: skip
        if weight is None:
            return None
        from openrnn.kernels.cpu import launch, matrices

        gates, rows, padded = shape
        dtype = layer.layout.dtype
        count = matrices.panel_elements(kernel, dtype, gates, padded, columns)
        out = torch.zeros(count, dtype=self.dtype, device="cpu")
        args: Any = matrices.pack_args(gates, rows, padded, columns, 1)
        args.matrix, args.out = self._param(weight).data_ptr(), out.data_ptr()
        launch.run(matrices.kernel(kernel, dtype), args, args.tasks)
        return self.constant(out)

    def unit_vectors(
        self, layer: LayerKernels, vectors: Sequence[SlotRef | None]
    ) -> SlotRef | None:
        if not vectors:
            return None
        shape = len(vectors), layer.layout.padded
        out = torch.zeros(shape, dtype=self.dtype, device="cpu")
        for row, vector in zip(out, vectors):
            if vector is not None:
                row[: layer.layout.units] = self._param(vector)
        return self.constant(out)

    def launch(
        self,
        loop: "CompiledFunction",
        args: "LoopArgs",
        plan: "LoopPlan",
        given: dict[str, SlotRef | Sequence[SlotRef | None]],
    ) -> None:
        given["scratch"] = self.workspace.take(plan.scratch)
        found = [(index, self._baked(value)) for index, value in placed(args, given)]
        args.row_function = 0  # an address in this process
        self.loops.append(Loop(args, found))

    def _baked(self, value: SlotRef) -> SlotRef:
        """The value; a parameter that a loop reads as it is becomes a constant."""
        slot = value.slot
        is_param = isinstance(slot, tuple) and slot[0] == "param"
        return self.constant(self._param(value)) if is_param else value


def baked(problem: Problem, steps: int, params: Sequence[Tensor]) -> Baked:
    """The forward pass of one sequence of up to so many steps with these weights.

    It has room for as many as pack their matrices, which is done here, once, for short calls, too.
    """
    from openrnn.kernels.cpu.launch import PACK_FROM

    dtype = compute_dtype(problem.dtype)
    return Baked(problem, max(steps, PACK_FROM), [param.to(dtype) for param in params])
