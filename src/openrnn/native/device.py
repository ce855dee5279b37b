"""Which GPU is the current one, and the quickest way to fresh memory on it."""

from typing import Any

import torch
from torch import Tensor


def template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without memory for `torch.empty_like`, with it the quickest way to fresh memory."""
    with torch.inference_mode(False):
        number = torch.empty(1, dtype=dtype, device=device)
        made = number.expand(shape)
        number.untyped_storage().resize_(0)
    return made


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
