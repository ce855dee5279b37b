"""Both directions of a layer at once: the reverse one's loop runs on the side stream.

What a loop on the side stream reads and writes is taken before it and kept until the main stream
has waited for it: the allocator knows the order of the main stream alone.
"""

from collections.abc import Iterator, Sequence

from openrnn.schedule.chunks import Chunking
from openrnn.schedule.operations import (
    MAIN,
    SIDE,
    BeginLayer,
    FillFlags,
    FinishWeights,
    GradientProducts,
    Loop,
    MakeRoom,
    Operation,
    Wait,
    loop_inputs,
)


def forward(layer: int, chunkings: Sequence[Chunking]) -> Iterator[Operation]:
    """The forward pass of a layer; each direction's product lies on the stream of its loop."""
    (chunk,), (reverse,) = chunkings[0].chunks, chunkings[1].chunks
    loops, fills = chunkings[0].loops, "forward" in chunkings[0].fills
    yield BeginLayer(layer, 0, loops)
    yield BeginLayer(layer, 1, loops)
    yield MakeRoom(layer, 1, reverse)
    yield Wait(MAIN, stream=SIDE)
    yield from loop_inputs(layer, 0, chunk, fills)
    yield Loop(layer, 0, chunk)
    yield from loop_inputs(layer, 1, reverse, fills, SIDE)
    yield Loop(layer, 1, reverse, stream=SIDE)
    yield Wait(SIDE)


def backward(layer: int, chunkings: Sequence[Chunking]) -> Iterator[Operation]:
    """The backward pass of a layer; the second dx is added to the first."""
    (chunk,), (reverse,) = chunkings[0].chunks, chunkings[1].chunks
    loops, fills = chunkings[0].loops, "backward" in chunkings[0].fills
    yield BeginLayer(layer, 0, loops)
    yield BeginLayer(layer, 1, loops)
    yield Wait(MAIN, stream=SIDE)
    if fills:
        yield FillFlags(layer, 0, chunk, backward=True)
    yield Loop(layer, 0, chunk, "backward")
    if fills:
        yield FillFlags(layer, 1, reverse, backward=True, stream=SIDE)
    yield Loop(layer, 1, reverse, "backward", stream=SIDE)
    yield Wait(SIDE)
    yield GradientProducts(layer, 0, chunk)
    yield GradientProducts(layer, 1, reverse)
    yield FinishWeights(layer, 0)
    yield FinishWeights(layer, 1)
