"""Streams beside torch's current one, for what runs next to a loop, and events between them."""

from functools import cache
from threading import Lock
from typing import Any

import torch

from openrnn.memo import resource
from openrnn.native.device import current_stream
from openrnn.native.nvrtc import DriverError

DRIVER = 12030  # the first that knows CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT: of CUDA 12.3


@cache
def has_launch_events() -> bool:
    """Whether the driver can say that all blocks of a launch have begun."""
    from cuda.bindings import driver

    return int(driver.cuDriverGetVersion()[1]) >= DRIVER


class Streams:
    """A main stream, number 0, and side streams of our own beside it, made when first asked for.

    Args:
        main: handle of the main stream.

    Attributes:
        launch_event: with it a launch says that all its blocks have begun: `CudaKernel.launch`.
    """

    def __init__(self, device: int, main: int) -> None:
        from cuda.bindings import driver

        self.device = device
        self._lock = Lock()
        # the driver's functions, events and streams are kept as objects: attribute look-ups and
        # their construction from integers take the host longer than the calls
        self._record, self._wait = driver.cuEventRecord, driver.cuStreamWaitEvent
        with torch.cuda.device(device):
            self._launch_event = self._new_event()
            self._events = [self._new_event()]  # of each stream
        self.launch_event = int(self._launch_event)
        self._objects = [driver.CUstream(main)]
        self._handles = [main]
        self._streams = list[torch.cuda.ExternalStream]()  # the side streams

    @classmethod
    def apart(cls, device: int) -> "Streams":
        """Streams of our own, the main one too, to which nobody else gives anything."""
        beside = cls(device, 0)
        return cls(device, beside.handle(1))

    def handle(self, number: int) -> int:
        """A stream as the driver knows it."""
        if number >= len(self._handles):
            self._grow(number)
        return self._handles[number]

    def side(self, number: int) -> torch.cuda.ExternalStream:
        """A side stream, from 1 on, as torch knows it."""
        if number >= len(self._handles):
            self._grow(number)
        return self._streams[number - 1]

    def wait(self, waiting: int, other: int) -> None:
        """What a stream does next waits for all that the other one was given."""
        self.handle(max(waiting, other))  # there are both
        event = self._events[other]
        self._check("cuEventRecord", *self._record(event, self._objects[other]))
        self._check("cuStreamWaitEvent", *self._wait(self._objects[waiting], event, 0))

    def wait_for_launch(self, waiting: int) -> None:
        """What a stream does next waits until the blocks of that launch have begun."""
        self.handle(waiting)  # there is one
        status = self._wait(self._objects[waiting], self._launch_event, 0)
        self._check("cuStreamWaitEvent", *status)

    def _grow(self, number: int) -> None:
        """Makes the side streams up to `number`; handles come last, as others look at them."""
        with self._lock, torch.cuda.device(self.device):
            while number >= len(self._handles):
                made = self._ask("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
                self._events.append(self._new_event())
                self._objects.append(made)
                self._streams.append(torch.cuda.ExternalStream(int(made), self.device))
                self._handles.append(int(made))

    def _new_event(self) -> Any:
        return self._ask("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING

    def _ask(self, name: str, argument: int) -> Any:
        from cuda.bindings import driver

        status, found = getattr(driver, name)(argument)
        self._check(name, status)
        return found

    @staticmethod
    def _check(name: str, status: Any) -> None:
        if status:
            raise DriverError(f"{name}: {status.name}")


@resource
def _beside(device: int, stream: int) -> Streams:
    return Streams(device, stream)


def streams(device: int) -> Streams:
    """The streams beside torch's current one.

    Each stream has its own, so that one that captures a graph shares them with none that does not.
    """
    return _beside(device, current_stream(device))
