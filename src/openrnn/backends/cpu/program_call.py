"""Calls whose sizes and strides are those of an earlier one: programs with new addresses."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from openrnn.backends.base import Call, ModuleCache, Needs, Shapes
from openrnn.backends.cpu import backward as backwards
from openrnn.backends.cpu import forward as forwards
from openrnn.backends.cpu.program import Program
from openrnn.backends.cpu.program_builder import address, program_key, slots
from openrnn.kernels.cpu import launch


class ProgramCall:
    """A forward pass, whose results have the shapes of the caller: a `PreparedCall`."""

    def __init__(self, call: Call, output_shapes: Shapes, cache: ModuleCache | None = None) -> None:
        self.key = program_key(call)
        self.strides = call.x.stride()[:2]
        self._threads, self._cache = self.key.threads, cache
        self._program = self._forward(output_shapes)
        given = len(slots(self.key)) - len(self.strides)
        self._on_tensors = self._program.on_tensors(self.strides, given)

    def _forward(self, output_shapes: Shapes) -> Program:
        return self.shaped(forwards.program(self.key), dict(enumerate(output_shapes)))

    def shaped(self, program: Program, shapes: dict[int, tuple[int, ...]]) -> Program:
        """The program with other shapes for some of the tensors that it makes, by place."""
        made = list(program.made)
        for index, shape in shapes.items():
            made[index] = made[index].shaped(shape)
        return Program(program.operations, made, program.kept)

    def __call__(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """Y and the final states, of x, parameters and states."""
        if launch.threads() != self._threads:
            return None
        if self._on_tensors is not None:
            return self._on_tensors(every) or None
        found = [*map(address, every)]
        if not all(found):
            return None
        return self._program.run([*self.strides, *found], self._cache)

    def ready(self, every: Sequence[Tensor]) -> bool:
        """Whether they have memory, and the program is for as many threads as there are now."""
        return all(map(address, every)) and launch.threads() == self._threads

    def forward(self, every: Sequence[Tensor]) -> list[Tensor]:
        """Y, the final states, and a reserve if gradients are recorded, of tensors with memory."""
        if self._on_tensors is not None:
            return self._on_tensors(every)
        return self._program.run([*self.strides, *map(address, every)], self._cache)


class ProgramGradCall(ProgramCall):
    """Both passes of a call that autograd records: a `PreparedGradCall`."""

    def __init__(self, call: Call, output_shapes: Shapes, input_shapes: Shapes) -> None:
        super().__init__(call, output_shapes)
        self._input_shapes, self._params = input_shapes, len(call.params)
        self._rows = self.key.batch * call.problem.spec.directions * call.problem.spec.output_size
        self._known: dict[Any, backwards.BackwardProgram] = {}
        made = [(made.template.shape, made.template.dtype) for made in self._program.made]
        y, *rest, _ = made
        self.saved = [y, *rest[len(output_shapes) - 1 :]]

    def backward(
        self,
        every: Sequence[Tensor],
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The gradients that are needed of x, parameters and states."""
        found = [None if grad is None else grad.contiguous() for grad in grads]
        known = self.program_of(grads, needs)
        values = [*self.strides, *map(address, every), *map(address, outputs)]
        dy, *d_finals = found
        if dy is not None:
            values += [self._rows, self._rows // self.key.batch, dy.data_ptr()]
        values += [grad.data_ptr() for grad in d_finals if grad is not None]
        made = known.program.run(values)
        locations = (known.x, *known.params, *known.states)
        return [backwards.gradient(one, made) for one in locations]

    def program_of(
        self, grads: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> backwards.BackwardProgram:
        """The backward pass from these of the gradients of y and the final states."""
        key = needs, *[grad is not None for grad in grads]
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._backward(needs, key[1:])
        return known

    def reads(self, program: Program, index: int) -> bool:
        """Whether a program reads the tensor of a call at this place."""
        return program.reads(len(self.strides) + index)

    def _backward(self, needs: tuple[bool, ...], given: Any) -> backwards.BackwardProgram:
        asked = Needs.of_prepared(needs, self._params, len(self._input_shapes) - 1)
        finals = given[1:] if any(given[1:]) else ()
        made = backwards.program(self.key, backwards.IncomingGradients(given[0], finals, ()), asked)
        shapes_of = dict(zip((made.x, *made.states), self._input_shapes))
        shapes = {index: shape for index, shape in shapes_of.items() if isinstance(index, int)}
        return made._replace(program=self.shaped(made.program, shapes))
