"""An LSTM node with `input_forget=1` as a layer: what ONNX Runtime runs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from openrnn import cells
from openrnn.convert.arrays import as_tensor
from openrnn.nn import Layer, Recurrent


def coupled(weights: Mapping[str, Any], reverse: bool, batch_first: bool) -> Layer:
    """A layer of W (D, 4*H, I), R (D, 4*H, H) and B (D, 8*H), whose rows of f are never read.

    ONNX Runtime computes f = 1 - i. Our cell has i = 1 - f, so its f = sigmoid(-a_i).

    Raises:
        ValueError: W and R are no matrices of four gates.
    """
    w, r = (as_tensor(name, weights[name]) for name in ("W", "R"))
    hidden = r.shape[-1]
    if w.dim() != 3 or r.shape[1] != 4 * hidden or w.shape[1] != 4 * hidden:
        raise ValueError(
            f"W and R must be (D, 4*H, I) and (D, 4*H, H), got {tuple(w.shape)} and "
            f"{tuple(r.shape)}"
        )
    state = {"weight_ih": w, "weight_hh": r}
    if "B" in weights:
        b = as_tensor("B", weights["B"])
        if tuple(b.shape) != (w.shape[0], 8 * hidden):
            raise ValueError(f"B must be (D, 8*H), got {tuple(b.shape)}")
        state["bias_ih"], state["bias_hh"] = b.chunk(2, dim=1)
    layer = Recurrent(
        cells.coupled_lstm, w.shape[-1], hidden, bias="B" in weights, bidirectional=len(w) == 2,
        reverse=reverse, batch_first=batch_first, dtype=w.dtype,
    )  # fmt: skip
    layer.load_state_dict(
        {
            f"{name}_l0{suffix}": _rows(every[index], hidden)
            for name, every in state.items()
            for index, suffix in enumerate(("", "_reverse")[: len(w)])
        }
    )
    return layer


def _rows(iofc: Tensor, hidden: int) -> Tensor:
    """The rows of our f, g and o among those of ONNX's i, o, f and c."""
    i, o, _, c = iofc.split(hidden)
    return torch.cat([-i, c, o])
