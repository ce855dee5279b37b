"""Calls in float16 or bfloat16 made again: in float32, between conversions of tensors.

Both passes may read matrices as they are, and products may be of bfloat16: see `rounding`.

Without gradients large parameters are converted once, as panels are packed once (`weight_cache`).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from openrnn.backends.base import Call, ModuleCache, Shapes
from openrnn.backends.cpu.arena import ARENA, MIN_ARENA_ELEMENTS
from openrnn.backends.cpu.backward import BackwardProgram
from openrnn.backends.cpu.program import Launch, Program, SlotRef
from openrnn.backends.cpu.program_call import ProgramCall, ProgramGradCall
from openrnn.backends.cpu.rounding import backward_reads_in_place, reads_in_place
from openrnn.backends.cpu.tensors import converted, gate_matrices, readable
from openrnn.backends.cpu.weight_cache import OUT, CachedByDigest
from openrnn.kernels.cpu import launch
from openrnn.kernels.cpu.args import DIGEST_WORDS
from openrnn.spec import Problem

Convert = Callable[[Tensor], Tensor]


class Call16Bit:
    """A forward pass of tensors that lie as the kernels read them: a `PreparedCall`."""

    def __init__(self, call: Call, output_shapes: Shapes, cache: ModuleCache | None = None) -> None:
        self._dtype, self._cache = call.x.dtype, cache
        in_place = _in_place(call, reads_in_place)
        wide = readable(call, torch.float32, bool(in_place))
        self._wide = ProgramCall(wide, output_shapes, cache)
        large = {} if cache is None else dict(enumerate(call.params, 1))
        self._kept = {
            index: CachedFloat32Parameter(index, param)
            for index, param in large.items()
            if param.numel() >= MIN_ARENA_ELEMENTS
            and param.nbytes % 4 == 0
            and index not in in_place
        }
        self._conversions = _conversions(call, {*in_place, *self._kept})

    def ready(self, every: Sequence[Tensor]) -> bool:
        """See `PreparedCall.ready`."""
        return self._wide.ready(every)

    def __call__(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """Y and the final states, of x, parameters and states."""
        if not self.ready(every):
            return None
        with ARENA:
            found = self.run_float32(every)
            return None if found is None else [one.to(self._dtype) for one in found]

    def run_float32(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """What a call returns, in float32; None where there are other threads, or no memory."""
        given = list(every)
        if self._cache is not None:
            for index, kept in self._kept.items():
                given[index] = kept.read(every[index], self._cache)
        return self._wide(_converted(self._conversions, given))


def bound(call: Call, results: Sequence[Tensor]) -> Callable[[Tensor], None] | None:
    """As `forward.bound`, for tensors of 16 bits."""
    run = Call16Bit(call, [tuple(one.shape) for one in results], {})
    given = [one.detach() for one in (*call.params, *call.states)]
    if not run.ready((call.x, *given, *results)):
        return None

    def step(x: Tensor) -> None:
        with ARENA:
            found = run.run_float32((x, *given))
        if found is None:
            raise ValueError("x or a parameter has no memory, or the number of threads has changed")
        for result, new in zip(results, found):
            result.copy_(new)

    return step


class CachedFloat32Parameter(CachedByDigest):
    """A parameter in float32, which calls of a module keep until its elements change.

    Args:
        index: among the tensors of a call.
    """

    def __init__(self, index: int, param: Tensor) -> None:
        from openrnn.kernels.cpu import matrices

        words = param.nbytes // 4  # of 32 bits, as a digest reads it
        args = matrices.digest_args(words, "float32", launch.threads())
        given = {"matrix": SlotRef("matrix"), "out": SlotRef(OUT)}
        digest = Launch(matrices.digest(), args, args.tasks, given, {"matrix": 0, OUT: 1})
        super().__init__(("wide", index, param.dtype), digest, args.parts * DIGEST_WORDS)

    def read(self, param: Tensor, cache: ModuleCache) -> Tensor:
        """The parameter in float32."""
        return self.get([param.data_ptr()], cache, lambda: param.detach().float())


class _Float32GradCall(ProgramGradCall):
    """The passes in float32, whose results lie in the arena: they are converted at once."""

    def _forward(self, output_shapes: Shapes) -> Program:
        program = super()._forward(output_shapes)
        return program.lent(len(output_shapes), MIN_ARENA_ELEMENTS, ARENA.take)

    def _backward(self, needs: tuple[bool, ...], given: Any) -> BackwardProgram:
        made = super()._backward(needs, given)
        program = made.program
        return made._replace(
            program=program.lent(len(program.made) - 1, MIN_ARENA_ELEMENTS, ARENA.take)
        )


class GradCall16Bit:
    """Both passes of a call that autograd records: a `PreparedGradCall`."""

    def __init__(self, call: Call, output_shapes: Shapes, input_shapes: Shapes) -> None:
        self._dtype, self._visible = call.x.dtype, len(output_shapes)
        in_place = _in_place(call, reads_in_place)
        wide = readable(call, torch.float32, bool(in_place))
        self._wide = _Float32GradCall(wide, output_shapes, input_shapes)
        self._forward_conversions = _conversions(call, in_place)
        self._backward_conversions = _conversions(call, _in_place(call, backward_reads_in_place))
        self._by_gradients: dict[Any, list[Convert]] = {}  # by those given and needed
        (y, _), *reserve = self._wide.saved
        self.saved = [(y, self._dtype), *reserve]

    def ready(self, every: Sequence[Tensor]) -> bool:
        """See `PreparedCall.ready`."""
        return self._wide.ready(every)

    def __call__(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """Y, the final states and the reserve of tensors that are ready; None of others."""
        return self.forward(every) if self.ready(every) else None

    def forward(self, every: Sequence[Tensor]) -> list[Tensor]:
        """Y, the final states and the reserve, which stays float32."""
        with ARENA:
            found = self._wide.forward(_converted(self._forward_conversions, every))
            visible = [one.to(self._dtype) for one in found[: self._visible]]
        return [*visible, *found[self._visible :]]

    def backward(
        self,
        every: Sequence[Tensor],
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The gradients that are needed of x, parameters and states."""
        with ARENA:
            wide = [converted(grad, torch.float32) for grad in grads]
            given = _converted(self._conversions(grads, needs), every)
            y, *reserve = outputs  # which is float32
            found = self._wide.backward(given, [y.float(), *reserve], wide, needs)
            return [converted(grad, self._dtype) for grad in found]

    def _conversions(
        self, grads: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> list[Convert]:
        """Those of a backward pass: what its program does not read stays as it is."""
        key = needs, *[grad is not None for grad in grads]
        found = self._by_gradients.get(key)
        if found is None:
            program = self._wide.program_of(grads, needs).program
            found = self._by_gradients[key] = [
                how if self._wide.reads(program, index) else _as_it_is
                for index, how in enumerate(self._backward_conversions)
            ]
        return found


def _in_place(call: Call, reads: Callable[[Problem, int, int], bool]) -> frozenset[int]:
    """The places among the tensors of a call of matrices that a pass reads as they are."""
    steps, batch, _ = call.x.shape
    if not reads(call.problem, steps, batch):
        return frozenset()
    return frozenset(1 + index for index in gate_matrices(call.problem.spec))  # x is the first


def _conversions(call: Call, but: Collection[int]) -> list[Convert]:
    """How each tensor of a call becomes float32; masks, and those at some places, stay."""
    masks = [mask for mask in (call.lengths, call.reset, call.seed) if mask is not None]
    given = [call.x, *call.params, *call.states]
    found = [_as_it_is if index in but else _conversion(one) for index, one in enumerate(given)]
    return [*found, *[_as_it_is for _ in masks]]


def _conversion(tensor: Tensor) -> Convert:
    return Tensor.float if tensor.numel() < MIN_ARENA_ELEMENTS else ARENA.to_float32


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _converted(how: Sequence[Convert], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [convert(tensor) for convert, tensor in zip(how, tensors)]
