"""Which GPU is the current one, and its current stream."""

from typing import Any

import torch

# the handle of torch's current stream on a device, by its number; a CPU build of torch has none
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class On:
    """`torch.cuda.device`, but cheap where the device is the current one already."""

    __slots__ = ("device", "elsewhere")

    def __init__(self, device: int) -> None:
        self.device = device
        self.elsewhere: torch.cuda.device | None = None

    def __enter__(self) -> None:
        # torch.cuda.current_device without its look whether CUDA has begun
        if torch._C._cuda_getDevice() != self.device:
            self.elsewhere = torch.cuda.device(self.device)
            self.elsewhere.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.elsewhere is not None:
            self.elsewhere.__exit__(*error)
            self.elsewhere = None
