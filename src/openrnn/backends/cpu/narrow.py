"""Calls in float16 or bfloat16 made again: in float32, between conversions of all tensors.

On some processors products are of bfloat16 nevertheless, see `rounding`.

Without gradients large parameters are converted once, as panels are packed once (`kept.py`).
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from openrnn.backends.base import Call, Memory
from openrnn.backends.cpu.again import Again, AgainRecorded, Shapes
from openrnn.backends.cpu.kept import OUT
from openrnn.backends.cpu.program import Launch, Value
from openrnn.backends.cpu.tensors import converted, readable
from openrnn.kernels.cpu import launch
from openrnn.kernels.cpu.args import DIGEST_WORDS

LEAST_KEPT = 1 << 16  # below, converting takes no longer than the call of a digest


class Narrow:
    """A forward pass of tensors that lie as the kernels read them: a `Repeat`."""

    def __init__(self, call: Call, shapes: Shapes, memory: Memory | None = None) -> None:
        self._dtype, self._memory = call.x.dtype, memory
        self._wide = Again(readable(call, torch.float32), shapes, memory)
        large = {} if memory is None else dict(enumerate(call.params, 1))
        self._kept = {
            place: KeptParameter(place, param)
            for place, param in large.items()
            if param.numel() >= LEAST_KEPT and param.nbytes % 4 == 0
        }

    def ready(self, every: Sequence[Tensor]) -> bool:
        """See `Again`."""
        return self._wide.ready(every)

    def __call__(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """Y and the final states, of x, parameters and states."""
        found = self.wide(every) if self.ready(every) else None
        return None if found is None else [one.to(self._dtype) for one in found]

    def wide(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """What a call returns, in float32; None where there are other threads, or no memory."""
        given = list(every)
        if self._memory is not None:
            for place, kept in self._kept.items():
                given[place] = kept.read(every[place], self._memory)
        return self._wide(_widened(given))


def bound(call: Call, results: Sequence[Tensor]) -> Callable[[Tensor], None] | None:
    """As `forward.bound`, for tensors of 16 bits."""
    run = Narrow(call, [tuple(one.shape) for one in results], {})
    given = [one.detach() for one in (*call.params, *call.states)]
    if not run.ready((call.x, *given, *results)):
        return None

    def step(x: Tensor) -> None:
        found = run.wide((x, *given))
        if found is None:
            raise ValueError("x or a parameter has no memory, or the number of threads has changed")
        for result, new in zip(results, found):
            result.copy_(new)

    return step


class KeptParameter:
    """A parameter in float32, which calls of a module keep until its elements change.

    Args:
        place: its number among the tensors of a call.
    """

    def __init__(self, place: int, param: Tensor) -> None:
        from openrnn.kernels.cpu import matrices

        words = param.nbytes // 4  # of 32 bits, as a digest reads it
        args = matrices.digest_args(words, "float32", launch.threads())
        given = {"matrix": Value("matrix"), "out": Value(OUT)}
        self._digest = Launch(matrices.digest(), args, args.tasks, given, {"matrix": 0, OUT: 1})
        self._words = ctypes.c_int32 * (args.parts * DIGEST_WORDS)
        self._key = "wide", place, param.dtype

    def read(self, param: Tensor, memory: Memory) -> Tensor:
        """The parameter in float32: what is in memory while it is right, else a new copy.

        Copies are never overwritten: another thread may read them.
        """
        words = self._words()
        self._digest.run([param.data_ptr(), ctypes.addressof(words)])
        digest, known = bytes(words), memory.get(self._key)
        if known is None or known[0] != digest:
            known = memory[self._key] = digest, param.detach().float()
        wide: Tensor = known[1]
        return wide


class NarrowRecorded:
    """Both passes of a call that autograd records: a `RecordedRepeat`."""

    def __init__(self, call: Call, shapes: Shapes, given: Shapes) -> None:
        self._dtype, self._visible = call.x.dtype, len(shapes)
        self._wide = AgainRecorded(readable(call, torch.float32), shapes, given)
        (y, _), *reserve = self._wide.saved
        self.saved = [(y, self._dtype), *reserve]

    def ready(self, every: Sequence[Tensor]) -> bool:
        """See `Again`."""
        return self._wide.ready(every)

    def __call__(self, every: Sequence[Tensor]) -> list[Tensor] | None:
        """Y, the final states and the reserve of tensors that are ready; None of others."""
        return self.forward(every) if self.ready(every) else None

    def forward(self, every: Sequence[Tensor]) -> list[Tensor]:
        """Y, the final states and the reserve, which stays float32."""
        found = self._wide.forward(_widened(every))
        return [*(one.to(self._dtype) for one in found[: self._visible]), *found[self._visible :]]

    def backward(
        self,
        every: Sequence[Tensor],
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The gradients that are needed of x, parameters and states."""
        wide = [converted(grad, torch.float32) for grad in grads]
        found = self._wide.backward(_widened(every), _widened(outputs), wide, needs)
        return [converted(grad, self._dtype) for grad in found]


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in float32, masks as they are."""
    return [one.float() if one.is_floating_point() else one for one in tensors]
