"""Weight matrices packed into panels, and their gradients, added up from the sums of all teams."""

from functools import lru_cache

import torch
from torch import Tensor

from openrnn.kernels.cpu import launch, objects
from openrnn.kernels.cpu.args import CollectArgs, PackArgs
from openrnn.kernels.cpu.host import PANEL, SIZES
from openrnn.kernels.cpu.layout import Layout

# elements of a matrix from which on more than one thread is worth it
LEAST_ELEMENTS = 1 << 15


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _whole_panels(columns: int, dtype: str) -> int:
    panel: int = PANEL[dtype]
    return (columns + panel - 1) // panel * panel


@lru_cache(maxsize=1)
def _kernels() -> dict[str, objects.CompiledFunction]:
    names = [f"{name}_{dtype}" for name in ("transpose", "pack", "collect") for dtype in SIZES]
    source = f"from openrnn.kernels.cpu.panels import {', '.join(names)}\n"
    return dict(zip(names, objects.kernels(source, names)))


def _tasks(elements: int) -> int:
    return launch.threads() if elements >= LEAST_ELEMENTS else 1


def _run(kernel: str, dtype: str, args: PackArgs | CollectArgs) -> None:
    launch.run(_kernels()[f"{kernel}_{dtype}"], args, args.tasks)


def transposed(w: Tensor | None, gates: int, padded: int) -> Tensor | None:
    """Panels of the product with W (G*units, inner) transposed: inner rows, G * padded columns."""
    if w is None:
        return None
    dtype, inner = _name(w), w.shape[1]
    out = torch.empty(_whole_panels(gates * padded, dtype) * inner, dtype=w.dtype, device=w.device)
    _run("transpose", dtype, _pack_args(w, gates, padded, out))
    return out


def plain(w: Tensor | None, gates: int, padded: int) -> Tensor | None:
    """Panels of the product with W (G*units, columns) itself: G * padded rows."""
    if w is None:
        return None
    dtype, columns = _name(w), w.shape[1]
    size = _whole_panels(columns, dtype) * gates * padded
    out = torch.empty(size, dtype=w.dtype, device=w.device)
    _run("pack", dtype, _pack_args(w, gates, padded, out))
    return out


def _pack_args(w: Tensor, gates: int, padded: int, out: Tensor) -> PackArgs:
    rows, columns = w.shape
    return PackArgs(
        tasks=_tasks(w.numel()),
        matrix=w.data_ptr(),
        gates=gates,
        rows=rows // gates,
        padded=padded,
        columns=columns,
        out=out.data_ptr(),
    )


def gradients(layout: Layout, sums: Tensor, weights: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients of w_ih, w_hh, b_ih, b_hh, w_hr and the unit vectors that exist."""
    gates, padded, units = layout.gates, layout.padded, layout.units
    w_ih, w_hh, w_hr, bias_x, bias_r, vectors = layout.sum_offsets
    where = [  # offset; gates, padded, rows, width, columns of `CollectArgs`
        (w_ih, gates, padded, units, layout.wide, layout.inputs),
        (w_hh, gates, padded, units, layout.width, layout.outputs),
        (bias_x, gates, padded, units, 1, 1),
        (bias_x if layout.summed else bias_r, gates, padded, units, 1, 1),
        (w_hr, 1, layout.outputs, layout.outputs, padded, units),
    ]
    where += [(vectors + k * padded, 1, padded, units, 1, 1) for k in range(layout.vectors)]
    found: list[Tensor | None] = []
    taken: set[int] = set()
    for weight, (offset, of_gates, of_padded, rows, width, columns) in zip(weights, where):
        grad = None
        # two gradients must not share memory, even where they are equal
        bare = layout.plain and sums.shape[0] == 1 and offset not in taken
        taken.add(offset)
        if weight is not None and bare:
            grad = sums.as_strided(weight.shape, weight.stride(), offset)
        elif weight is not None:
            grad = torch.empty_like(weight)
            parts, part = sums.shape
            args = CollectArgs(
                tasks=_tasks(weight.numel() * parts),
                sums=sums.data_ptr() + offset * layout.size,
                parts=parts,
                part=part,
                gates=of_gates,
                padded=of_padded,
                rows=rows,
                width=width,
                columns=columns,
                out=grad.data_ptr(),
            )
            _run("collect", layout.dtype, args)
        found.append(grad)
    return found
