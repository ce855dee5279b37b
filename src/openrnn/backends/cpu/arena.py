"""Memory of a thread for large tensors that a call needs no longer than it runs.

glibc gives large pieces back to the system when they are freed, and each call would fault in their
pages again: of 10 MB that takes 1 ms, several times as long as a step that reads them.
"""

from threading import local

import torch
from torch import Tensor

from openrnn.backends.cpu.program import SCRATCH

LEAST = 1 << 16  # elements of a tensor that is worth it: smaller ones are taken as ever
_ALIGNMENT = 16  # elements: a cache line of float32


class Arena(local):
    """Float32 tensors one after the other, all let go at once.

    It has as much memory as the largest call needed so far, up to `SCRATCH` bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory = _memory(0)
        self._used = self._most = self._calls = 0

    def begin(self) -> None:
        """A call begins; one within another, in a finalizer or a signal handler, goes on."""
        self._calls += 1

    def end(self) -> None:
        """It has ended: what was taken since the first `begin` is let go."""
        self._calls -= 1
        if not self._calls:
            self._used = 0
            if self._memory.numel() < self._most <= SCRATCH // 4:
                self._memory = _memory(self._most)

    def take(self, like: Tensor) -> Tensor:
        """A contiguous float32 tensor of any values, in the shape of another one."""
        count, start = like.numel(), self._used
        if not self._calls:
            return torch.empty(like.shape)
        self._used += -(-count // _ALIGNMENT) * _ALIGNMENT
        self._most = max(self._most, self._used)
        if self._used > self._memory.numel():
            return torch.empty(like.shape)
        return self._memory[start : start + count].view(like.shape)

    def widened(self, tensor: Tensor) -> Tensor:
        """The tensor in float32."""
        if not tensor.is_contiguous():
            return tensor.float()
        return self.take(tensor).copy_(tensor.detach())


def _memory(count: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(count)


ARENA = Arena()
