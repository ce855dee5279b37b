"""Packed sequences as padded ones, and back."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from openrnn import op


def lengths_of(packed: PackedSequence) -> Tensor:
    """The lengths (B,) of packed sequences, falling, as int32 on the host."""
    sizes = packed.batch_sizes
    present = torch.arange(int(sizes[0]), device=sizes.device) < sizes[:, None]  # (T, B)
    return present.sum(0, dtype=torch.int32)


def unpack(packed: PackedSequence) -> tuple[Tensor, Tensor, Tensor]:
    """A packed sequence as padded (T, B, I), lengths (B,), and where its rows lie in (T*B, I)."""
    sizes = packed.batch_sizes
    # the tracer of torch.jit follows sizes and tensors; a number would be a constant of its graph
    steps: int = sizes.shape[0]
    batch: Any = sizes[0] if op.tracing() else int(sizes[0])
    present = torch.arange(batch, device=sizes.device) < sizes[:, None]  # (T, B)
    rows = present.flatten().nonzero().squeeze(1).to(packed.data.device)
    data = packed.data
    flat = data.new_zeros((steps * batch, data.shape[1])).index_copy(0, rows, data)
    return flat.view(steps, batch, -1), present.sum(0), rows


def repack(y: Tensor, rows: Tensor, like: PackedSequence) -> PackedSequence:
    """The inverse of `unpack` for an output of the same sequences."""
    data = y.flatten(0, 1).index_select(0, rows)
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)
