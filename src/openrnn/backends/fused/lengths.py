"""Rows sorted by length, and lengths within a chunk of time, in one launch each."""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.fused import kernels
from openrnn.kernels.cuda.args import CutLengthsArgs, SortLengthsArgs
from openrnn.schedule import Chunk

COUNTED = 8192  # rows up to which a kernel of B * B comparisons is quicker than torch's sort


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


def cut_lengths(lengths: SortedLengths, chunk: Chunk) -> SortedLengths:
    """The lengths within a chunk, counted from its first step; the order of the rows holds."""
    given = lengths.lengths
    inside, batch = torch.empty_like(given), len(given)
    kernel = kernels.plain("cut_lengths", "float32", given.device.index or 0)
    args = CutLengthsArgs(
        lengths=given.data_ptr(), inside=inside.data_ptr(), batch=batch, begin=chunk.begin,
        steps=chunk.steps,
    )  # fmt: skip
    kernel.launch(-(-batch // kernel.threads), args.words())
    return SortedLengths(inside, lengths.order)
