"""Weight matrices as panels."""

import torch
from torch import Tensor

from openrnn.kernels import packing
from openrnn.kernels.vectors import PANEL


def transposed(w: Tensor, gates: int, padded: int) -> Tensor:
    """Panels of the product with W (G*units, inner) transposed: inner rows, G * padded columns."""
    dtype = str(w.dtype).removeprefix("torch.")
    panel = PANEL[dtype]
    inner = w.shape[1]
    columns = (gates * padded + panel - 1) // panel * panel
    out = torch.empty(columns * inner, dtype=w.dtype)
    pack = packing.pack_transposed_float64 if w.dtype == torch.float64 else packing.pack_transposed_float32
    pack(w.data_ptr(), w.shape[0] // gates, gates, inner, inner, out.data_ptr(), padded)
    return out


def plain(w: Tensor, gates: int, padded: int) -> Tensor:
    """Panels of the product with W (G*units, columns) itself: G * padded rows, whole panels of columns."""
    dtype = str(w.dtype).removeprefix("torch.")
    panel = PANEL[dtype]
    width = w.shape[1]
    columns = (width + panel - 1) // panel * panel
    out = torch.empty(columns * gates * padded, dtype=w.dtype)
    pack = packing.pack_plain_float64 if w.dtype == torch.float64 else packing.pack_plain_float32
    pack(w.data_ptr(), gates, w.shape[0] // gates, padded, width, width, out.data_ptr())
    return out
