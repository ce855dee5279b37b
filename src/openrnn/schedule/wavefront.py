"""A stack as a wavefront: a layer's chunk runs once the layer below has run the same chunk.

Layer l has stream l % S of S streams, of which 0 is the main one. Chunks are given to the streams
diagonal by diagonal, in each the upper layers first:

    forward     layer 2              chunk 0   chunk 1
                layer 1    chunk 0   chunk 1   chunk 2
                layer 0    chunk 1   chunk 2   ...

So a stream that waits for all that the stream of the layer below was given waits for its own chunk
and for no later one. Where layers share streams, all waits of a diagonal but those for launches
come before its work, and name that of the diagonal before. Waits name work that was given before
them, and a loop waits for no other launch: blocks of a grid wait for each other, but a cooperative
launch begins once all of them have room, and of grids no more streams have loops than the device
holds at once. So no launch can keep one from running that it waits for. What several streams use is
taken on the main stream before the others begin, and kept until it has waited for them: the
allocator gives memory anew in the order of the stream that took it.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from openrnn.schedule.chunks import Chunk, Chunking
from openrnn.schedule.operations import (
    MAIN,
    AllocateInputs,
    BeginLayer,
    CutMasks,
    Dropout,
    FillFlags,
    FinishWeights,
    GradientProducts,
    Loop,
    Operation,
    Wait,
    WaitForLaunch,
    loop_inputs,
)

STREAMS = 8  # streams that the hardware runs at the same time unless it is told otherwise


def forward(chunkings: Sequence[Chunking], dropout: bool) -> Iterator[Operation]:
    """The forward pass of a stack of one direction, `chunkings` of each layer."""
    layers, streams = len(chunkings), _streams(chunkings)
    for layer, chunking in enumerate(chunkings):
        yield BeginLayer(layer, 0, chunking.loops, dropout and layer > 0)
        yield AllocateInputs(layer, 0, longest(chunking), shared=True)
    yield from [CutMasks(chunk) for chunk in chunkings[0].chunks]
    yield from _fork(streams)
    for diagonal in diagonals(layers, len(chunkings[0].chunks)):
        waits = [_wait_for(layer - 1, layer, streams, layers) for layer, _ in diagonal]
        if streams < layers:
            yield from dict.fromkeys(chain(*waits))
        for (layer, number), wait in zip(diagonal, waits):
            chunking, stream = chunkings[layer], layer % streams
            chunk = chunking.chunks[number]
            yield from wait if streams == layers else ()
            if dropout and layer:
                yield Dropout(layer - 1, chunk=chunk, stream=stream)
            yield from loop_inputs(layer, 0, chunk, "forward" in chunking.fills, stream)
            yield Loop(layer, 0, chunk, stream=stream)
    yield from _join(streams)


def backward(
    chunkings: Sequence[Chunking], dropout: bool, recompute: bool = False
) -> Iterator[Operation]:
    """The backward pass: the last layer and the last chunk come first.

    The products of a layer's weights run over all steps at once, after its last loop. Without
    overlap the last loop of the layer below waits for them, as it waits for all that the stream of
    this layer was given before. With overlap they are given after that loop, and wait for its
    launch event, so that it has its multiprocessors first. Chunkings with `by_chunk`, which have no
    overlap, have these products after each chunk's loop.

    With `recompute` forward's loop of a chunk runs again before the stream waits for the layer
    above, as it reads no gradients.
    """
    layers, streams, chunks = len(chunkings), _streams(chunkings), chunkings[0].chunks
    overlap, by_chunk = chunkings[0].overlap, chunkings[0].by_chunk
    whole = chunkings[0].whole
    for layer in reversed(range(layers)):
        if dropout and layer:
            yield Dropout(layer - 1)  # what this layer read was not saved
        yield BeginLayer(layer, 0, chunkings[layer].loops)
        if recompute:
            yield AllocateInputs(layer, 0, longest(chunkings[layer]), shared=True)
    yield from [CutMasks(chunk) for chunk in chunks]
    yield from _fork(streams)
    for diagonal in diagonals(layers, len(chunks)):
        # the way up in forward is the way down here: "below" is the layer above
        mirrored = [(layers - 1 - layer, len(chunks) - 1 - number) for layer, number in diagonal]
        waits = [_wait_for(layer + 1, layer, streams, layers) for layer, _ in mirrored]
        if streams < layers:
            yield from dict.fromkeys(chain(*waits))
        for (layer, number), wait in zip(mirrored, waits):
            chunk, stream = chunks[number], layer % streams
            if recompute:
                yield from loop_inputs(layer, 0, chunk, False, stream)
                yield Loop(layer, 0, chunk, "recompute", stream=stream)
            yield from wait if streams == layers else ()
            if "backward" in chunkings[layer].fills:
                yield FillFlags(layer, 0, chunk, backward=True, stream=stream)
            last, above = chunk.number == 0, layer + 1
            signals = overlap and last and above < layers
            yield Loop(layer, 0, chunk, "backward", signals, stream=stream)
            if signals:
                yield WaitForLaunch(stream=above % streams)
                yield GradientProducts(above, 0, whole, "weights", stream=above % streams)
            yield GradientProducts(layer, 0, chunk, "all" if by_chunk else "x", stream=stream)
            if dropout and layer:
                yield Dropout(layer - 1, gradient=True, chunk=chunk, stream=stream)
            if last and not by_chunk and not (overlap and layer):
                yield GradientProducts(layer, 0, whole, "weights", stream=stream)
    yield from _join(streams)
    for layer in reversed(range(layers)):
        yield FinishWeights(layer, 0)


def longest(chunking: Chunking) -> Chunk:
    """Its longest chunk."""
    return max(chunking.chunks, key=lambda chunk: chunk.steps)


def _streams(chunkings: Sequence[Chunking]) -> int:
    """How many streams the layers have: of grids no more than loops that the device holds."""
    loops = chunkings[0].loops
    return min(len(chunkings), loops if loops > 1 else STREAMS)


def diagonals(layers: int, chunks: int) -> Iterator[list[tuple[int, int]]]:
    """Every layer and chunk number, diagonal by diagonal, in each the upper layers first."""
    for diagonal in range(layers + chunks - 1):
        yield [
            (layer, diagonal - layer)
            for layer in reversed(range(layers))
            if 0 <= diagonal - layer < chunks
        ]


def _wait_for(other: int, layer: int, streams: int, layers: int) -> list[Operation]:
    """The stream of a layer waits for all that the stream of another layer was given."""
    if other not in range(layers) or other % streams == layer % streams:
        return []
    return [Wait(other % streams, stream=layer % streams)]


def _fork(streams: int) -> Iterator[Operation]:
    for stream in range(1, streams):
        yield Wait(MAIN, stream=stream)


def _join(streams: int) -> Iterator[Operation]:
    for stream in range(1, streams):
        yield Wait(stream)
