"""Calls whose sizes and strides are those of an earlier one: programs with new addresses."""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import OutOfMemoryError, Tensor

from openrnn.backends.base import (
    Backend,
    Call,
    Cotangents,
    Needs,
    Shapes,
    lengths_reset_seed,
    result_shapes,
)
from openrnn.backends.fused.copies import ALIGNMENT, dense
from openrnn.backends.fused.program import Program
from openrnn.backends.fused.record import record
from openrnn.native.recording import NotRepeatableError
from openrnn.spec import precision_of

MAX_MEMORY_FAILURES = 2  # runs without memory after which calls go the usual way

Found = list[Tensor | None]

_address = Tensor.data_ptr


class ProgramCall:
    """A forward pass, whose results have the shapes of the caller: a `PreparedCall`.

    Raises:
        NotRepeatableError: no program does what the pass does.
    """

    def __init__(self, backend: Backend, call: Call, output_shapes: Shapes) -> None:
        self.backend, self.problem, self._param_count = backend, call.problem, len(call.params)
        given = [call.x, *call.params, *call.states]
        self._aligned_count = len(given)  # of tensors whose alignment matters: not that of masks
        self._misaligned = [tensor.data_ptr() % ALIGNMENT for tensor in given]
        given += [mask for mask in (call.lengths, call.reset, call.seed) if mask is not None]
        self._views = [(tuple(tensor.shape), tensor.stride()) for tensor in given]

        def run(tensors: Sequence[Tensor]) -> Found:
            out = backend.forward(self.called(tensors))
            return [out.y, *out.finals, *out.reserve]

        self.program = record(run, given).shaped(output_shapes)
        self._without_memory = 0  # runs that found none

    def called(self, every: Sequence[Tensor]) -> Call:
        """The call of x, parameters, states, masks and a seed that lie as those of the first."""
        given = [tensor.as_strided(*view) for tensor, view in zip(every, self._views)]
        first, end = 1 + self._param_count, self._aligned_count  # of the states
        lengths, reset, seed = lengths_reset_seed(self.problem, given[end:])
        return Call(
            self.problem, given[0], given[first:end], given[1:first], lengths, reset, seed=seed
        )

    def __call__(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """Y and the final states, of x, parameters, states and, if there are any, masks and seed.

        None also where the workspace finds no memory: the usual way needs less at a time.
        """
        try:
            return self.forward(every) if self.ready(every) else None
        except OutOfMemoryError:
            return None

    def ready(self, every: Sequence[Tensor]) -> bool:
        """Whether they have memory, aligned as before, and torch's precision is what it was.

        By both, kernels and products are chosen. Never after some runs without room for a
        workspace: a request that fails makes torch's allocator give back all that it keeps.
        """
        found = [*map(_address, every)]
        misaligned = [address % ALIGNMENT for address in found[: self._aligned_count]]
        failed = self._without_memory >= MAX_MEMORY_FAILURES
        if failed or not all(found) or misaligned != self._misaligned:
            return False
        problem = self.problem
        return precision_of(problem.spec, problem.dtype, problem.device) == problem.precision

    def forward(self, every: Sequence[Tensor]) -> list[Tensor]:
        """Y, the final states, and a reserve if gradients are recorded."""
        return self._ran(self.program, every)

    def _ran(self, program: Program, given: Sequence[Tensor]) -> list[Tensor]:
        try:
            return program.run([*map(_address, given)])
        except OutOfMemoryError:
            self._without_memory += 1
            raise


class _Backward(NamedTuple):
    """A backward pass.

    Attributes:
        gives: of which of x, parameters and states its program gives gradients.
    """

    program: Program
    gives: list[bool]


class ProgramGradCall(ProgramCall):
    """Both passes of a call that autograd records: a `PreparedGradCall`.

    Args:
        input_shapes: of x and the states as the caller has them.
    """

    def __init__(
        self, backend: Backend, call: Call, output_shapes: Shapes, input_shapes: Shapes
    ) -> None:
        super().__init__(backend, call, output_shapes)
        y, *made = [made.template for made in self.program.made[:-1]]
        kept = [y, *made[len(output_shapes) - 1 :]]  # and the reserve
        self.saved = [(tensor.shape, tensor.dtype) for tensor in kept]
        x, *states = input_shapes
        self._shapes = [x, *(tuple(param.shape) for param in call.params), *states]
        self._results = result_shapes(self.problem, call.x.shape[0], call.x.shape[1])
        self._known: dict[tuple[bool, ...], _Backward | None] = {}

    def backward(
        self,
        every: Sequence[Tensor],
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> Found:
        """The gradients that are needed of x, parameters and states."""
        present = [grad is not None for grad in grads]
        # a hook may have left parts of other tensors, which no program is made for
        tensors = [*every, *map(dense, outputs), *(dense(g) for g in grads if g is not None)]
        key = *needs, *present
        # a dry run's memory would belong to the graph for good
        if key not in self._known and not torch.cuda.is_current_stream_capturing():
            self._known[key] = self._recorded(tensors, present, needs)
        known = self._known.get(key)
        try:
            if known is not None:
                made = iter(self._ran(known.program, tensors))
                return [next(made) if given else None for given in known.gives]
        except OutOfMemoryError:  # the usual way needs less at a time
            pass
        found = self._run(tensors, present, needs)
        return [None if g is None else g.view(s) for g, s in zip(found, self._shapes)]

    def _recorded(
        self, tensors: Sequence[Tensor], present: list[bool], needs: tuple[bool, ...]
    ) -> _Backward | None:
        """The pass as a program, None where it is more than that."""
        gives: list[bool] = []

        def run(tensors: Sequence[Tensor]) -> Found:
            found = self._run(tensors, present, needs)
            gives[:] = [grad is not None for grad in found]
            return found

        try:
            program = record(run, tensors)
        except (NotRepeatableError, OutOfMemoryError):
            return None
        return _Backward(program.shaped([*compress(self._shapes, gives)]), gives)

    def _run(
        self, tensors: Sequence[Tensor], present: list[bool], needs: tuple[bool, ...]
    ) -> Found:
        """The pass, of x, parameters and states, y and the reserve, and gradients that there are.

        Args:
            present: which of the gradients of y and the final states there are.
        """
        count, params = len(self._views), self._param_count
        call, rest = self.called(tensors[:count]), iter(tensors[count:])
        y = next(rest).view(self._results[0])
        reserve = [next(rest) for _ in self.saved[1:]]
        dy, *finals = [
            next(rest).view(shape) if there else None
            for there, shape in zip(present, self._results)
        ]
        wanted = Needs.of_prepared(needs, params, self._aligned_count - 1 - params)
        found = self.backend.backward(call, y, reserve, Cotangents(dy, finals, []), wanted)
        return [found.x, *found.params, *found.states]
