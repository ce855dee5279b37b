"""A second stream beside torch's current one, for what runs next to a loop."""

from functools import cache
from typing import Any

import torch

from openrnn.memo import resource
from openrnn.native.device import current_stream
from openrnn.native.nvrtc import LaunchError

DRIVER = 12030  # the first that knows CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT: of CUDA 12.3


@cache
def supported() -> bool:
    """Whether the driver can say that all blocks of a launch have begun."""
    from cuda.bindings import driver

    return int(driver.cuDriverGetVersion()[1]) >= DRIVER


class SideStream:
    """A stream of our own, and events by which it and the main stream wait for each other.

    Args:
        main: handle of the stream that it lies beside.

    Attributes:
        stream: as torch knows it; handle: as the driver does.
        launch_event: with it a launch says that all its blocks have begun: `CudaKernel.launch`.
    """

    def __init__(self, device: int, main: int) -> None:
        self.main = main
        with torch.cuda.device(device):
            self.handle = int(self._ask("cuStreamCreate", 1))  # CU_STREAM_NON_BLOCKING
            self.stream = torch.cuda.ExternalStream(self.handle, device)
            # CU_EVENT_DISABLE_TIMING
            self.launch_event, self._main_event, self._side_event = (
                int(self._ask("cuEventCreate", 2)) for _ in range(3)
            )

    def wait_for_launch(self) -> None:
        """What the stream does next waits until the blocks of that launch have begun."""
        self._ask("cuStreamWaitEvent", self.handle, self.launch_event, 0)

    def wait_for_main(self) -> None:
        """What the stream does next waits for all that the main stream was given."""
        self._ask("cuEventRecord", self._main_event, self.main)
        self._ask("cuStreamWaitEvent", self.handle, self._main_event, 0)

    def join(self) -> None:
        """What the main stream does next waits for all that this one was given."""
        self._ask("cuEventRecord", self._side_event, self.handle)
        self._ask("cuStreamWaitEvent", self.main, self._side_event, 0)

    @staticmethod
    def _ask(name: str, *arguments: int) -> Any:
        from cuda.bindings import driver

        status, *found = getattr(driver, name)(*arguments)
        if status:
            raise LaunchError(f"{name}: {status.name}")
        return found[0] if found else None


@resource
def _beside(device: int, stream: int) -> SideStream:
    return SideStream(device, stream)


def side_stream(device: int) -> SideStream:
    """The stream beside torch's current one.

    Each stream has its own, so that one that captures a graph shares it with none that does not.
    """
    return _beside(device, current_stream(device))
