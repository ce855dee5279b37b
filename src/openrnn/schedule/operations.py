"""The operations of a schedule, and their text for a person."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from openrnn.schedule.chunks import Chunk

MAIN, SIDE = 0, 1  # torch's current stream, and the first of ours beside it


@dataclass(frozen=True)
class Operation:
    """One thing that a backend does; `verb` names the method of a backend's pass that does it.

    Args:
        stream: MAIN, or the number of a side stream; operations of one stream run in the order of
            the schedule.
    """

    verb: ClassVar[str]
    stream: int = field(default=MAIN, kw_only=True)


@dataclass(frozen=True)
class OfChunk(Operation):
    """An operation on some steps of a layer and direction."""

    layer: int
    direction: int
    chunk: Chunk

    @cached_property
    def loop_key(self) -> tuple[int, int]:
        """Layer and direction: what operations of one loop share, whatever their chunks."""
        return self.layer, self.direction

    @cached_property
    def chunk_key(self) -> tuple[int, int, int]:
        """Layer, direction and number of the chunk: what operations of one chunk share."""
        return self.layer, self.direction, self.chunk.number


@dataclass(frozen=True)
class AllocateInputs(OfChunk):
    """Takes the memory that an input product and a fill on a side stream will write.

    It comes before the loop that they run beside. Memory that is free after that loop's launch may
    be what the loop still reads, as the allocator knows the order of the main stream alone.

    Args:
        shared: all chunks of the layer use it in turn; this is the longest.
    """

    verb = "allocate_inputs"
    shared: bool = False


@dataclass(frozen=True)
class InputProduct(OfChunk):
    """x_gates = x W_ih^T, the input side of all gates and steps of the chunk."""

    verb = "input_product"


@dataclass(frozen=True)
class FillFlags(OfChunk):
    """Fills a flag buffer with ones, which mean "not arrived yet": a loop polls it for values."""

    verb = "fill_flags"
    backward: bool = False


@dataclass(frozen=True)
class Loop(OfChunk):
    """The time loop of the chunk.

    One launch, or several where the device does not hold all rows of the batch at once; of a
    stepwise loop, a GEMM and a launch for each step.

    Args:
        kind: "forward", "backward", or "recompute": forward again, only to save activations.
        signals: it records an event once all of its blocks run, for which a side stream waits.
    """

    verb = "loop"
    kind: str = "forward"
    signals: bool = False


@dataclass(frozen=True)
class StackLoop(Operation):
    """The time loops of all layers of a stack, one launch.

    Args:
        kind: "forward" or "backward".
    """

    verb = "stack_loop"
    chunk: Chunk
    kind: str = "forward"


@dataclass(frozen=True)
class Step(OfChunk):
    """A single step, T = 1: in forward its products and the cell, in backward its gate gradients.

    Args:
        kind: "forward" or "backward".
    """

    verb = "step"
    kind: str = "forward"


@dataclass(frozen=True)
class GradientProducts(OfChunk):
    """dx, dW_ih and dW_hh of the chunk from its gate gradients.

    Args:
        of: "all" of them; "x", "w_ih" or "w_hh", the gradient of that alone; or "weights", those of
            both matrices. "w_hh" and "weights" are of all steps, with biases and unit vectors.
    """

    verb = "gradient_products"
    of: str = "all"


@dataclass(frozen=True)
class StackGradients(Operation):
    """The gradients of the weights and biases of all layers of a stack that one launch ran."""

    verb = "stack_gradients"
    chunk: Chunk


@dataclass(frozen=True)
class OfLayer(Operation):
    """An operation on all steps of a layer and direction."""

    layer: int
    direction: int


@dataclass(frozen=True)
class BeginLayer(OfLayer):
    """Makes room, on the main stream, for what the operations of its chunks write.

    Args:
        loops: of how many loops at once the device holds its kernel; 1 where any kernel does.
        layers: that one launch runs.
        dropout: forward: each chunk of what it reads gets its dropout mask, with room for it.
    """

    verb = "begin_layer"
    loops: int = 1
    dropout: bool = False
    layers: int = 1


@dataclass(frozen=True)
class CutMasks(Operation):
    """Lengths and resets of a chunk, counted from its first step, made on the main stream."""

    verb = "cut_masks"
    chunk: Chunk


@dataclass(frozen=True)
class FinishWeights(OfLayer):
    """The gradients of weights, biases and unit vectors from the sums of all chunks."""

    verb = "finish_weights"


@dataclass(frozen=True)
class Dropout(Operation):
    """Puts the dropout mask of a layer on its output, or on the gradient of that.

    Args:
        chunk: the steps; None for all.
    """

    verb = "dropout"
    layer: int
    gradient: bool = False
    chunk: Chunk | None = None


@dataclass(frozen=True)
class WaitForLaunch(Operation):
    """A stream waits until all blocks of the loop launched last that signals are running.

    Else its work could take their multiprocessors.
    """

    verb = "wait_for_launch"


@dataclass(frozen=True)
class Wait(Operation):
    """A stream waits for all that another one was given so far.

    Args:
        of_fork: one of the two is a stream of `fork`, whose operations may as well run on the main
            one, in the order of the schedule.
    """

    verb = "wait"
    other: int
    of_fork: bool = False


def loop_inputs(
    layer: int, direction: int, chunk: Chunk, fills: bool, stream: int = MAIN
) -> Iterator[Operation]:
    """What a forward loop reads: its input product, and flags, last so that they lie in L2 then."""
    yield InputProduct(layer, direction, chunk, stream=stream)
    if fills:
        yield FillFlags(layer, direction, chunk, stream=stream)


def gradient_products(
    layer: int, direction: int, chunk: Chunk, fork_streams: Sequence[int]
) -> Iterator[Operation]:
    """The products of a chunk after its loop.

    Args:
        fork_streams: see `fork`; none where there are more chunks.
    """
    if not fork_streams:
        yield GradientProducts(layer, direction, chunk)
        return
    forked = [
        GradientProducts(layer, direction, chunk, of, stream=stream)
        for of, stream in zip(("w_ih", "w_hh"), fork_streams)
    ]
    yield from fork([GradientProducts(layer, direction, chunk, "x")], forked)


def fork(main: Sequence[Operation], forked: Sequence[Operation]) -> Iterator[Operation]:
    """Operations on the main stream beside others, each on its own, for which it waits in the end.

    A pass that forks has two streams for them, its `fork_streams`, on which nothing else runs;
    others have none.
    """
    for one in forked:
        yield Wait(MAIN, True, stream=one.stream)
    yield from main
    yield from forked
    for one in forked:
        yield Wait(one.stream, True)


Schedule = tuple[Operation, ...]


def show(schedule: Schedule) -> list[str]:
    """A line each: `main  loop  forward  layer 0  forward direction  steps 0 to 9`."""
    width = max((len(stream_name(operation.stream)) for operation in schedule), default=0)
    return [f"{stream_name(one.stream):<{width + 1}} {_words(one)}" for one in schedule]


def stream_name(number: int) -> str:
    """A stream for a person: "main", "side", "side 2", ..."""
    return "main" if number == MAIN else "side" if number == SIDE else f"side {number}"


def show_call(forward: Schedule, backward: Schedule | None) -> list[str]:
    """The operations of a call, then those of its backward if it has one, a line each."""
    lines = ["forward:", *show(forward)]
    if backward is None:
        return lines
    return [*lines, "backward, where all gradients are wanted:", *show(backward)]


def _words(operation: Operation) -> str:
    words = [operation.verb]
    if isinstance(operation, Loop | StackLoop | Step):
        words.append(operation.kind)
    if isinstance(operation, Wait):
        words.append(f"for {stream_name(operation.other)}")
    if isinstance(operation, GradientProducts) and operation.of != "all":
        words.append(f"of {operation.of}")
    if isinstance(operation, Dropout):
        words.append("of the gradient" if operation.gradient else "of the output")
    if isinstance(operation, Dropout | OfChunk | OfLayer):
        words.append(f"layer {operation.layer}")
    if isinstance(operation, OfChunk | OfLayer):
        words.append("reverse direction" if operation.direction else "forward direction")
    if isinstance(operation, StackLoop | StackGradients):
        words.append("all layers")
    timed = OfChunk | StackLoop | StackGradients | CutMasks | Dropout
    if isinstance(operation, timed) and operation.chunk is not None:
        words.append(f"steps {operation.chunk.begin} to {operation.chunk.end}")
    return "  ".join(words)
