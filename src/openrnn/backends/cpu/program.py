"""A pass whose sizes are known, as the launches that run it: only addresses are missing.

What a call costs the host is felt at T = 1, so everything but addresses is decided once. A program
names what it reads and writes by slots. A run gives a value for each slot: an address or a stride.
"""

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from openrnn.kernels.cpu import launch
from openrnn.kernels.cpu.args import LINE
from openrnn.kernels.cpu.tensor_tasks import MAX_SCRATCH, runner
from openrnn.memory import TensorFactory, template

if TYPE_CHECKING:
    from openrnn.backends.base import ModuleCache
    from openrnn.backends.cpu.weight_cache import CachedPanels
    from openrnn.kernels.cpu.args import Args
    from openrnn.kernels.cpu.objects import CompiledFunction

Slot = Hashable


class SlotRef(NamedTuple):
    """What a run gives for a slot, plus an offset: bytes, where it is an address."""

    slot: Slot
    offset: int = 0


# Programs that are kept of each pass, by sizes: calls may have new ones each time, and a program of
# two layers with its plan takes 75 KB.
PROGRAMS = 1024
WORKSPACE = "workspace"  # the slot of which all values of a run end with one
# bytes of a workspace that is memory of the thread: to take one costs a call 0.7 us, and large ones
# would have new pages in each call, which take longer than the work in them
SCRATCH = 256 << 20
INITIAL_SCRATCH = 1 << 16  # bytes that a thread has from the beginning
_address = Tensor.data_ptr
Run = Callable[[int], None]


def _whole_lines(count: int) -> int:
    """An address or a number of bytes, rounded up to whole cache lines."""
    return (count + LINE - 1) // LINE * LINE


def placed(
    args: "Args", given: Mapping[str, SlotRef | Sequence[SlotRef | None]]
) -> list[tuple[int, SlotRef]]:
    """The values of fields, and of the entries of array fields, by place among the arguments."""
    found = []
    for name, values in given.items():
        entries = [values] if isinstance(values, SlotRef) else values
        found += [
            (args.word_index(name, entry), value)
            for entry, value in enumerate(entries)
            if value is not None
        ]
    return found


class Launch:
    """One run of a kernel.

    Args:
        args: its arguments, but for those of `given`.
        given: by field those that a run gives; of an array field a sequence, None for 0.
        indices: of each slot, among the values of a run.
        barriers: bytes of zeros that its barriers need.
    """

    def __init__(
        self,
        kernel: "CompiledFunction",
        args: "Args",
        tasks: int,
        given: Mapping[str, SlotRef | Sequence[SlotRef | None]],
        indices: Mapping[Slot, int],
        barriers: int = 0,
    ) -> None:
        words = [(index, indices[slot], offset) for index, (slot, offset) in placed(args, given)]
        self._kernel, self._tasks, self._given = kernel, tasks, tuple(words)
        self.is_alone = tasks == 1 and not barriers
        self._alone = launch.Alone(kernel, bytes(args), words) if self.is_alone else None
        self._words: Any = ctypes.c_int64 * (ctypes.sizeof(args) // 8)
        self._template = bytes(args)
        self._barriers: Any = ctypes.c_char * (barriers + LINE) if barriers else None
        self._barriers_at = args.word_index("barriers") if barriers else 0
        self.slots = frozenset(index for _, index, _ in words)  # indices of those of a run's values

    def run(self, values: Sequence[int]) -> None:
        """Runs it and waits; several threads may do so at a time."""
        if self._alone is not None:
            self._alone.run(values)
            return
        words = self._words.from_buffer_copy(self._template)
        for index, slot, offset in self._given:
            words[index] = values[slot] + offset
        if self._barriers is not None:
            barriers = self._barriers()
            words[self._barriers_at] = _whole_lines(ctypes.addressof(barriers))
        launch.run(self._kernel, words, self._tasks)

    def task(self, values: int) -> launch.Task:
        """Itself, if `is_alone`, for runs of so many values."""
        words = [(index, slot % values, offset) for index, slot, offset in self._given]
        return launch.Task(self._kernel, self._template, words)

    def bound(self, values: Sequence[int], free: int) -> Run:
        """Runs it with these values and another for the slot at the place `free`.

        One thread at a time may.
        """
        kernel, tasks, words = (
            self._kernel,
            self._tasks,
            self._words.from_buffer_copy(self._template),
        )
        for index, slot, offset in self._given:
            words[index] = values[slot] + offset
        holes = [(index, offset) for index, slot, offset in self._given if slot == free]
        barriers = (ctypes.c_char * 0)() if self._barriers is None else self._barriers()
        size = ctypes.sizeof(barriers)
        if size:
            words[self._barriers_at] = _whole_lines(ctypes.addressof(barriers))

        def run(value: int) -> None:
            for index, offset in holes:
                words[index] = value + offset
            if size:
                ctypes.memset(barriers, 0, size)
            launch.run(kernel, words, tasks)

        return run


class _Fixed:
    """An operation that reads nothing but weights."""

    slots: frozenset[int]

    def run(self, values: Sequence[int]) -> None:
        raise NotImplementedError

    def bound(self, values: Sequence[int], free: int) -> Run:
        """Runs it with these values."""
        return lambda value: self.run(values)


class Clear(_Fixed):
    """Writes zeros into `size` bytes."""

    def __init__(self, target: SlotRef, size: int, indices: Mapping[Slot, int]) -> None:
        self._slot, self._offset, self._size = indices[target.slot], target.offset, size
        self.slots = frozenset([self._slot])

    def run(self, values: Sequence[int]) -> None:
        """Writes them."""
        ctypes.memset(values[self._slot] + self._offset, 0, self._size)


class Copy(_Fixed):
    """Copies `size` bytes."""

    def __init__(
        self, target: SlotRef, source: SlotRef, size: int, indices: Mapping[Slot, int]
    ) -> None:
        self._target, self._target_offset = indices[target.slot], target.offset
        self._source, self._source_offset = indices[source.slot], source.offset
        self._size = size
        self.slots = frozenset([self._target, self._source])

    def run(self, values: Sequence[int]) -> None:
        """Copies them."""
        target = values[self._target] + self._target_offset
        ctypes.memmove(target, values[self._source] + self._source_offset, self._size)


class Workspace:
    """Memory of a run beside its tensors, cut into parts; `size` bytes are enough for all."""

    def __init__(self) -> None:
        self.size, self._taken = 0, 0

    def take(self, size: int) -> SlotRef:
        """A part of so many bytes, which begins at a cache line of the workspace."""
        part = SlotRef(WORKSPACE, self._taken)
        self._taken += _whole_lines(size)
        self.size = max(self.size, self._taken)
        return part

    def mark(self) -> int:
        """What `free` goes back to."""
        return self._taken

    def free(self, mark: int) -> None:
        """Parts taken since may be taken again, by operations that come later."""
        self._taken = mark


class _Scratch:
    """Memory of one thread, whose runs use it one after the other.

    Attributes:
        taken: a run uses it. One that begins then, in a finalizer or a signal handler, does not.
    """

    __slots__ = ("_address", "_memory", "_size", "taken")

    def __init__(self) -> None:
        self.taken, self._size = False, 0
        self._memory: Tensor | None = None
        self.hold(INITIAL_SCRATCH)

    def hold(self, size: int) -> int:
        """The address of so many bytes; more than ever before are new memory."""
        if size > self._size:
            self._size, self._memory = 0, None  # the old one goes first
            like = template((size + LINE,), torch.uint8, torch.device("cpu"))
            memory = self._memory = TensorFactory(torch.empty_like, like).maker()
            self._size, self._address = size, _whole_lines(memory.data_ptr())
        return self._address


class _Threads(local):
    """Each thread's scratch memory: only this attribute is looked up by thread."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = _Scratch()


_THREADS = _Threads()


class Program:
    """The operations of a pass in their order, and the tensors that it makes, a workspace the last.

    Args:
        made: their slots follow those that a run gives values for.
        kept: their slots stand before the workspace's, the first one next to it.
    """

    def __init__(
        self,
        operations: Sequence[Launch | Clear | Copy],
        made: Sequence[TensorFactory],
        kept: Sequence["CachedPanels"] = (),
    ) -> None:
        self.operations, self.made, self.kept = tuple(operations), tuple(made), tuple(kept)
        self._makers = tuple(one.maker for one in self.made)
        self._results, self._scratch = self._makers[:-1], self.made[-1].template.nbytes

    def reads(self, index: int) -> bool:
        """Whether it uses the value of a run at this place; not for programs with kept panels."""
        return any(index in operation.slots for operation in self.operations)

    def lent(self, count: int, least: int, take: Callable[[Tensor], Tensor]) -> "Program":
        """The program with other memory for the first tensors that it makes, but not for zeros.

        Args:
            least: elements of a float32 tensor that gets it; take: gives memory for one of this
                shape.
        """
        made = list(self.made)
        for index, one in enumerate(made[:count]):
            # what is of 16 bits goes to the caller as it is
            large = one.template.dtype == torch.float32 and one.template.numel() >= least
            if one.like is torch.empty_like and large:
                made[index] = one._replace(like=take)
        return Program(self.operations, made, self.kept)

    def run(self, values: list[int], cache: "ModuleCache | None" = None) -> list[Tensor]:
        """Runs all of it; the tensors that it made, without the workspace.

        Args:
            cache: of the module that calls, for panels.
        """
        kept = reversed(self.kept)
        panels = [each.panels(values, cache) for each in kept] if self.kept else ()
        scratch = _THREADS.scratch
        if scratch.taken or self._scratch > SCRATCH:
            *made, workspace = [make() for make in self._makers]
            self._run([*values, *map(_address, (*made, *panels, workspace))])
            return made
        made = [make() for make in self._results]
        scratch.taken = True
        try:
            at = scratch.hold(self._scratch)
            self._run([*values, *map(_address, made), *map(_address, panels), at])
        finally:
            scratch.taken = False
        return made

    def on_tensors(
        self, known: Sequence[int], given: int
    ) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """What runs it from tensors to tensors, quicker; None unless it is short and of one thread.

        Of a tensor without memory it makes nothing, and returns an empty list.

        Args:
            known: the first values of a run; given: tensors, whose addresses follow.
        """
        launches = [one for one in self.operations if isinstance(one, Launch) and one.is_alone]
        if self.kept or len(launches) < len(self.operations) or self._scratch > MAX_SCRATCH:
            return None
        if not launch.has_python_calls():
            return None
        tasks = [one.task(len(known) + given + len(self.made)) for one in launches]
        return runner(tasks, known, given, self._results, self._scratch)

    def _run(self, values: Sequence[int]) -> None:
        for operation in self.operations:
            operation.run(values)


class BoundProgram:
    """A program whose values are fixed but for one; one thread at a time may run it.

    Args:
        values: of the slots that a run gives; free: the index of the one that each run gives.
        results: stand for the tensors that a run makes; the workspace is made here, once.
    """

    def __init__(
        self, program: Program, values: list[int], free: int, results: Sequence[Tensor]
    ) -> None:
        workspace = program.made[-1]
        bound = [each.bound(values) for each in program.kept]
        panels = [memory for memory, _ in reversed(bound)]
        self._updates = [update for _, update in bound]
        self._memory = (*results, *panels, workspace.like(workspace.template))
        every = [*values, *map(_address, self._memory)]
        self._runs = [operation.bound(every, free) for operation in program.operations]

    def run(self, value: int) -> None:
        """Runs all of it."""
        for update in self._updates:
            update()
        for run in self._runs:
            run(value)
