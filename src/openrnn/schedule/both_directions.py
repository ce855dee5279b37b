"""Both directions of a layer at once: the reverse one's loop runs on the side stream.

What a loop on the side stream reads and writes is taken on the main stream before it, and kept
until the main stream has waited for it: the allocator gives memory anew in the order of the stream
that took it.

Input products of a chunk end before its loops are launched. A cluster gets the multiprocessors that
are free at its launch: beside a product several of its blocks would share one until the loop ends,
and each step would take up to 1.5 times as long (H200).
"""

from collections.abc import Iterator, Sequence
from itertools import count

from openrnn.schedule.chunks import Chunk, Chunking
from openrnn.schedule.operations import (
    MAIN,
    SIDE,
    BeginLayer,
    CutMasks,
    FillFlags,
    FinishWeights,
    GradientProducts,
    Loop,
    MakeRoom,
    Operation,
    Wait,
    WaitForLaunch,
    loop_inputs,
)


def forward(
    layer: int, chunkings: Sequence[Chunking], streams: Iterator[int]
) -> Iterator[Operation]:
    """The forward pass of a layer: the inputs of a chunk are multiplied beside the loops before.

    Args:
        streams: see `product_streams`.
    """
    loops, fills = chunkings[0].loops, "forward" in chunkings[0].fills
    pairs = [*zip(*(chunking.chunks for chunking in chunkings))]
    yield BeginLayer(layer, 0, loops)
    yield BeginLayer(layer, 1, loops)
    if len(pairs) > 1:
        yield from [CutMasks(chunk) for pair in pairs for chunk in pair]
    yield from _inputs(layer, pairs[0], fills, MAIN)
    for number, (chunk, reverse) in enumerate(pairs):
        after = pairs[number + 1 : number + 2]
        for pair in after:
            yield from [MakeRoom(layer, way, other) for way, other in enumerate(pair)]
        yield Wait(MAIN, stream=SIDE)
        yield Loop(layer, 0, chunk)
        yield Loop(layer, 1, reverse, signals=bool(after), stream=SIDE)
        for pair in after:
            beside = next(streams)
            yield WaitForLaunch(stream=beside)
            yield from _inputs(layer, pair, fills, beside)
            yield Wait(beside)
        yield Wait(SIDE)


def _inputs(layer: int, pair: Sequence[Chunk], fills: bool, stream: int) -> Iterator[Operation]:
    """What the loops of both directions read, first both products."""
    each = [loop_inputs(layer, way, chunk, fills, stream) for way, chunk in enumerate(pair)]
    for inputs in zip(*each):
        yield from inputs


def backward(
    layer: int, chunkings: Sequence[Chunking], above: Sequence[Chunking] | None, overlap: bool,
    streams: Iterator[int],
) -> Iterator[Operation]:  # fmt: skip
    """The backward pass of a layer; the second dx is added to the first.

    Args:
        above: chunkings of the layer above whose weights' products run beside the loops of this
            one, from the launch event of the reverse loop on; None for none.
        overlap: the products of this layer's weights run beside the loops of the layer below.
        streams: see `product_streams`.
    """
    chunk, reverse = _chunks(chunkings)
    loops, fills = chunkings[0].loops, "backward" in chunkings[0].fills
    yield BeginLayer(layer, 0, loops)
    yield BeginLayer(layer, 1, loops)
    yield Wait(MAIN, stream=SIDE)
    if fills:
        yield FillFlags(layer, 0, chunk, backward=True)
    yield Loop(layer, 0, chunk, "backward")
    if fills:
        yield FillFlags(layer, 1, reverse, backward=True, stream=SIDE)
    yield Loop(layer, 1, reverse, "backward", above is not None, stream=SIDE)
    beside = SIDE
    if above is not None:
        beside = next(streams)
        yield WaitForLaunch(stream=beside)
        for direction, whole in enumerate(_chunks(above)):
            yield GradientProducts(layer + 1, direction, whole, "weights", stream=beside)
    yield Wait(SIDE)
    of = "x" if overlap else "all"
    yield GradientProducts(layer, 0, chunk, of)
    yield GradientProducts(layer, 1, reverse, of)
    if above is not None:
        yield Wait(beside)
        yield from _finish(layer + 1)
    if not overlap:
        yield from _finish(layer)


def product_streams(layers: int, backward: bool) -> Iterator[int]:
    """Numbers of streams for products beside loops, each for one use in both passes.

    Backward has the first ones, one for each layer, forward those after them. Replayed from a CUDA
    graph, work after a launch event waited for the loop's end where the main stream had waited for
    its stream before (CUDA 13, H100 and H200).
    """
    return count(SIDE + 1 if backward else SIDE + 1 + layers)


def _chunks(chunkings: Sequence[Chunking]) -> tuple[Chunk, Chunk]:
    """All steps, of each direction."""
    (chunk,), (reverse,) = chunkings[0].chunks, chunkings[1].chunks
    return chunk, reverse


def _finish(layer: int) -> Iterator[Operation]:
    yield FinishWeights(layer, 0)
    yield FinishWeights(layer, 1)
