"""What lengths and masks need on the GPU, a launch each: rows in order, and rows of zeros."""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.fused import kernels
from openrnn.backends.fused.kernels import address
from openrnn.kernels.cuda.args import MaskRowsArgs, SortLengthsArgs

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
        kernel = kernels.plain("sort_lengths", "float32", lengths.device.index or 0)
        args = SortLengthsArgs(lengths=lengths.data_ptr(), order=order.data_ptr(), batch=batch)
        kernel.launch(-(-batch // kernel.threads), args)
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
    kernel = kernels.plain("mask_rows", str(x.dtype).removeprefix("torch."), x.device.index or 0)
    kernel.launch(
        -(-steps * batch * pieces // kernel.threads),
        MaskRowsArgs(
            x=x.data_ptr(), x_step=step, x_row=row, out=out.data_ptr(), lengths=address(lengths),
            mask=address(mask), steps=steps, batch=batch, width=width, pieces=pieces,
        ),
    )  # fmt: skip
    return out
