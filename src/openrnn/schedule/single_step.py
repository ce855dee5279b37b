"""A layer in one step, T = 1: no product before it and no loop, one launch for both."""

from collections.abc import Iterator, Sequence

from openrnn.schedule.chunks import Chunking
from openrnn.schedule.operations import (
    BeginLayer,
    FinishWeights,
    GradientProducts,
    Operation,
    Step,
)


def forward(layer: int, chunkings: Sequence[Chunking]) -> Iterator[Operation]:
    """The forward pass of a layer, one direction after the other."""
    for direction, chunking in enumerate(chunkings):
        yield BeginLayer(layer, direction)
        yield Step(layer, direction, chunking.chunks[0])


def backward(layer: int, chunkings: Sequence[Chunking]) -> Iterator[Operation]:
    """The backward pass of a layer."""
    for direction, chunking in enumerate(chunkings):
        yield BeginLayer(layer, direction)
        yield Step(layer, direction, chunking.chunks[0], "backward")
        yield GradientProducts(layer, direction, chunking.chunks[0])
        yield FinishWeights(layer, direction)
