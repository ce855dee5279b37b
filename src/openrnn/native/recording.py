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
    """What was to be written down is more than launches, products and waits."""


class RecordedLaunch(NamedTuple):
    """A launch of a kernel.

    Attributes:
        words: the fields of its struct.
        signals: it records the launch event of the streams.
    """

    kernel: "CudaKernel"
    clusters: int
    words: tuple[int, ...]
    stream: int
    signals: bool


class RecordedMatmul(NamedTuple):
    """A product d = a b, or d + a b, by the addresses of its matrices."""

    plan: "MatmulPlan"
    a: int
    b: int
    d: int
    add: bool
    stream: int


class RecordedWait(NamedTuple):
    """A stream waits for all that the other one was given; `of_fork`: see `schedule`'s `Wait`."""

    stream: int
    other: int
    of_fork: bool = False


class RecordedWaitForLaunch(NamedTuple):
    """A stream waits until all blocks of the last launch that signals have begun."""

    stream: int


RecordedOperation = RecordedLaunch | RecordedMatmul | RecordedWait | RecordedWaitForLaunch


# operations: those of 4,096 steps that are a product and a launch each. Their program takes 30 MB
# of host memory, and a graph of it as much of the device's; longer calls are bound by the device.
MAX_OPERATIONS = 8192


class Recording:
    """What a thread would have run, in its order.

    Raises:
        NotRepeatableError: by what it is asked to write down beyond `MAX_OPERATIONS`.
    """

    def __init__(self) -> None:
        self.operations: list[RecordedOperation] = []
        self._stream = 0

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Within it, what is written down belongs to a side stream."""
        self._stream = stream
        try:
            yield
        finally:
            self._stream = 0

    def launch(
        self, kernel: "CudaKernel", clusters: int, words: Sequence[int], launch_event: int
    ) -> None:
        """Instead of `CudaKernel.launch`."""
        self._add(RecordedLaunch(kernel, clusters, tuple(words), self._stream, bool(launch_event)))

    def multiply(self, plan: "MatmulPlan", a: int, b: int, d: int, add: bool) -> None:
        """Instead of `Product.run`."""
        self._add(RecordedMatmul(plan, a, b, d, add, self._stream))

    def _add(self, operation: "RecordedOperation") -> None:
        if len(self.operations) == MAX_OPERATIONS:
            raise NotRepeatableError(f"it has more than {MAX_OPERATIONS} operations")
        self.operations.append(operation)


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
