"""One layer and direction: what all of its calls have in common, and how it runs at given sizes."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from openrnn.backends.base import traced
from openrnn.memo import memo
from openrnn.params import places
from openrnn.spec import Spec, dtype_name

if TYPE_CHECKING:
    from openrnn.codegen.trace import Traced
    from openrnn.kernels.cpu.layout import Layout
    from openrnn.kernels.cpu.plan import LoopPlan


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the kernels compute in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class LayerKernels(NamedTuple):
    """One layer and direction in one dtype; `chain` counts them, directions of a layer together."""

    chain: int
    cell: "Traced"
    layout: "Layout"
    param_indices: tuple[
        int | None, ...
    ]  # of w_ih, w_hh, b_ih, b_hh, w_hr, unit vectors in the params


@memo(4096)
def layer_kernels(spec: Spec, layer: int, direction: int, dtype: torch.dtype) -> LayerKernels:
    """The layer and direction, for the dtype that the kernels compute in."""
    chain = layer * spec.directions + direction
    return LayerKernels(chain, traced(spec), layout_of(spec, layer, dtype), places(spec)[chain])


@memo(4096)
def layout_of(spec: Spec, layer: int, dtype: torch.dtype) -> "Layout":
    """The sizes of a layer, the same in both directions."""
    from openrnn.codegen.numba import all_summed, saved_sides
    from openrnn.kernels.cpu.layout import Layout

    cell, chain = traced(spec), layer * spec.directions
    inputs = 0 if places(spec)[chain][0] is None else spec.layer_input(layer)
    return Layout(
        dtype_name(dtype), len(cell.gates), len(cell.states) - 1,
        len(cell.unit_params), len(saved_sides(cell)), all_summed(cell), inputs,
        spec.hidden_size, spec.output_size,
    )  # fmt: skip


@memo(2048)
def loop_plan(*sizes: Any) -> "LoopPlan":
    """`kernels.cpu.plan.plan` of the same arguments."""
    from openrnn.kernels.cpu.plan import plan

    return plan(*sizes)
