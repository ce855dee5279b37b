"""The forward pass on the CPU, as a program."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from openrnn.backends.base import Call, result_shapes
from openrnn.backends.cpu import reserve, schedules
from openrnn.backends.cpu.layer import LayerKernels
from openrnn.backends.cpu.program import PROGRAMS, BoundProgram, Program, SlotRef
from openrnn.backends.cpu.program_builder import (
    ProgramBuilder,
    ProgramKey,
    Rows,
    address,
    program_key,
    slots,
    values,
)
from openrnn.backends.cpu.rounding import packs_bf16_panels, reads_in_place
from openrnn.codegen import build
from openrnn.memo import memo
from openrnn.schedule import execute
from openrnn.schedule.operations import BeginLayer, Loop

if TYPE_CHECKING:
    from openrnn.kernels.cpu.args import LoopArgs
    from openrnn.kernels.cpu.plan import LoopPlan


class ForwardBuilder(ProgramBuilder):
    """The operations of a forward pass.

    It makes y, the final states, all states where they are wanted, then the reserve.
    """

    def __init__(self, key: ProgramKey) -> None:
        super().__init__(key, slots(key))
        problem, spec, steps, batch = self.problem, self.spec, self.steps, self.batch
        width = spec.directions * spec.output_size
        self._x = self._y = Rows(SlotRef("x"), SlotRef("x_step"), SlotRef("x_row"))
        states = range(len(spec.states))
        named = ["y", *(("final", k) for k in states), *(("all", k) for k in states)]
        for slot, shape in zip(named, result_shapes(problem, steps, batch)):
            self.make(slot, shape)
        self.saved: reserve.Saved | None = None
        if problem.grad:
            kept = reserve.shapes(problem, steps, batch)
            partly = reserve.partly(problem, steps, batch)
            for k, (kept_shape, _) in enumerate(kept):
                self.make(("saved", k), kept_shape, zeros=partly)
            self.saved = reserve.by_layer(spec, len(kept))
        # outputs between layers that nobody keeps: one is written while another is read
        count = 0 if problem.grad else min(2, spec.num_layers - 1)
        size = steps * batch * width * self.size
        self._between = [self.workspace.take(size) for _ in range(count)]
        self.int8 = problem.precision == "int8"
        self.bf16 = not key.pairs and packs_bf16_panels(problem, steps, batch)
        self.in_place = reads_in_place(problem, steps, batch)

    def begin_layer(self, operation: BeginLayer) -> None:
        """The output of the layer below becomes what this one reads."""
        if operation.direction:
            return
        layer = operation.layer
        if layer:
            self._x = self._y
        if layer == self.spec.num_layers - 1:
            at = SlotRef("y")
        elif self.saved is not None:
            at = self.saved.outputs[layer]
        else:
            at = self._between[layer % 2]
        self._y = self.rows(at, self.spec.directions * self.spec.output_size)

    def loop(self, operation: Loop) -> None:
        """The loop of a layer and direction, after its weights are packed."""
        from openrnn.kernels.cpu import matrices

        layer = self.kernels(operation)
        layout, mark = layer.layout, self.workspace.mark()
        saved = self.saved.activations[layer.chain] if self.saved is not None else []
        plan = self.plan(layer, operation, "inference" if self.saved is None else "training")
        w_ih, w_hh, b_ih, b_hh, w_hr, *vectors = self.weights(layer)
        if self.bf16 or (plan.packs and not self.int8):
            pairs = "transpose_pairs" if self.key.pairs else "transpose"
            kernel = "transpose_bf16" if self.bf16 else pairs
            shape = layout.gates, layout.units, layout.padded
            w_ih = self.pack_matrix(kernel, layer, w_ih, shape, layout.inputs)
            w_hh = self.pack_matrix(kernel, layer, w_hh, shape, layout.outputs)
        shape = 1, layout.outputs, layout.h_width
        w_hr = self.pack_matrix("transpose", layer, w_hr, shape, layout.units)
        read = w_ih, w_hh, b_ih, b_hh, w_hr, self.unit_vectors(layer, vectors)
        args = plan.args()
        given = self.shared(args, layer, operation, self._x, self._y, read, saved)
        if self.int8:
            self._take_int8(args, given, layer, plan)
        elif self.key.pairs:
            args.product = matrices.pairs().product.address
            self.take_rounded(args, given, plan.tasks)
        elif self.bf16:
            args.packed, args.product = 1, matrices.bf16_product().address
        elif self.in_place:
            args.product = matrices.dots_16bit(self.problem.dtype_name).address
        loop, args.row_function = build.forward(layer.cell, layout.dtype)
        given["final"] = self.states_of(layer, "final")
        if self.problem.return_states:
            given["all_states"] = self.states_of(layer, "all")
        self.launch(loop, args, plan, given)
        self.workspace.free(mark)

    def _take_int8(
        self, args: "LoopArgs", given: dict[str, Any], layer: LayerKernels, plan: "LoopPlan"
    ) -> None:
        """The scales of int8 matrices, which are read as they are, and memory to round rows in."""
        from openrnn.kernels.cpu import matrices

        args.packed, args.product = 0, matrices.int8_product().address
        for name, index in zip(("scales_ih", "scales_hh"), layer.param_indices):
            if index is not None:
                given[name] = SlotRef(("scales", index))
        args.rounded_bytes = layer.layout.int8_memory
        self.take_rounded(args, given, plan.tasks)


@memo(PROGRAMS)
def program(key: ProgramKey) -> Program:
    """The forward pass of calls with this key; compiles kernels that there are not yet."""
    builder = ForwardBuilder(key)
    spec = key.problem.spec
    execute(schedules.forward(spec.num_layers, spec.directions, key.steps), builder)
    return builder.program()


def bound(call: Call, results: Sequence[Tensor]) -> Callable[[Tensor], None] | None:
    """Runs the call into these tensors again and again, each time with another x of its strides.

    None where they have no memory.

    Args:
        results: y and the final states.
    """
    if not all(map(address, (*call.params, *call.states, *results))):
        return None
    key = program_key(call)
    free = slots(key).index("x")
    run = BoundProgram(program(key), values(call, None), free, results).run
    return lambda x: run(address(x))
