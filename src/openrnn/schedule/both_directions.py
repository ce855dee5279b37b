"""Both directions of a layer at once: the reverse one's loop runs on the side stream.

What a loop on the side stream reads and writes is taken on the main stream before it, and kept
until the main stream has waited for it: the allocator gives memory anew in the order of the stream
that took it. The states between its chunks are taken on the side stream, which alone uses them.

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
    AllocateInputs,
    BeginLayer,
    CutMasks,
    FillFlags,
    FinishWeights,
    GradientProducts,
    Loop,
    Operation,
    Wait,
    WaitForLaunch,
    fork,
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
    yield from _masks(pairs)
    yield from _inputs(layer, pairs[0], fills, MAIN)
    for number, pair in enumerate(pairs):
        ahead = pairs[number + 1 : number + 2]
        for other in ahead:
            yield from [
                AllocateInputs(layer, direction, chunk) for direction, chunk in enumerate(other)
            ]
        yield Wait(MAIN, stream=SIDE)
        product_stream = next(streams) if ahead else None
        yield from _loops(layer, pair, "forward", product_stream)
        if product_stream is not None:
            yield from _inputs(layer, ahead[0], fills, product_stream)
            yield Wait(product_stream)
        yield Wait(SIDE)


def _masks(pairs: Sequence[Sequence[Chunk]]) -> Iterator[Operation]:
    if len(pairs) > 1:
        yield from [CutMasks(chunk) for pair in pairs for chunk in pair]


def _loops(
    layer: int, pair: Sequence[Chunk], kind: str, product_stream: int | None, fills: bool = False
) -> Iterator[Operation]:
    """The loops of both directions.

    Args:
        product_stream: of products beside the loops, which waits for both launches; None for none.
            In a CUDA graph either loop may begin first, and products that begin in between take the
            multiprocessors of the other one.
        fills: each has a flag buffer that is filled on its own stream.
    """
    for direction, (chunk, stream) in enumerate(zip(pair, (MAIN, SIDE))):
        if fills:
            yield FillFlags(layer, direction, chunk, backward=True, stream=stream)
        yield Loop(layer, direction, chunk, kind, product_stream is not None, stream=stream)
        if product_stream is not None:
            yield WaitForLaunch(stream=product_stream)


def _inputs(layer: int, pair: Sequence[Chunk], fills: bool, stream: int) -> Iterator[Operation]:
    """What the loops of both directions read, first both products."""
    each = [
        loop_inputs(layer, direction, chunk, fills, stream) for direction, chunk in enumerate(pair)
    ]
    for inputs in zip(*each):
        yield from inputs


def backward(
    layer: int, chunkings: Sequence[Chunking], above: Sequence[Chunking] | None, overlap: bool,
    streams: Iterator[int], fork_streams: Sequence[int],
) -> Iterator[Operation]:  # fmt: skip
    """The backward pass of a layer: both directions add to dx.

    Beside the first loops run the products of the weights of the layer above, beside later ones
    those that give dx of the chunk before. The products of the weights are of all steps at once.

    Args:
        above: chunkings of the layer above whose weights' products run beside the loops of this
            one; None for none.
        overlap: the products of this layer's weights run beside the loops of the layer below.
        streams: see `product_streams`; fork_streams: see `fork`.
    """
    pairs = [*zip(*(chunking.chunks[::-1] for chunking in chunkings))]
    loops, fills = chunkings[0].loops, "backward" in chunkings[0].fills
    yield BeginLayer(layer, 0, loops)
    yield BeginLayer(layer, 1, loops)
    yield from _masks(pairs)
    yield Wait(MAIN, stream=SIDE)
    several = len(pairs) > 1
    # what runs beside the first loops: layer, chunk of each direction, which products
    work = None if above is None else (layer + 1, [one.whole for one in above], "weights")
    product_stream: int | None = None
    for index, pair in enumerate(pairs):
        if product_stream is not None:  # loops that begin beside products share multiprocessors
            yield Wait(product_stream)
        if index:  # both loops begin together, when those before have ended
            yield Wait(SIDE)
            yield Wait(MAIN, stream=SIDE)
            work = layer, [*pairs[index - 1]], "x"
        product_stream = None if work is None else next(streams)
        yield from _loops(layer, pair, "backward", product_stream, fills)
        if work is not None and product_stream is not None:
            yield from _products(*work, product_stream)
    yield Wait(SIDE)
    if product_stream is not None and several:
        yield Wait(product_stream)  # the products on that stream write dx, too
    whole = [one.whole for one in chunkings]
    if fork_streams and not overlap:
        weights = [
            GradientProducts(layer, direction, chunk, "weights", stream=fork_streams[direction])
            for direction, chunk in enumerate(whole)
        ]
        yield from fork([*_products(layer, pairs[-1], "x", MAIN)], weights)
    else:
        yield from _products(layer, pairs[-1], "x" if overlap or several else "all", MAIN)
        if several and not overlap:
            yield from _products(layer, whole, "weights", MAIN)
    if above is not None:
        if product_stream is not None and not several:
            yield Wait(product_stream)
        yield from _finish(layer + 1)
    if not overlap:
        yield from _finish(layer)


def _products(layer: int, pair: Sequence[Chunk], of: str, stream: int) -> Iterator[Operation]:
    for direction, chunk in enumerate(pair):
        yield GradientProducts(layer, direction, chunk, of, stream=stream)


def product_streams(backward: bool) -> Iterator[int]:
    """Numbers of streams for products beside loops, each for one use in both passes.

    Replayed from a CUDA graph, work after a launch event waited for the loop's end where the main
    stream had waited for its stream before (CUDA 13, H100 and H200).
    """
    return count(SIDE + 1 if backward else SIDE + 2, 2)


def _finish(layer: int) -> Iterator[Operation]:
    yield FinishWeights(layer, 0)
    yield FinishWeights(layer, 1)
