"""A stack as a wavefront: a layer's chunk runs once the layer below has run the same chunk.

Layer l has stream l % STREAMS, of which 0 is the main one. Chunks are given to the streams diagonal
by diagonal, in each the upper layers first:

    forward     layer 2              chunk 0   chunk 1
                layer 1    chunk 0   chunk 1   chunk 2
                layer 0    chunk 1   chunk 2   ...

So a stream that waits for all that the stream of the layer below was given waits for its own chunk
and for no later one. Waits name work that was given before them, and loops of blocks and clusters
wait for no other launch, so no launch can keep one from running that it waits for. What several
streams use is taken on the main stream before the others begin, and kept until it has waited for
them: the allocator gives memory anew in the order of the stream that took it.
"""

from collections.abc import Iterator, Sequence

from openrnn.schedule.chunks import Chunk, Chunking
from openrnn.schedule.operations import (
    MAIN,
    BeginLayer,
    CutMasks,
    Dropout,
    FinishWeights,
    GradientProducts,
    InputProduct,
    Loop,
    MakeRoom,
    Operation,
    Wait,
)

STREAMS = 8  # streams that the hardware runs at the same time unless it is told otherwise


def forward(chunkings: Sequence[Chunking], dropout: bool) -> Iterator[Operation]:
    """The forward pass of a stack of one direction, `chunkings` of each layer."""
    layers = len(chunkings)
    for layer, chunking in enumerate(chunkings):
        yield BeginLayer(layer, 0, chunking.loops, dropout and layer > 0)
        yield MakeRoom(layer, 0, longest(chunking), shared=True)
    yield from [CutMasks(chunk) for chunk in chunkings[0].chunks]
    yield from _fork(layers)
    for layer, number in diagonals(layers, len(chunkings[0].chunks)):
        chunk, stream = chunkings[layer].chunks[number], _stream(layer)
        yield from _wait_for(layer - 1, layer)
        if dropout and layer:
            yield Dropout(layer - 1, chunk=chunk, stream=stream)
        yield InputProduct(layer, 0, chunk, stream=stream)
        yield Loop(layer, 0, chunk, stream=stream)
    yield from _join(layers)


def backward(chunkings: Sequence[Chunking], dropout: bool) -> Iterator[Operation]:
    """The backward pass: the last layer and the last chunk come first.

    The products of a layer's weights run over all steps at once, after its last loop.
    """
    layers, chunks = len(chunkings), chunkings[0].chunks
    whole = Chunk(0, chunks[0].begin, chunks[-1].end, chunks[-1].end - chunks[0].begin)
    for layer in reversed(range(layers)):
        if dropout and layer:
            yield Dropout(layer - 1)  # what this layer read was not saved
        yield BeginLayer(layer, 0, chunkings[layer].loops)
    yield from [CutMasks(chunk) for chunk in chunks]
    yield from _fork(layers)
    # the way up in forward is the way down here: "below" is the layer above
    for place, number in diagonals(layers, len(chunks)):
        layer = layers - 1 - place
        chunk, stream = chunks[len(chunks) - 1 - number], _stream(layer)
        if place:
            yield from _wait_for(layer + 1, layer)
        yield Loop(layer, 0, chunk, "backward", stream=stream)
        yield GradientProducts(layer, 0, chunk, "x", stream=stream)
        if dropout and layer:
            yield Dropout(layer - 1, gradient=True, chunk=chunk, stream=stream)
        if chunk.number == 0:
            yield GradientProducts(layer, 0, whole, "weights", stream=stream)
    yield from _join(layers)
    for layer in reversed(range(layers)):
        yield FinishWeights(layer, 0)


def longest(chunking: Chunking) -> Chunk:
    """Its longest chunk."""
    return max(chunking.chunks, key=lambda chunk: chunk.steps)


def _stream(layer: int) -> int:
    return layer % STREAMS


def diagonals(layers: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Every layer and chunk number, diagonal by diagonal, in each the upper layers first."""
    for diagonal in range(layers + chunks - 1):
        for layer in reversed(range(layers)):
            if 0 <= diagonal - layer < chunks:
                yield layer, diagonal - layer


def _wait_for(other: int, layer: int) -> Iterator[Operation]:
    """The stream of a layer waits for all that the stream of another layer was given."""
    if other >= 0 and _stream(other) != _stream(layer):
        yield Wait(_stream(other), stream=_stream(layer))


def _fork(layers: int) -> Iterator[Operation]:
    for stream in range(1, min(layers, STREAMS)):
        yield Wait(MAIN, stream=stream)


def _join(layers: int) -> Iterator[Operation]:
    for stream in range(1, min(layers, STREAMS)):
        yield Wait(stream)
