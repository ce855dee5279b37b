"""Long calls in parts of their steps, so that what a part needs beside its results stays small."""

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from openrnn.backends.fused.ragged import Rows

# Each part costs about 40 us more than its steps, as it loads R anew. On an H200 an LSTM in bf16 of
# T 1024, B 64, H 512 was measured: docs/kernels.md.
LARGE = 256 << 20  # bytes of gate gradients of all steps, from which on a call runs in parts
ENOUGH = 44 << 20  # bytes of them that make a part
LEAST = 128  # steps that make a part

# with recompute, where memory comes first
ENOUGH_AGAIN = 32 << 20
LEAST_AGAIN = 32


class Part(NamedTuple):
    """Steps begin to end of a call, and what its lengths and resets are there."""

    begin: int
    end: int
    rows: Rows | None
    reset: Tensor | None

    @property
    def steps(self) -> int:
        return self.end - self.begin

    def of(self, tensor: Tensor) -> Tensor:
        """These steps of a tensor (T, ...)."""
        whole = self.end - self.begin == tensor.shape[0]  # the usual call: a slice costs its host
        return tensor if whole else tensor[self.begin : self.end]


def count(steps: int, batch: int, row: int) -> int:
    """How many parts a call has; `row`: bytes of the gate gradients of a step of one sequence."""
    step = batch * row
    if steps * step < LARGE:
        return 1
    each = max(LEAST, ENOUGH // step)
    return (steps + each - 1) // each


def count_again(steps: int, batch: int, row: int) -> int:
    """The same with recompute. The reserve has this size: symbolic T and B must meet no branch."""
    most = LEAST_AGAIN + 1 + ENOUGH_AGAIN // (batch * row + 1)
    return steps // most + 1


def even(number: int, steps: int) -> list[int]:
    """Where that many parts begin and end, which differ by a step at most."""
    return [steps * part // number for part in range(number + 1)]


def split(edges: list[int], rows: Rows | None, reset: Tensor | None) -> list[Part]:
    """Parts between such steps, in the order of time."""
    if len(edges) == 2:
        return [Part(0, edges[1], rows, reset)]
    found = []
    for begin, end in pairwise(edges):
        here = None
        if rows is not None:
            here = Rows((rows.lengths - begin).clamp(0, end - begin), rows.order)
        found.append(Part(begin, end, here, None if reset is None else reset[begin:end]))
    return found
