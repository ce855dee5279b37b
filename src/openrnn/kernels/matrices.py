"""Weight matrices as panels, and their gradients out of the sums of all tasks."""

from array import array
from typing import Any

import torch
from torch import Tensor

from openrnn.kernels import launch, packing
from openrnn.kernels.layout import Layout
from openrnn.kernels.memory import float32_at, float64_at, int64_at, named
from openrnn.kernels.regions import task_kernel
from openrnn.kernels.vectors import PANEL, SIZES

# elements below which a second thread costs more than it gives
LEAST_ELEMENTS = 1 << 15


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _whole_panels(columns: int, dtype: str) -> int:
    panel: int = PANEL[dtype]
    return (columns + panel - 1) // panel * panel


def _for(dtype: str) -> dict[str, Any]:
    """The three kernels of a type; a job is the number of tasks, then their arguments in order."""
    pack_transposed = getattr(packing, f"pack_transposed_{dtype}")
    pack_plain = getattr(packing, f"pack_plain_{dtype}")
    reals, size = {"float32": float32_at, "float64": float64_at}[dtype], SIZES[dtype]

    @task_kernel
    @named(dtype)
    def transpose(job_at, task, team):
        job = int64_at(job_at)
        pack_transposed(job[1], job[2], job[3], job[4], job[5], job[6], job[7], task, job[0])

    @task_kernel
    @named(dtype)
    def pack(job_at, task, team):
        job = int64_at(job_at)
        pack_plain(job[1], job[2], job[3], job[4], job[5], job[6], job[7], task, job[0])

    @task_kernel
    @named(dtype)
    def collect(job_at, task, team):
        """out[gates, units, kept] = the sum over parts of sums[gates, padded, width]."""
        job = int64_at(job_at)
        tasks, sums, parts, part, padded, width = job[0], job[1], job[2], job[3], job[5], job[7]
        units, kept, target = job[6], job[8], reals(job[9])
        rows = job[4] * units
        for row in range(rows * task // tasks, rows * (task + 1) // tasks):
            start = (row // units * padded + row % units) * width
            given = reals(sums + start * size)
            for j in range(kept):
                target[row * kept + j] = given[j]
            for place in range(1, parts):
                given = reals(sums + (place * part + start) * size)
                for j in range(kept):
                    target[row * kept + j] += given[j]

    return {"transpose": transpose, "pack": pack, "collect": collect}


_KERNELS = {dtype: _for(dtype) for dtype in SIZES}


def _run(kernel: str, dtype: str, elements: int, *job: int) -> None:
    tasks = launch.threads() if elements >= LEAST_ELEMENTS else 1
    launch.run(_KERNELS[dtype][kernel], array("q", (tasks, *job)), tasks)


def transposed(w: Tensor | None, gates: int, padded: int) -> Tensor | None:
    """Panels of the product with W (G*units, inner) transposed: inner rows, G * padded columns."""
    if w is None:
        return None
    rows, inner = w.shape
    out = torch.empty(_whole_panels(gates * padded, _name(w)) * inner, dtype=w.dtype)
    _run(
        "transpose", _name(w), w.numel(),
        w.data_ptr(), rows // gates, gates, inner, inner, out.data_ptr(), padded,
    )  # fmt: skip
    return out


def plain(w: Tensor | None, gates: int, padded: int) -> Tensor | None:
    """Panels of the product with W (G*units, columns) itself: G * padded rows."""
    if w is None:
        return None
    rows, columns = w.shape
    out = torch.empty(_whole_panels(columns, _name(w)) * gates * padded, dtype=w.dtype)
    _run(
        "pack", _name(w), w.numel(),
        w.data_ptr(), gates, rows // gates, padded, columns, columns, out.data_ptr(),
    )  # fmt: skip
    return out


def gradients(layout: Layout, sums: Tensor, weights: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors that exist."""
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
            grad = sums.as_strided(weight.shape, weight.stride(), offset)
        elif weight is not None:
            grad = torch.empty_like(weight)
            start = sums.data_ptr() + offset * layout.size
            _run(
                "collect", layout.dtype, weight.numel() * sums.shape[0],
                start, sums.shape[0], sums.shape[1], *sizes, grad.data_ptr(),
            )  # fmt: skip
        found.append(grad)
    return found
