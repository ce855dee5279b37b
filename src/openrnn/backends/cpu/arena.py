"""Memory of a thread for large tensors that a call needs no longer than it runs.

glibc gives large pieces back to the system when they are freed, and each call would fault in their
pages again: of 10 MB that takes 1 ms, several times as long as a step that reads them.
"""

from contextlib import suppress
from threading import local

import torch
from torch import Tensor

from openrnn.backends.cpu.program import SCRATCH
from openrnn.backends.cpu.program_builder import CPU
from openrnn.memory import allocator_for

MIN_ARENA_ELEMENTS = 1 << 16  # of a tensor that is worth it: smaller ones are taken as ever
_ALIGNMENT = 16  # elements: a cache line of float32


_fresh = allocator_for(torch.float32, CPU).empty


class Arena(local):
    """Float32 tensors one after the other. All are let go where the outermost `with` of it ends.

    It has as much memory as a call needed so far, up to `SCRATCH` bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory = _memory(0)
        self._used = self._calls = 0

    def __enter__(self) -> "Arena":
        self._calls += 1  # more than 1 in a call that a finalizer or a signal handler makes
        return self

    def __exit__(self, *_: object) -> None:
        self._calls -= 1
        if self._calls:
            return
        used, self._used = self._used, 0
        if self._memory.numel() < used <= SCRATCH // 4:
            self._memory = _memory(0)  # the old one goes first
            with suppress(RuntimeError):  # without room the next call takes fresh memory, too
                self._memory = _memory(used)

    def take(self, like: Tensor) -> Tensor:
        """A contiguous float32 tensor of any values, in the shape of another one."""
        count, start = like.numel(), self._used
        if not self._calls:
            return _fresh(*like.shape)
        self._used += -(-count // _ALIGNMENT) * _ALIGNMENT
        if self._used > self._memory.numel():
            return _fresh(*like.shape)
        return self._memory[start : start + count].view(like.shape)

    def to_float32(self, tensor: Tensor) -> Tensor:
        """The tensor in float32."""
        if not tensor.is_contiguous():
            return tensor.float()
        return self.take(tensor).copy_(tensor.detach())


def _memory(count: int) -> Tensor:
    with torch.inference_mode(False):
        return _fresh(count)


ARENA = Arena()
