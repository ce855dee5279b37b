"""Weights in panels, kept from one call of inference to the next.

A parameter of a module keeps the panels that were made of it, with a digest of its elements. Each
call makes the digest anew, in a fraction of the time of packing, and packs where it has changed.
A tensor's version would be quicker to compare, and wrong: `p.data.copy_(q)`, the usual update of a
target network, leaves it as it is.
"""

import ctypes
from collections.abc import Callable, Hashable, MutableMapping, Sequence

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from openrnn.backends.cpu.program import Launch
from openrnn.memory import Made

OUT = "out"  # the slot of what a launch here writes, the last of its values

# of a parameter, by what panels of it follow from: the digest, and the panels
_KEPT: MutableMapping[Tensor, dict[Hashable, tuple[bytes, Tensor]]] = WeakIdKeyDictionary()


class Kept:
    """A matrix in panels for the calls of a program.

    Args:
        param: its place among the parameters.
        key: what its panels follow from beyond its elements.
        digest, pack: write to `OUT`; words: int32 numbers of the digest.
        made: memory for the panels.
    """

    def __init__(
        self, param: int, key: Hashable, digest: Launch, words: int, pack: Launch, made: Made
    ) -> None:
        self._param, self._key, self._made = param, key, made
        self._digest, self._pack = digest, pack
        self._words = ctypes.c_int32 * words

    def panels(self, values: Sequence[int], params: Sequence[Tensor]) -> Tensor:
        """The panels of a call's matrix, packed now unless a parameter of a module kept them.

        Args:
            values: of the slots that a run gives; params: none where they are converted ones.
        """
        param = params[self._param] if params else None
        if type(param) is not nn.Parameter:
            return self._packed(values)
        of_param = _KEPT.get(param)
        if of_param is None:
            of_param = _KEPT[param] = {}
        now, found = self._told(values), of_param.get(self._key)
        if found is None or found[0] != now:
            found = of_param[self._key] = now, self._packed(values)
        return found[1]

    def bound(self, values: Sequence[int]) -> tuple[Tensor, Callable[[], None]]:
        """Panels in memory of their own, and what packs them where the matrix has changed."""
        panels, before = self._made.like(self._made.template), b""

        def update() -> None:
            nonlocal before
            now = self._told(values)
            if now != before:
                self._pack.run([*values, panels.data_ptr()])
                before = now

        return panels, update

    def _told(self, values: Sequence[int]) -> bytes:
        words = self._words()
        self._digest.run([*values, ctypes.addressof(words)])
        return bytes(words)

    def _packed(self, values: Sequence[int]) -> Tensor:
        panels = self._made.like(self._made.template)
        self._pack.run([*values, panels.data_ptr()])
        return panels
