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

_address = Tensor.data_ptr
Run = Callable[[Sequence[int], int], None]  # of the values, on a stream


class Value(NamedTuple):
    """The value of a slot, by its place among those of a run, plus an offset in bytes."""

    slot: int
    offset: int


class Launch(NamedTuple):
    """A launch of a kernel.

    Attributes:
        words: its arguments as their struct has them; those of `given` are placeholders.
        given: by place among the words, what a run gives.
    """

    kernel: CudaKernel
    clusters: int
    words: tuple[int, ...]
    given: tuple[tuple[int, Value], ...]

    def bound(self) -> Run:
        """Launches it, with memory of one thread for its arguments."""
        parameter = Parameter(len(self.words))
        parameter.words[:] = self.words
        launch, clusters = self.kernel.launch_at, self.clusters
        given = [(place, slot, offset) for place, (slot, offset) in self.given]
        self.kernel.enter()

        def run(values: Sequence[int], stream: int) -> None:
            words = parameter.words
            for place, slot, offset in given:
                words[place] = values[slot] + offset
            launch(parameter.address, clusters, stream)

        return run


class Multiply(NamedTuple):
    """A product d = a b, or d + a b."""

    plan: MatmulPlan
    a: Value
    b: Value
    d: Value
    add: bool
    space: Value  # of its workspace

    def bound(self) -> Run:
        """Multiplies."""
        multiply, add = self.plan.multiply, self.add
        (a, from_a), (b, from_b), (d, from_d), (space, from_space) = (
            self.a, self.b, self.d, self.space
        )  # fmt: skip

        def run(values: Sequence[int], stream: int) -> None:
            multiply(
                values[a] + from_a, values[b] + from_b, values[d] + from_d, add,
                values[space] + from_space, stream,
            )  # fmt: skip

        return run


class Program:
    """The launches and products of a pass in their order.

    Args:
        made: the tensors that a run makes, the workspace last.
        device: index of the GPU.
    """

    def __init__(
        self, operations: Sequence[Launch | Multiply], made: Sequence[Made], device: int
    ) -> None:
        self.operations, self.made, self.device = tuple(operations), tuple(made), device
        self._local = local()

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
        stream = current_stream(device)
        for run in self._bound():
            run(values, stream)
        made.pop()
        return made

    def _bound(self) -> list[Run]:
        """The operations for this thread: a launch reads its arguments before it returns."""
        try:
            return self._local.runs  # type: ignore[no-any-return]
        except AttributeError:
            self._local.runs = [operation.bound() for operation in self.operations]
            return self._local.runs  # type: ignore[no-any-return]
