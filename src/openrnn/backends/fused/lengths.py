"""Kernels for lengths and masks, one launch each: rows sorted by length, rows of zeros."""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.fused import kernels
from openrnn.kernels.cuda.args import MaskRowsArgs, SortLengthsArgs

COUNTED = 8192  # rows up to which a kernel of B * B comparisons is quicker than torch's sort
CHUNK = 16  # bytes that a thread copies


class SortedLengths(NamedTuple):
    """Lengths (B,), and the rows in the order of falling length."""

    lengths: Tensor
    order: Tensor


def sort_lengths(lengths: Tensor, order: Tensor | None) -> SortedLengths:
    """The rows by falling length, equal ones in their order; `order`: memory for the result."""
    lengths = lengths.contiguous()
    if order is None:
        order = torch.empty_like(lengths)
    batch = len(lengths)
    if batch > COUNTED:
        order.copy_(lengths.argsort(descending=True, stable=True))
    else:
        # the kernel reads no floating-point values: one compiled for float32 serves every dtype
        kernel = kernels.plain("sort_lengths", "float32", lengths.device.index or 0)
        args = SortLengthsArgs(lengths=lengths.data_ptr(), order=order.data_ptr(), batch=batch)
        kernel.launch(-(-batch // kernel.threads), args.words())
    return SortedLengths(lengths, order)


def masked_rows(x: Tensor, lengths: Tensor | None, mask: Tensor | None = None) -> Tensor:
    """A dense copy of x (T, B, I), zero past the lengths and where the dense mask (T, B) is set."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    steps, batch, width = x.shape
    out = x.new_empty(x.shape)
    step, row, _ = x.stride()
    size = x.element_size()
    whole = (x.data_ptr() | width * size | step * size | row * size) % CHUNK == 0
    pieces = width * size // CHUNK if whole else width
    kernel = kernels.plain("mask_rows", str(x.dtype).removeprefix("torch."), x.device.index or 0)
    args = MaskRowsArgs(
        x=x.data_ptr(), x_step=step, x_row=row, out=out.data_ptr(),
        lengths=0 if lengths is None else lengths.data_ptr(),
        mask=0 if mask is None else mask.data_ptr(),
        steps=steps, batch=batch, width=width, pieces=pieces,
    )  # fmt: skip
    kernel.launch(-(-steps * batch * pieces // kernel.threads), args.words())
    return out
