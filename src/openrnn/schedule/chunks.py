"""Chunks of time: the steps that one launch of a loop runs."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import Tensor

Mode = Literal["in_turn", "both_directions", "wavefront", "one_launch", "single_step"]


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
        mode: what runs at the same time: nothing ("in_turn"), the loops of both directions of the
            layer, chunks of several layers ("wavefront"), or all layers in one launch. A single
            step has kernels of its own.
        overlap: products run on another stream while a loop runs. Which ones, by mode:
            "in_turn": forward's of the next chunk; backward's of the chunk that ran before.
            "wavefront": backward's of the weights of the layer above, beside a layer's last loop.
            "both_directions": forward's of the next chunk; backward's of the weights of the layer
            above beside the first loops, and of dx of the chunk that ran before beside later ones.
        by_chunk: in backward of a wavefront all products of a chunk follow its loop, so that a
            layer holds the gate gradients of one chunk. Else those of weights follow its last loop.
        forks: in backward, once no loop is left, the products that remain run side by side, each
            on a stream of its own.
        loops: for how many loops at the same time the kernel is ranked; 1: the kernel that a loop
            alone has. Two directions at once may also run in that one.
        fills: kinds of loops, "forward", "backward" or "recompute", that poll a flag buffer, which
            must be filled before each of them begins.
    """

    edges: tuple[int, ...]
    reverse: bool = False
    mode: Mode = "in_turn"
    overlap: bool = False
    by_chunk: bool = False
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
