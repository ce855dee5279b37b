"""What forward leaves for backward: saved activations, and the outputs of all layers but the last.

It is a list, layer by layer: the saved activations of each direction, then the layer's output.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openrnn.backends.base import TensorShape
from openrnn.backends.cpu.layer import compute_dtype, layout_of
from openrnn.kernels.cpu import launch
from openrnn.memo import memo
from openrnn.spec import Problem, Spec


class Saved(NamedTuple):
    """A reserve, sorted."""

    activations: list[list[Tensor]]  # of each layer and direction, directions of a layer together
    outputs: list[Tensor]  # of each layer but the last (T, B, D*O)


def shapes(problem: Problem, steps: int, batch: int) -> list[TensorShape]:
    """The shape and dtype of each tensor."""
    spec, dtype = problem.spec, compute_dtype(problem.dtype)
    found: list[TensorShape] = []
    for layer in range(spec.num_layers):
        widths = [width for width in layout_of(spec, layer, dtype).widths if width]
        found += [((steps, batch, width), dtype) for width in widths] * spec.directions
        if layer < spec.num_layers - 1:
            found.append(((steps, batch, spec.directions * spec.output_size), dtype))
    return found


def new(problem: Problem, steps: int, batch: int) -> list[Tensor]:
    """Memory for all of it."""
    # parts stay unwritten where rows end early, or unpacked products skip the padding
    partly = problem.lengths or not launch.packs(steps, batch)
    make = torch.zeros if partly else torch.empty
    found = _shapes(problem, steps, batch)
    return [make(shape, dtype=dtype, device="cpu") for shape, dtype in found]


@memo(4096)
def _shapes(problem: Problem, steps: int, batch: int) -> list[TensorShape]:
    """The same where no size is symbolic."""
    return shapes(problem, steps, batch)


def by_layer(spec: Spec, reserve: list[Tensor]) -> Saved:
    """The tensors of a reserve, sorted."""
    count = (len(reserve) - spec.num_layers + 1) // spec.chains  # tensors of one direction
    width = spec.directions * count + 1  # of a layer, its output the last
    activations: list[list[Tensor]] = []
    for start in range(0, spec.num_layers * width, width):
        for at in range(start, start + width - 1, count):
            activations.append(reserve[at : at + count])
    return Saved(activations, reserve[width - 1 :: width])
