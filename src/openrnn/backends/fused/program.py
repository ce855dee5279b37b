"""A pass whose sizes are known, as launches and products: only addresses are missing.

What a short call costs is its host's time, so everything but addresses is decided once. A run gives
a value for each slot: the address of a tensor of the caller, of a tensor that the run makes, or, in
the last slot, of the workspace.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrnn.memory import TensorFactory
from openrnn.native import graphs
from openrnn.native.cublaslt import MatmulPlan
from openrnn.native.device import On, current_stream
from openrnn.native.nvrtc import CudaKernel, Parameter
from openrnn.native.side_stream import streams

_address = Tensor.data_ptr
StreamHandles = Sequence[int]  # of the streams by their numbers, up to the last that is used
Run = Callable[[Sequence[int], StreamHandles, Any], None]  # of the values; with `Streams`, if any


class SlotRef(NamedTuple):
    """The value of a slot, by its place among those of a run, plus an offset in bytes."""

    slot: int
    offset: int


Relocation = Callable[[SlotRef], SlotRef]  # where a value lies instead


class LaunchOp(NamedTuple):
    """A launch of a kernel.

    Attributes:
        words: its arguments as their struct has them, but for addresses.
        stream: its number; 0 is the main one.
        given: the addresses, by their index among the words.
        signals: it records the launch event of the streams.
    """

    kernel: CudaKernel
    clusters: int
    words: tuple[int, ...]
    stream: int
    given: tuple[tuple[int, SlotRef], ...]
    signals: bool

    def relocated(self, to: Relocation) -> "LaunchOp":
        """This operation with its values elsewhere."""
        return self._replace(given=tuple((index, to(value)) for index, value in self.given))

    def bound(self) -> Run:
        """Launches it, with memory of one thread for its arguments."""
        parameter = Parameter(len(self.words))
        parameter.words[:] = self.words
        launch, clusters, stream = self.kernel.launch_at, self.clusters, self.stream
        given = [(index, slot, offset) for index, (slot, offset) in self.given]
        signals = self.signals
        self.kernel.enter()

        def run(values: Sequence[int], handles: StreamHandles, beside: Any) -> None:
            words = parameter.words
            for index, slot, offset in given:
                words[index] = values[slot] + offset
            event = beside.launch_event if signals else 0
            launch(parameter.address, clusters, handles[stream], event)

        return run


class MatmulOp(NamedTuple):
    """A product d = a b, or d + a b."""

    plan: MatmulPlan
    a: SlotRef
    b: SlotRef
    d: SlotRef
    add: bool
    stream: int
    space: SlotRef  # of its workspace

    def relocated(self, to: Relocation) -> "MatmulOp":
        """This operation with its values elsewhere."""
        return self._replace(a=to(self.a), b=to(self.b), d=to(self.d), space=to(self.space))

    def bound(self) -> Run:
        """Multiplies."""
        multiply, add, stream = self.plan.multiply, self.add, self.stream
        (a, from_a), (b, from_b), (d, from_d), (space, from_space) = (
            self.a, self.b, self.d, self.space
        )  # fmt: skip

        def run(values: Sequence[int], handles: StreamHandles, beside: Any) -> None:
            multiply(
                values[a] + from_a, values[b] + from_b, values[d] + from_d, add,
                values[space] + from_space, handles[stream],
            )  # fmt: skip

        return run


class WaitOp(NamedTuple):
    """A stream waits for all that the other one was given; `of_fork`: see `schedule`'s `Wait`."""

    stream: int
    other: int
    of_fork: bool = False

    def bound(self) -> Run:
        """Waits."""
        stream, other, _ = self

        def run(values: Sequence[int], handles: StreamHandles, beside: Any) -> None:
            beside.wait(stream, other)

        return run


class WaitForLaunchOp(NamedTuple):
    """A stream waits until all blocks of the last launch that signals have begun."""

    stream: int

    def bound(self) -> Run:
        """Waits."""
        stream = self.stream

        def run(values: Sequence[int], handles: StreamHandles, beside: Any) -> None:
            beside.wait_for_launch(stream)

        return run


Operation = LaunchOp | MatmulOp | WaitOp | WaitForLaunchOp


def without_forks(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Operations on fewer streams: what forks runs on the main one, and nothing waits for it."""
    forked = set[int]()
    kept = list[Operation]()
    for one in operations:
        if isinstance(one, WaitOp) and one.of_fork:
            forked.add(one.stream or one.other)  # the other of the two is main, 0
        else:
            kept.append(one)
    return tuple(one._replace(stream=0) if one.stream in forked else one for one in kept)


class _OfThread(local):
    runs: list[Run] | None = None


class _Order:
    """Operations in their order.

    Attributes:
        sides: the numbers of the side streams that they use.
    """

    def __init__(self, operations: Sequence[Operation], device: int) -> None:
        self._operations, self._device, self._local = operations, device, _OfThread()
        used = {one.stream for one in operations}
        self.sides, self._numbers = sorted(used - {0}), range(max(used, default=0) + 1)

    def give(self, values: list[int], beside: Any) -> None:
        """Gives them to a main stream and the side streams beside it.

        Args:
            beside: these `Streams`; None: torch's current one, if no operation has another.
        """
        if beside is None:
            handles = [current_stream(self._device)]
        else:
            handles = [beside.handle(number) for number in self._numbers]
        for run in self._bound():
            run(values, handles, beside)

    def _bound(self) -> list[Run]:
        """The operations for this thread: a launch reads its arguments before it returns."""
        if self._local.runs is None:
            self._local.runs = [operation.bound() for operation in self._operations]
        return self._local.runs


class Program:
    """The launches, products and waits of a pass in their order.

    Products after the last loop run on streams of their own in a CUDA graph alone: elsewhere the
    events between streams would cost the host more than the device saves.

    Args:
        made: the tensors that a run makes, the workspace last.
        device: index of the GPU.
    """

    def __init__(
        self, operations: Sequence[Operation], made: Sequence[TensorFactory], device: int
    ) -> None:
        self.operations, self.made, self.device = tuple(operations), tuple(made), device
        self._forked = self._plain = _Order(self.operations, device)
        if (plain := without_forks(self.operations)) != self.operations:
            self._plain = _Order(plain, device)
        self._replays = graphs.Replays()

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> "Program":
        """The program with other shapes of the first tensors that it makes."""
        first, rest = self.made[: len(shapes)], self.made[len(shapes) :]
        made = [one.shaped(shape) for one, shape in zip(first, shapes)]
        return Program(self.operations, [*made, *rest], self.device)

    def run(self, values: list[int]) -> list[Tensor]:
        """Runs it on torch's current stream; the tensors that it made, without the workspace.

        Args:
            values: the addresses of the tensors of the caller; this call appends to them.
        """
        device = self.device
        if torch._C._cuda_getDevice() != device:
            with On(device):
                return self.run(values)
        made = [like(template) for like, template in self.made]
        values += map(_address, made)
        if len(self.operations) < graphs.LEAST_OPERATIONS or not self._replays.launch(
            device, values, partial(self._forked.give, values), current_stream(device)
        ):
            self._run_now(values)
        made.pop()  # the workspace
        return made

    def _run_now(self, values: list[int]) -> None:
        """Gives the operations to torch's current stream and the side streams beside it."""
        order = self._plain
        if order is not self._forked and torch.cuda.is_current_stream_capturing():
            order = self._forked
        beside = streams(self.device) if order.sides else None
        try:
            order.give(values, beside)
        except BaseException:  # what runs on side streams is waited for
            if beside is not None:
                for number in order.sides:
                    beside.wait(0, number)
            raise
