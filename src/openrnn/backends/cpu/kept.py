"""Weights in panels, which calls of a module without gradients keep for the next one.

A module that repeats calls has memory for them (`nn/repeats.py`): panels, with a digest of the
elements that they were made of. Each call makes the digest anew, in a fraction of the time of
packing, and packs where it differs. A tensor's version would be quicker to compare, and wrong:
`p.data.copy_(q)`, the usual update of a target network, leaves it as it is. A weak reference to the
parameter would be wrong, too: `torch.utils.swap_tensors` refuses tensors that have one.
"""

import ctypes
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from openrnn.backends.base import Memory
from openrnn.backends.cpu.program import Launch
from openrnn.memory import Made

OUT = "out"  # the slot of what a launch here writes, the last of its values


class KeptPanels:
    """A matrix in panels for the calls of a program.

    Args:
        key: the matrix among the parameters, and what its panels follow from beyond its elements.
        digest, pack: write to `OUT`; words: int32 numbers of the digest.
        made: memory for the panels.
    """

    def __init__(self, key: Hashable, digest: Launch, words: int, pack: Launch, made: Made) -> None:
        self._key, self._digest, self._pack, self._made = key, digest, pack, made
        self._words = ctypes.c_int32 * words

    def panels(self, values: Sequence[int], memory: Memory | None) -> Tensor:
        """The panels of a call's matrix: those in memory while they are right, else new ones.

        Panels are never overwritten: another thread may read them.

        Args:
            values: of the slots that a run gives.
        """
        if memory is None:
            return self._packed(values)
        digest, known = self._digest_of(values), memory.get(self._key)
        if known is None or known[0] != digest:
            known = memory[self._key] = digest, self._packed(values)
        panels: Tensor = known[1]
        return panels

    def bound(self, values: Sequence[int]) -> tuple[Tensor, Callable[[], None]]:
        """Panels in memory of their own, and what packs them where the matrix has changed."""
        panels, before = self._made.like(self._made.template), b""

        def update() -> None:
            nonlocal before
            digest = self._digest_of(values)
            if digest != before:
                self._pack.run([*values, panels.data_ptr()])
                before = digest

        return panels, update

    def _digest_of(self, values: Sequence[int]) -> bytes:
        words = self._words()
        self._digest.run([*values, ctypes.addressof(words)])
        return bytes(words)

    def _packed(self, values: Sequence[int]) -> Tensor:
        panels = self._made.like(self._made.template)
        self._pack.run([*values, panels.data_ptr()])
        return panels
