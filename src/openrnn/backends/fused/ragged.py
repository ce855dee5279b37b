"""What lengths and masks need on the GPU, a launch each: rows in order, and rows of zeros."""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.fused import kernels
from openrnn.backends.fused.kernels import address

RANKED = 8192  # rows up to which counting, B * B comparisons, is quicker than sorting
PIECE = 16  # bytes that a thread copies


class Rows(NamedTuple):
    """The batch rows by falling length; None stands for rows that all have all steps."""

    lengths: Tensor
    order: Tensor


def ordered(lengths: Tensor | None, order: Tensor | None) -> Rows | None:
    """The rows by falling length, equal ones in their order; `order` is room for that."""
    if lengths is None:
        return None
    lengths = lengths.contiguous()
    if order is None:
        order = torch.empty_like(lengths)
    batch = len(lengths)
    if batch > RANKED:
        order.copy_(lengths.argsort(descending=True, stable=True))
    else:
        # it knows no dtype: float32 stands for all
        kernel = kernels.plain("rank", "float32", lengths.device.index or 0)
        kernel.launch(-(-batch // kernel.threads), lengths.data_ptr(), order.data_ptr(), batch)
    return Rows(lengths, order)


def blanked(x: Tensor, lengths: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """x (T, B, I), dense, with zeros past the lengths and where the dense mask (T, B) says so."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    steps, batch, width = x.shape
    out = x.new_empty(x.shape)
    step, row, _ = x.stride()
    size = x.element_size()
    whole = (x.data_ptr() | width * size | step * size | row * size) % PIECE == 0
    pieces = width * size // PIECE if whole else width
    kernel = kernels.plain("blank", str(x.dtype).removeprefix("torch."), x.device.index or 0)
    kernel.launch(
        -(-steps * batch * pieces // kernel.threads), x.data_ptr(), out.data_ptr(),
        address(lengths), address(mask), steps, batch, width, step, row, pieces,
    )  # fmt: skip
    return out
