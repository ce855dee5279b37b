"""What forward leaves for backward: saved activations, and the outputs of all layers but the last.

It is a list, layer by layer: the saved activations of each direction, then the layer's output.
"""

from typing import NamedTuple

from openrnn.backends.base import TensorShape
from openrnn.backends.cpu.layer import compute_dtype, layout_of
from openrnn.backends.cpu.program import SlotRef
from openrnn.kernels.cpu import launch
from openrnn.spec import Problem, Spec


class Saved(NamedTuple):
    """A reserve, sorted."""

    activations: list[list[SlotRef]]  # of each layer and direction, directions of a layer together
    outputs: list[SlotRef]  # of each layer but the last (T, B, D*O)


def shapes(problem: Problem, steps: int, batch: int) -> list[TensorShape]:
    """The shape and dtype of each tensor; sizes may be symbolic."""
    spec, dtype = problem.spec, compute_dtype(problem.dtype)
    found: list[TensorShape] = []
    for layer in range(spec.num_layers):
        widths = [width for width in layout_of(spec, layer, dtype).widths if width]
        found += [((steps, batch, width), dtype) for width in widths] * spec.directions
        if layer < spec.num_layers - 1:
            found.append(((steps, batch, spec.directions * spec.output_size), dtype))
    return found


def partly(problem: Problem, steps: int, batch: int) -> bool:
    """Whether forward leaves parts unwritten, which must be zeros.

    Rows may end early, and unpacked products skip the padding.
    """
    return problem.lengths or not launch.packs(steps, batch)


def by_layer(spec: Spec, count: int) -> Saved:
    """The slots of a reserve of so many tensors, sorted; they are ("saved", place)."""
    every = [SlotRef(("saved", index)) for index in range(count)]
    each = (count - spec.num_layers + 1) // spec.chains  # tensors of one direction
    width = spec.directions * each + 1  # of a layer, its output the last
    activations: list[list[SlotRef]] = []
    for start in range(0, spec.num_layers * width, width):
        for at in range(start, start + width - 1, each):
            activations.append(every[at : at + each])
    return Saved(activations, every[width - 1 :: width])
