"""Nested tensors (B, steps, I) of layout jagged: padded with lengths, and y as another of them."""

from typing import Any

import torch
from torch import Tensor


def padded(given: Tensor, batch_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The sequences as (B, T, I), their lengths (B,), and the offsets (B + 1,) of `again`.

    Raises:
        ValueError: not jagged in its second dimension, or the layer is not batch first.
    """
    nested: Any = given  # of a subclass that torch does not name in public
    if nested.layout is not torch.jagged or nested.dim() != 3 or nested._ragged_idx != 1:
        raise ValueError(
            "a nested input must be jagged, (batch, steps, features) with steps that differ: "
            "make it by torch.nested.nested_tensor(sequences, layout=torch.jagged)"
        )
    if not batch_first:
        raise ValueError("a nested input has its batch first: the layer needs batch_first=True")
    nested = nested.contiguous()  # without holes
    offsets: Tensor = nested.offsets()
    return torch.nested.to_padded_tensor(nested, 0.0), offsets.diff(), offsets


def again(y: Tensor, lengths: Tensor, offsets: Tensor) -> Tensor:
    """An output (B, T, O) as a nested tensor of the same sequences."""
    steps = torch.arange(y.shape[1], device=y.device)
    rows = (steps < lengths[:, None]).flatten().nonzero().squeeze(1)
    values = y.flatten(0, 1).index_select(0, rows)
    # without the longest's length, torch pads this one to the sum of all
    return torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=y.shape[1])
