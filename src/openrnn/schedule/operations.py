"""The operations of a schedule, and their text for a person."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from openrnn.schedule.chunks import Chunk

MAIN, SIDE = "main", "side"  # torch's current stream, and one of ours beside it


@dataclass(frozen=True)
class Operation:
    """One thing that a backend does; `verb` names the method of a backend's launches that does it.

    Args:
        stream: MAIN or SIDE; operations of one stream run in the order of the schedule.
    """

    verb: ClassVar[str]
    stream: str = field(default=MAIN, kw_only=True)


@dataclass(frozen=True)
class OfChunk(Operation):
    """An operation on some steps of a layer and direction."""

    layer: int
    direction: int
    chunk: Chunk

    @cached_property
    def place(self) -> tuple[int, int, int]:
        """Layer, direction and number of the chunk: what operations of one chunk share."""
        return self.layer, self.direction, self.chunk.number


@dataclass(frozen=True)
class MakeRoom(OfChunk):
    """Takes the memory that an input product and a fill on the side stream will write.

    It comes before the loop that they run beside. Memory that is free after that loop's launch may
    be what the loop still reads, as the allocator knows the order of the main stream alone.
    """

    verb = "make_room"


@dataclass(frozen=True)
class InputProduct(OfChunk):
    """x_gates = x W_ih^T, the input side of all gates and steps of the chunk."""

    verb = "input_product"


@dataclass(frozen=True)
class FillFlags(OfChunk):
    """Fills the buffer whose values tell a loop that they have arrived with "not arrived"."""

    verb = "fill_flags"
    backward: bool = False


@dataclass(frozen=True)
class Loop(OfChunk):
    """The time loop of the chunk, one launch.

    Args:
        kind: "forward", "backward", or "recompute": forward again, only to save activations.
        signals: it records an event once all of its blocks run, for which the side stream waits.
    """

    verb = "loop"
    kind: str = "forward"
    signals: bool = False


@dataclass(frozen=True)
class GradientProducts(OfChunk):
    """dx, dW_ih and dW_hh of the chunk from its gate gradients."""

    verb = "gradient_products"


@dataclass(frozen=True)
class OfLayer(Operation):
    """An operation on all steps of a layer and direction."""

    layer: int
    direction: int


@dataclass(frozen=True)
class BeginLayer(OfLayer):
    """Makes room, on the main stream, for what the operations of its chunks write."""

    verb = "begin_layer"


@dataclass(frozen=True)
class FinishWeights(OfLayer):
    """The gradients of weights, biases and unit vectors from the sums of all chunks."""

    verb = "finish_weights"


@dataclass(frozen=True)
class Dropout(Operation):
    """Puts the dropout mask of a layer on its output, or on the gradient of that."""

    verb = "dropout"
    layer: int
    gradient: bool = False


@dataclass(frozen=True)
class WaitForLaunch(Operation):
    """The side stream waits until all blocks of the loop launched last are running.

    Else its work could take their multiprocessors.
    """

    verb = "wait_for_launch"


@dataclass(frozen=True)
class WaitForMain(Operation):
    """The side stream waits for all that the main stream was given so far."""

    verb = "wait_for_main"


@dataclass(frozen=True)
class WaitForSide(Operation):
    """The main stream waits for all that runs on the side stream."""

    verb = "wait_for_side"


Schedule = tuple[Operation, ...]


def show(schedule: Schedule) -> list[str]:
    """A line each: `main  loop  forward  layer 0  forward direction  steps 0 to 9`."""
    return [f"{operation.stream:<5} {_words(operation)}" for operation in schedule]


def show_call(forward: Schedule, backward: Schedule | None) -> list[str]:
    """The operations of a call, then those of its backward if it has one, a line each."""
    lines = ["forward:", *show(forward)]
    if backward is None:
        return lines
    return [*lines, "backward, where all gradients are wanted:", *show(backward)]


def _words(operation: Operation) -> str:
    words = [operation.verb]
    if isinstance(operation, Loop):
        words.append(operation.kind)
    if isinstance(operation, Dropout):
        words.append("of the gradient" if operation.gradient else "of the output")
    if isinstance(operation, Dropout | OfChunk | OfLayer):
        words.append(f"layer {operation.layer}")
    if isinstance(operation, OfChunk | OfLayer):
        words.append("reverse direction" if operation.direction else "forward direction")
    if isinstance(operation, OfChunk):
        words.append(f"steps {operation.chunk.begin} to {operation.chunk.end}")
    return "  ".join(words)
