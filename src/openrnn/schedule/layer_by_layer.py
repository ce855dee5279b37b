"""Layers one after the other; products of a chunk beside the loop of another.

A stack whose chunkings say so runs as a wavefront or in one launch, a layer in both directions at
once or as a single step.
"""

from collections.abc import Iterator, Sequence

from openrnn.schedule import both_directions, one_launch, single_step, wavefront
from openrnn.schedule.chunks import Chunking
from openrnn.schedule.operations import (
    MAIN,
    SIDE,
    AllocateInputs,
    BeginLayer,
    Dropout,
    FillFlags,
    FinishWeights,
    GradientProducts,
    Loop,
    Operation,
    Schedule,
    Wait,
    WaitForLaunch,
    gradient_products,
    loop_inputs,
)


def forward(
    chunkings: Sequence[Sequence[Chunking]], dropout: bool = False, products: bool = True
) -> Schedule:
    """The forward pass.

    Args:
        chunkings: of each layer, of each of its directions.
        dropout: masks lie between layers, as operations of their own.
        products: input products are operations of their own; else the loops compute them.
    """
    found: list[Operation] = []
    if chunkings[0][0].mode == "wavefront":
        return tuple(wavefront.forward([chunking for (chunking,) in chunkings], dropout))
    if chunkings[0][0].mode == "one_launch":
        return tuple(one_launch.forward(len(chunkings), chunkings[0][0].whole))
    streams = both_directions.product_streams(backward=False)
    for layer, directions in enumerate(chunkings):
        if directions[0].mode == "both_directions":
            found += both_directions.forward(layer, directions, streams)
        elif directions[0].mode == "single_step":
            found += single_step.forward(layer, directions)
        else:
            found += _forward_in_turn(layer, directions, products)
        if dropout and layer < len(chunkings) - 1:
            found.append(Dropout(layer))
    return tuple(found)


def _forward_in_turn(
    layer: int, directions: Sequence[Chunking], products: bool
) -> Iterator[Operation]:
    """The forward pass of a layer, one direction after the other."""
    for direction, chunking in enumerate(directions):
        yield BeginLayer(layer, direction)
        if products:
            yield from _forward(layer, direction, chunking)
        else:
            yield from [Loop(layer, direction, chunk) for chunk in chunking.chunks]


def _backward_in_turn(
    layer: int, directions: Sequence[Chunking], recompute: bool, products: bool,
    fork_streams: Sequence[int],
) -> Iterator[Operation]:  # fmt: skip
    """The backward pass of a layer, one direction after the other."""
    for direction, chunking in enumerate(directions):
        yield BeginLayer(layer, direction)
        if products:
            yield from _backward(layer, direction, chunking, recompute, fork_streams)
        else:
            backwards = chunking.chunks[::-1]
            yield from [Loop(layer, direction, chunk, "backward") for chunk in backwards]
        yield FinishWeights(layer, direction)


def _forward(layer: int, direction: int, chunking: Chunking) -> Iterator[Operation]:
    """Each loop needs its input product; with overlap that runs beside the loop before."""
    chunks, fills = chunking.chunks, "forward" in chunking.fills
    for chunk in chunks:
        ahead = chunks[chunk.number + 1 : chunk.number + 2] if chunking.overlap else ()
        if not chunking.overlap or chunk.number == 0:
            yield from loop_inputs(layer, direction, chunk, fills, MAIN)
        for other in ahead:
            yield AllocateInputs(layer, direction, other)
        yield Loop(layer, direction, chunk, "forward", bool(ahead))
        for other in ahead:
            yield WaitForLaunch(stream=SIDE)
            yield from loop_inputs(layer, direction, other, fills, SIDE)
            yield Wait(SIDE)


def backward(
    chunkings: Sequence[Sequence[Chunking]],
    dropout: bool = False,
    recompute: bool = False,
    products: bool = True,
) -> Schedule:
    """The backward pass, which has chunkings of its own and runs the last chunk first.

    Args:
        recompute: each chunk's forward loop runs again before its backward loop.
        products: gradient products are operations of their own; else the loops compute them.
    """
    found: list[Operation] = []
    streams = both_directions.product_streams(backward=True)
    fork_streams = (next(streams), next(streams)) if chunkings[0][0].forks else ()
    if chunkings[0][0].mode == "wavefront":
        return tuple(wavefront.backward([one for (one,) in chunkings], dropout, recompute))
    if chunkings[0][0].mode == "one_launch":
        return tuple(one_launch.backward(len(chunkings), chunkings[0][0].whole, fork_streams))
    above: Sequence[Chunking] | None = None  # of a layer whose weights have no gradients yet
    for layer in reversed(range(len(chunkings))):
        if dropout and layer:
            found.append(Dropout(layer - 1))  # what this layer read was not saved
        directions = chunkings[layer]
        if directions[0].mode == "both_directions":
            below = chunkings[layer - 1][0] if layer else None
            overlap = below is not None and below.mode == "both_directions" and below.overlap
            found += both_directions.backward(
                layer, directions, above, overlap, streams, fork_streams
            )
            above = directions if overlap else None
        elif directions[0].mode == "single_step":
            found += single_step.backward(layer, directions, fork_streams)
        else:
            found += _backward_in_turn(layer, directions, recompute, products, fork_streams)
        if dropout and layer:
            found.append(Dropout(layer - 1, gradient=True))
    return tuple(found)


def _backward(
    layer: int, direction: int, chunking: Chunking, recompute: bool, fork_streams: Sequence[int]
) -> Iterator[Operation]:
    """Products of a chunk need its loop; with overlap they run beside the loop that follows.

    Args:
        fork_streams: see `fork`.
    """
    chunks = chunking.chunks[::-1]
    overlap, fills = chunking.overlap and len(chunks) > 1, "backward" in chunking.fills
    side_busy = False
    for index, chunk in enumerate(chunks):
        if recompute:
            recompute_fills = "recompute" in chunking.fills
            yield from loop_inputs(layer, direction, chunk, recompute_fills, MAIN)
            yield Loop(layer, direction, chunk, "recompute")
        if fills and (index == 0 or not overlap):
            yield FillFlags(layer, direction, chunk, backward=True)
        side_operations: list[Operation] = []  # that run beside this loop
        if overlap and index:
            before = chunks[index - 1]
            side_operations.append(GradientProducts(layer, direction, before, stream=SIDE))
        if overlap and fills and index + 1 < len(chunks):
            fill = FillFlags(layer, direction, chunks[index + 1], backward=True, stream=SIDE)
            side_operations.append(fill)
        if side_busy:
            yield Wait(SIDE)
        yield Loop(layer, direction, chunk, "backward", bool(side_operations))
        if side_operations:
            yield WaitForLaunch(stream=SIDE)
            yield from side_operations
        side_busy = bool(side_operations)
        if not overlap:
            yield from gradient_products(
                layer, direction, chunk, () if len(chunks) > 1 else fork_streams
            )
    if overlap:
        yield Wait(SIDE)
        yield GradientProducts(layer, direction, chunks[-1])
