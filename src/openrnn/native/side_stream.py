"""A second stream beside torch's current one, for work that may run next to a loop."""

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
    """A stream of our own, and an event with which a launch says that all its blocks have begun.

    Attributes:
        stream: as torch knows it.
        launch_event: the event, as `CudaKernel.launch` takes it.
    """

    def __init__(self, device: int) -> None:
        with torch.cuda.device(device):
            made = self._ask("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
            self.stream = torch.cuda.ExternalStream(int(made), device)
            self.launch_event = int(self._ask("cuEventCreate", 2))  # CU_EVENT_DISABLE_TIMING

    def wait_for_launch(self) -> None:
        """What the stream does next waits until the blocks of that launch have begun."""
        self._ask("cuStreamWaitEvent", self.stream.cuda_stream, self.launch_event, 0)

    @staticmethod
    def _ask(name: str, *arguments: int) -> Any:
        from cuda.bindings import driver

        status, *found = getattr(driver, name)(*arguments)
        if status:
            raise LaunchError(f"{name}: {status.name}")
        return found[0] if found else None


@resource
def _beside(device: int, stream: int) -> SideStream:
    return SideStream(device)


def side_stream(device: int) -> SideStream:
    """The stream beside torch's current one.

    Each stream has its own, so that one that captures a graph shares it with none that does not.
    """
    return _beside(device, current_stream(device))
