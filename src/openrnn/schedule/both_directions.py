"""Both directions of a layer at once: the reverse one's loop runs on the side stream.

What a loop on the side stream reads and writes is taken before it and kept until the main stream
has waited for it: the allocator knows the order of the main stream alone.

No product runs while a loop is launched. A cluster gets the multiprocessors that are free then: it
would have several of its blocks on one, and take up to 1.5 times as long (H200), to the last step.
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
            one; None for none.
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
    # Replayed from a CUDA graph, work after a launch event waits for the loop's end if its stream
    # was waited for since that stream's last work (CUDA 13, H200): layers take turns with two.
    beside = SIDE + 1 + layer % 2
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
