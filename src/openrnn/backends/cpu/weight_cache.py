"""Weights in panels, which calls of a module without gradients keep for the next one.

A module that repeats calls has memory for them (`nn/call_cache.py`): panels, with a digest of the
elements that they were made of. Each call makes the digest anew, in a fraction of the time of
packing, and packs where it differs. A tensor's version would be quicker to compare, and wrong:
`p.data.copy_(q)`, the usual update of a target network, leaves it as it is. A weak reference to the
parameter would be wrong, too: `torch.utils.swap_tensors` refuses tensors that have one.
"""

import ctypes
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from openrnn.backends.base import ModuleCache
from openrnn.backends.cpu.program import Launch
from openrnn.memory import TensorFactory

OUT = "out"  # the slot of what a launch here writes, the last of its values


class CachedByDigest:
    """What calls make of a matrix and keep for the next one until its elements change.

    Args:
        key: the matrix among the parameters, and what else the result follows from.
        digest: writes to `OUT`; words: int32 numbers of the digest.
    """

    def __init__(self, key: Hashable, digest: Launch, words: int) -> None:
        self._key, self._digest, self._words = key, digest, ctypes.c_int32 * words

    def get(self, values: Sequence[int], cache: ModuleCache, make: Callable[[], Tensor]) -> Tensor:
        """The result in the cache while it is right, else what `make` returns.

        Results are never overwritten: another thread may read them.

        Args:
            values: of the slots that the digest reads, but for `OUT`.
        """
        digest, known = self.digest(values), cache.get(self._key)
        if known is None or known[0] != digest:
            known = cache[self._key] = digest, make()
        found: Tensor = known[1]
        return found

    def digest(self, values: Sequence[int]) -> bytes:
        """Of the elements that there are now."""
        words = self._words()
        self._digest.run([*values, ctypes.addressof(words)])
        return bytes(words)


class CachedPanels(CachedByDigest):
    """A matrix in panels for the calls of a program.

    Args:
        key, digest, words: see `CachedByDigest`.
        pack: writes to `OUT`; made: memory for the panels.
    """

    def __init__(
        self, key: Hashable, digest: Launch, words: int, pack: Launch, made: TensorFactory
    ) -> None:
        super().__init__(key, digest, words)
        self._pack, self._made = pack, made

    def panels(self, values: Sequence[int], cache: ModuleCache | None) -> Tensor:
        """The panels of a call's matrix; without a cache they are packed anew.

        Args:
            values: of the slots that a run gives.
        """
        if cache is None:
            return self._packed(values)
        return self.get(values, cache, lambda: self._packed(values))

    def bound(self, values: Sequence[int]) -> tuple[Tensor, Callable[[], None]]:
        """Panels in memory of their own, and what packs them where the matrix has changed."""
        panels, before = self._made.like(self._made.template), b""

        def update() -> None:
            nonlocal before
            digest = self.digest(values)
            if digest != before:
                self._pack.run([*values, panels.data_ptr()])
                before = digest

        return panels, update

    def _packed(self, values: Sequence[int]) -> Tensor:
        panels = self._made.like(self._made.template)
        self._pack.run([*values, panels.data_ptr()])
        return panels
