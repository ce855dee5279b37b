"""Which GPU is the current one."""

from types import TracebackType

import torch


class On:
    """Makes a device current inside `with`; cheap where it already is."""

    __slots__ = ("before", "device")

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        # torch.cuda.current_device without its look whether CUDA has begun
        self.before: int = torch._C._cuda_getDevice()
        if self.before != self.device:
            torch.cuda.set_device(self.device)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.before != self.device:
            torch.cuda.set_device(self.before)
