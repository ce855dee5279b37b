"""Chunks of time: the steps that one launch of a loop runs."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Chunk(NamedTuple):
    """Steps `begin` to `end` in time; `number` counts chunks in the order of the forward loop."""

    number: int
    begin: int
    end: int
    steps: int

    def of(self, tensor: Tensor) -> Tensor:
        """These steps of a tensor (T, ...)."""
        whole = self.steps == tensor.shape[0]  # the usual call: a slice costs the host
        return tensor if whole else tensor[self.begin : self.end]


@dataclass(frozen=True)
class Chunking:
    """How the loop of one layer and direction is cut, and what runs beside it.

    Args:
        edges: where chunks begin and end, in time, from 0 to T.
        reverse: forward begins with the last chunk.
        overlap: products of one chunk run on a side stream beside the loop of another; with
            wavefront, in backward, those of the weights of the layer above beside its loops; with
            at_once both.
        at_once: the loops of both directions of the layer run at the same time.
        wavefront: its chunks run beside those of other layers.
        stack: one launch runs the loops of all layers.
        step: it is a single step, which has kernels of its own.
        forks: backward: the products after the only loop, and after the last ones of `at_once`
            without overlap, run side by side, on streams of their own.
        loops: of how many loops at once the device holds its kernel; 1 where any kernel does.
        fills: kinds of loops, "forward", "backward" or "recompute", that poll a flag buffer, which
            must be filled before each of them begins.
    """

    edges: tuple[int, ...]
    reverse: bool = False
    overlap: bool = False
    at_once: bool = False
    wavefront: bool = False
    stack: bool = False
    step: bool = False
    forks: bool = False
    loops: int = 1
    fills: frozenset[str] = frozenset()

    @property
    def whole(self) -> Chunk:
        """All steps as one chunk."""
        begin, end = self.edges[0], self.edges[-1]
        return Chunk(0, begin, end, end - begin)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks as forward runs them."""
        spans = [*pairwise(self.edges)]
        if self.reverse:
            spans.reverse()
        return tuple(
            Chunk(number, begin, end, end - begin) for number, (begin, end) in enumerate(spans)
        )
