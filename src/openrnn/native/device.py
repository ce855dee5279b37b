"""Which GPU is the current one, and the quickest way to fresh memory on it."""

from types import TracebackType

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
