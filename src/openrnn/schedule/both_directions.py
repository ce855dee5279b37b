"""Both directions of a layer at once: the reverse one's loop runs on the side stream.

What a loop on the side stream reads and writes is taken on the main stream before it, and kept
until the main stream has waited for it: the allocator gives memory anew in the order of the stream
that took it.

Input products end before the loops are launched. A cluster gets the multiprocessors that are free
at its launch: beside a product several of its blocks would share one until the loop ends, and each
step would take up to 1.5 times as long (H200).
"""

from collections.abc import Iterator, Sequence

from openrnn.schedule.chunks import Chunk, Chunking
from openrnn.schedule.operations import (
    MAIN,
    SIDE,
    BeginLayer,
    FillFlags,
    FinishWeights,
    GradientProducts,
    Loop,
    Operation,
    Wait,
    WaitForLaunch,
    loop_inputs,
)


def forward(layer: int, chunkings: Sequence[Chunking]) -> Iterator[Operation]:
    """The forward pass of a layer."""
    chunk, reverse = _chunks(chunkings)
    loops, fills = chunkings[0].loops, "forward" in chunkings[0].fills
    yield BeginLayer(layer, 0, loops)
    yield BeginLayer(layer, 1, loops)
    for inputs in zip(
        loop_inputs(layer, 0, chunk, fills), loop_inputs(layer, 1, reverse, fills)
    ):  # fmt: skip
        yield from inputs
    yield Wait(MAIN, stream=SIDE)
    yield Loop(layer, 0, chunk)
    yield Loop(layer, 1, reverse, stream=SIDE)
    yield Wait(SIDE)


def backward(
    layer: int, chunkings: Sequence[Chunking], above: Sequence[Chunking] | None, overlap: bool
) -> Iterator[Operation]:
    """The backward pass of a layer; the second dx is added to the first.

    Args:
        above: chunkings of the layer above whose weights' products run beside the loops of this
            one, from the launch event of the reverse loop on; None for none.
        overlap: the products of this layer's weights run beside the loops of the layer below.
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
    # Replayed from a CUDA graph, work after a launch event waited for the loop's end where the main
    # stream had waited for its stream before (CUDA 13, H200): each layer has a stream of its own.
    beside = SIDE + 1 + layer
    if above is not None:
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


def _chunks(chunkings: Sequence[Chunking]) -> tuple[Chunk, Chunk]:
    """All steps, of each direction."""
    (chunk,), (reverse,) = chunkings[0].chunks, chunkings[1].chunks
    return chunk, reverse


def _finish(layer: int) -> Iterator[Operation]:
    yield FinishWeights(layer, 0)
    yield FinishWeights(layer, 1)
