"""Launches and products of one thread, written down instead of run.

While a thread records, `CudaKernel.launch` and `Product.run` in it reach no device. Whoever waits
for a stream asks `CURRENT` himself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING, NamedTuple

from openrnn.errors import OpenRNNError

if TYPE_CHECKING:
    from openrnn.native.cublaslt import MatmulPlan
    from openrnn.native.nvrtc import CudaKernel


class NotRepeatableError(OpenRNNError, RuntimeError):
    """What was to be written down is more than launches, products and waits for a stream."""


class Launched(NamedTuple):
    """A launch of a kernel: `words` are the fields of its struct."""

    kernel: "CudaKernel"
    clusters: int
    words: tuple[int, ...]
    side: bool  # on the side stream


class Multiplied(NamedTuple):
    """A product d = a b, or d + a b, by the addresses of its matrices."""

    plan: "MatmulPlan"
    a: int
    b: int
    d: int
    add: bool
    side: bool


class Fork(NamedTuple):
    """The side stream waits for all that the main stream was given."""


class Join(NamedTuple):
    """The main stream waits for all that the side stream was given."""


class Recording:
    """What a thread would have run, in its order."""

    def __init__(self) -> None:
        self.operations: list[Launched | Multiplied | Fork | Join] = []
        self._side = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it, what is written down belongs to the side stream."""
        self._side = True
        try:
            yield
        finally:
            self._side = False

    def launch(
        self, kernel: "CudaKernel", clusters: int, words: Sequence[int], launch_event: int
    ) -> None:
        """Instead of `CudaKernel.launch`."""
        if launch_event:
            raise NotRepeatableError("the side stream waits for a launch")
        self.operations.append(Launched(kernel, clusters, tuple(words), self._side))

    def multiply(self, plan: "MatmulPlan", a: int, b: int, d: int, add: bool) -> None:
        """Instead of `Product.run`."""
        self.operations.append(Multiplied(plan, a, b, d, add, self._side))


class _Current(local):
    recording: Recording | None = None


CURRENT = _Current()  # of each thread


@contextmanager
def recorded() -> Iterator[Recording]:
    """Within it, this thread records."""
    before, CURRENT.recording = CURRENT.recording, Recording()
    try:
        yield CURRENT.recording
    finally:
        CURRENT.recording = before
