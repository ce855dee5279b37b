"""A layer in one step, T = 1: no product before it and no loop, one launch for both."""

from collections.abc import Iterator, Sequence

from openrnn.schedule.chunks import Chunking
from openrnn.schedule.operations import (
    BeginLayer,
    FinishWeights,
    Operation,
    Step,
    gradient_products,
)


def forward(layer: int, chunkings: Sequence[Chunking]) -> Iterator[Operation]:
    """The forward pass of a layer, one direction after the other."""
    for direction, chunking in enumerate(chunkings):
        yield BeginLayer(layer, direction)
        yield Step(layer, direction, chunking.chunks[0])


def backward(
    layer: int, chunkings: Sequence[Chunking], fork_streams: Sequence[int]
) -> Iterator[Operation]:
    """The backward pass of a layer; `fork_streams`: see `fork`."""
    for direction, chunking in enumerate(chunkings):
        yield BeginLayer(layer, direction)
        yield Step(layer, direction, chunking.chunks[0], "backward")
        yield from gradient_products(layer, direction, chunking.chunks[0], fork_streams)
        yield FinishWeights(layer, direction)
