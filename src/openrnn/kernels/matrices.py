"""Weight matrices as panels, and their gradients out of the sums of all tasks."""

import torch
from numba import njit
from torch import Tensor

from openrnn.kernels import packing
from openrnn.kernels.layout import Layout
from openrnn.kernels.memory import float32_at, float64_at, named
from openrnn.kernels.vectors import PANEL


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _whole_panels(columns: int, dtype: str) -> int:
    panel: int = PANEL[dtype]
    return (columns + panel - 1) // panel * panel


def transposed(w: Tensor, gates: int, padded: int) -> Tensor:
    """Panels of the product with W (G*units, inner) transposed: inner rows, G * padded columns."""
    rows, inner = w.shape
    out = torch.empty(_whole_panels(gates * padded, _name(w)) * inner, dtype=w.dtype)
    wide = w.dtype == torch.float64
    pack = packing.pack_transposed_float64 if wide else packing.pack_transposed_float32
    pack(w.data_ptr(), rows // gates, gates, inner, inner, out.data_ptr(), padded)
    return out


def plain(w: Tensor, gates: int, padded: int) -> Tensor:
    """Panels of the product with W (G*units, columns) itself: G * padded rows."""
    rows, columns = w.shape
    out = torch.empty(_whole_panels(columns, _name(w)) * gates * padded, dtype=w.dtype)
    pack = packing.pack_plain_float64 if w.dtype == torch.float64 else packing.pack_plain_float32
    pack(w.data_ptr(), gates, rows // gates, padded, columns, columns, out.data_ptr())
    return out


def _for(reals, dtype, size):
    @njit(nogil=True, cache=True, error_model="numpy")
    @named(dtype)
    def collect(sums, tasks, stride, gates, padded, units, width, kept, out):
        """out[gates, units, kept] = the sum over tasks of sums[gates, padded, width]."""
        target = reals(out)
        for row in range(gates * units):
            start = (row // units * padded + row % units) * width
            given = reals(sums + start * size)
            for j in range(kept):
                target[row * kept + j] = given[j]
            for task in range(1, tasks):
                given = reals(sums + (task * stride + start) * size)
                for j in range(kept):
                    target[row * kept + j] += given[j]

    return collect


_collect_float32, _collect_float64 = _for(float32_at, "float32", 4), _for(float64_at, "float64", 8)


def gradients(layout: Layout, sums: Tensor, weights: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors that exist."""
    collect = _collect_float64 if sums.dtype == torch.float64 else _collect_float32
    gates, padded, units = layout.gates, layout.padded, layout.units
    w_ih, w_hh, w_hr, bias_x, bias_r, vectors = layout.sum_offsets
    where = [  # offset, then gates, padded, units, width, kept
        (w_ih, gates, padded, units, layout.wide, layout.inputs),
        (w_hh, gates, padded, units, layout.width, layout.outputs),
        (bias_x, gates, padded, units, 1, 1),
        (bias_x if layout.summed else bias_r, gates, padded, units, 1, 1),
        (w_hr, 1, layout.outputs, layout.outputs, padded, units),
    ]
    where += [(vectors + k * padded, 1, padded, units, 1, 1) for k in range(layout.vectors)]
    found: list[Tensor | None] = []
    taken: set[int] = set()
    for weight, (offset, *sizes) in zip(weights, where):
        grad = None
        # two gradients must not share memory, equal as they are
        bare = layout.plain and sums.shape[0] == 1 and offset not in taken
        taken.add(offset)
        if weight is not None and bare:
            grad = sums[0, offset : offset + weight.numel()].view(weight.shape)
        elif weight is not None:
            grad = torch.empty_like(weight)
            start = sums.data_ptr() + offset * layout.size
            collect(start, sums.shape[0], sums.shape[1], *sizes, grad.data_ptr())
        found.append(grad)
    return found
