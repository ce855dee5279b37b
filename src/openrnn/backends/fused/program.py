"""A pass whose sizes are known, as launches and products: only addresses are missing.

What a short call costs is its host's time, so everything but addresses is decided once. A run gives
a value for each slot: the address of a tensor of the caller, of a tensor that the run makes, or, in
the last slot, of the workspace.
"""

from collections.abc import Callable, Sequence
from threading import local
from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.memory import Made
from openrnn.native.cublaslt import MatmulPlan
from openrnn.native.device import On, current_stream
from openrnn.native.nvrtc import CudaKernel, Parameter
from openrnn.native.side_stream import side_stream

_address = Tensor.data_ptr
Streams = tuple[int, int]  # handles of the main stream and, where one is used, the side stream
Run = Callable[[Sequence[int], Streams], None]  # of the values


class Value(NamedTuple):
    """The value of a slot, by its place among those of a run, plus an offset in bytes."""

    slot: int
    offset: int


class Launch(NamedTuple):
    """A launch of a kernel.

    Attributes:
        words: its arguments as their struct has them, but for addresses.
        side: on the side stream.
        given: the addresses, by their place among the words.
    """

    kernel: CudaKernel
    clusters: int
    words: tuple[int, ...]
    side: bool
    given: tuple[tuple[int, Value], ...]

    def bound(self) -> Run:
        """Launches it, with memory of one thread for its arguments."""
        parameter = Parameter(len(self.words))
        parameter.words[:] = self.words
        launch, clusters, side = self.kernel.launch_at, self.clusters, self.side
        given = [(place, slot, offset) for place, (slot, offset) in self.given]
        self.kernel.enter()

        def run(values: Sequence[int], streams: Streams) -> None:
            words = parameter.words
            for place, slot, offset in given:
                words[place] = values[slot] + offset
            launch(parameter.address, clusters, streams[side])

        return run


class Multiply(NamedTuple):
    """A product d = a b, or d + a b."""

    plan: MatmulPlan
    a: Value
    b: Value
    d: Value
    add: bool
    side: bool
    space: Value  # of its workspace

    def bound(self) -> Run:
        """Multiplies."""
        multiply, add, side = self.plan.multiply, self.add, self.side
        (a, from_a), (b, from_b), (d, from_d), (space, from_space) = (
            self.a, self.b, self.d, self.space
        )  # fmt: skip

        def run(values: Sequence[int], streams: Streams) -> None:
            multiply(
                values[a] + from_a, values[b] + from_b, values[d] + from_d, add,
                values[space] + from_space, streams[side],
            )  # fmt: skip

        return run


class Wait(NamedTuple):
    """A stream waits for all that the other was given; `side`: the side stream waits."""

    side: bool
    device: int

    def bound(self) -> Run:
        """Waits."""
        device, side = self.device, self.side

        def run(values: Sequence[int], streams: Streams) -> None:
            beside = side_stream(device)
            (beside.wait_for_main if side else beside.join)()

        return run


class _OfThread(local):
    runs: list[Run] | None = None


class Program:
    """The launches, products and waits of a pass in their order.

    Args:
        made: the tensors that a run makes, the workspace last.
        device: index of the GPU.
    """

    def __init__(
        self, operations: Sequence[Launch | Multiply | Wait], made: Sequence[Made], device: int
    ) -> None:
        self.operations, self.made, self.device = tuple(operations), tuple(made), device
        self._forks = any(isinstance(one, Wait) for one in operations)
        self._local = _OfThread()

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> "Program":
        """The same, in which the first tensors that it makes have other shapes."""
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
        streams = current_stream(device), side_stream(device).handle if self._forks else 0
        for run in self._bound():
            run(values, streams)
        made.pop()  # the workspace
        return made

    def _bound(self) -> list[Run]:
        """The operations for this thread: a launch reads its arguments before it returns."""
        if self._local.runs is None:
            self._local.runs = [operation.bound() for operation in self.operations]
        return self._local.runs
