"""Which temporary tensors of a program may have the same memory: those not in use at once.

Programs run their operations on a main stream M and on side streams S, which wait for each other.

1. A temporary of M is in use from its first operation to its last.
2. A temporary of S is in use from S's last wait for M before its first operation, to M's first wait
   for S after its last operation. So whatever gets its memory next, on any stream, waits for M at a
   place where M has waited for all that used it.
   But of two temporaries that S alone uses each is in use from its first operation to its last.
3. Where S has not waited for M before, it is in use from the start of the program; where M does
   not wait for S after, until the end.
4. A wait for the start of a launch counts as a wait for all that the launch's stream had waited
   for: no launch begins before the work given to its stream before it has ended, since none of ours
   is a programmatic dependent launch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from openrnn.backends.fused.program import (
    LaunchOp,
    MatmulOp,
    Operation,
    SlotRef,
    WaitForLaunchOp,
    WaitOp,
)
from openrnn.schedule.operations import MAIN


class Lifetime(NamedTuple):
    """The places in a program, both inclusive, from which and to which a temporary is in use.

    Attributes:
        on: the stream that alone uses it; None where several do.
        first, last: the places of its first and its last operation.
    """

    begin: int
    end: int
    on: int | None
    first: int
    last: int

    def overlaps(self, other: "Lifetime") -> bool:
        """Whether both are in use at some place."""
        if self.on is not None and self.on == other.on:
            return self.first <= other.last and other.first <= self.last
        return self.begin <= other.end and other.begin <= self.end


def values_of(operation: Operation) -> list[SlotRef]:
    """The memory that an operation reads or writes."""
    if isinstance(operation, LaunchOp):
        return [value for _, value in operation.given]
    if isinstance(operation, MatmulOp):
        return [operation.a, operation.b, operation.d, operation.space]
    return []


def lifetimes_of(operations: Sequence[Operation]) -> dict[int, Lifetime]:
    """The lifetime of each slot that an operation uses."""
    begins, ends = _spans(operations)
    places = dict[int, list[int]]()
    for index, operation in enumerate(operations):
        for slot in {value.slot for value in values_of(operation)}:
            places.setdefault(slot, []).append(index)
    found = dict[int, Lifetime]()
    for slot, using in places.items():
        streams = {operations[index].stream for index in using}
        found[slot] = Lifetime(
            min(begins[index] for index in using), max(ends[index] for index in using),
            streams.pop() if len(streams) == 1 else None, using[0], using[-1],
        )  # fmt: skip
    return found


def _spans(operations: Sequence[Operation]) -> tuple[list[int], list[int]]:
    """For each operation, from and to which place what it uses is in use."""
    begins, waited = list[int](), dict[int, int]()  # of each side stream: its wait for the main one
    launched = 0  # the same of the launch that signalled last
    for index, operation in enumerate(operations):
        stream = operation.stream
        if isinstance(operation, WaitOp) and operation.other == MAIN:
            waited[stream] = index
        elif isinstance(operation, WaitForLaunchOp):
            waited[stream] = max(waited.get(stream, 0), launched)
        begins.append(index if stream == MAIN else waited.get(stream, 0))
        if isinstance(operation, LaunchOp) and operation.signals:
            launched = begins[-1]
    ends, joined = list[int](), dict[int, int]()
    for index in reversed(range(len(operations))):
        operation = operations[index]
        if isinstance(operation, WaitOp) and operation.stream == MAIN:
            joined[operation.other] = index
        on_main = operation.stream == MAIN
        ends.append(index if on_main else joined.get(operation.stream, len(operations)))
    return begins, ends[::-1]


def workspace_offsets(
    sizes: Mapping[int, int], lives: Mapping[int, Lifetime]
) -> tuple[dict[int, int], int]:
    """Offsets of slots in one workspace, and its size: larger ones first, each as low as it fits.

    Args:
        sizes: bytes of each slot; lives: their lifetimes; a slot without one is never in use.
    """
    offsets, taken = dict[int, int](), list[tuple[Lifetime, int, int]]()
    for slot in sorted(sizes, key=lambda slot: -sizes[slot]):
        if slot not in lives:
            offsets[slot] = 0
            continue
        life, size, offset = lives[slot], sizes[slot], 0
        for other, begin, end in sorted(taken, key=lambda one: one[1]):
            if life.overlaps(other) and begin < offset + size and offset < end:
                offset = end
        offsets[slot] = offset
        taken.append((life, offset, offset + size))
    return offsets, max((end for *_, end in taken), default=0)
