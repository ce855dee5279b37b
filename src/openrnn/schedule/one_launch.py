"""A stack in one launch: the loops of all layers, each behind the layer before."""

from collections.abc import Iterator, Sequence

from openrnn.schedule.chunks import Chunk
from openrnn.schedule.operations import (
    BeginLayer,
    FillFlags,
    FinishWeights,
    GradientProducts,
    Operation,
    StackGradients,
    StackLoop,
    fork,
    loop_inputs,
)


def forward(layers: int, whole: Chunk) -> Iterator[Operation]:
    """The forward pass: layer 0 alone has an input product before its loop."""
    for layer in range(layers):
        yield BeginLayer(layer, 0, layers=layers)
    yield from loop_inputs(0, 0, whole, fills=True)
    yield StackLoop(whole)


def backward(layers: int, whole: Chunk, fork_streams: Sequence[int]) -> Iterator[Operation]:
    """The backward pass: the loop gives gradients to the layers below, which need no dx.

    Args:
        fork_streams: see `fork`.
    """
    for layer in reversed(range(layers)):
        yield BeginLayer(layer, 0, layers=layers)
    yield FillFlags(0, 0, whole, backward=True)
    yield StackLoop(whole, "backward")
    below = GradientProducts(0, 0, whole, "x")
    if fork_streams:
        yield from fork([below], [StackGradients(whole, stream=fork_streams[0])])
    else:
        yield below
        yield StackGradients(whole)
    for layer in reversed(range(layers)):
        yield FinishWeights(layer, 0)
