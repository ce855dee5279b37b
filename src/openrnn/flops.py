"""What a call counts under `torch.utils.flop_counter.FlopCounterMode`: its matrix products.

As torch counts, a multiplication and an addition are two operations, and elementwise work none. Of
the reference torch counts the products themselves.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from openrnn.params import module_slots
from openrnn.spec import Spec

Shape = Sequence[int]


def _of_matrices(x: Shape, params: Sequence[Shape]) -> int:
    """A product of each matrix with each of T * B rows of x (T, B, I)."""
    return 2 * x[0] * x[1] * sum(prod(shape) for shape in params if len(shape) == 2)


def forward(x: Shape, states: Sequence[Shape], params: Sequence[Shape], *_: Any, **__: Any) -> int:
    """Floating point operations of a forward pass, of arguments by their shapes."""
    return _of_matrices(x, params)


def backward(
    x: Shape, states: Sequence[Shape], params: Sequence[Shape], *others: Any, **_: Any
) -> int:
    """Floating point operations of a backward pass, of arguments by their shapes.

    Gradients pass through each matrix, but through layer 0's input only where that of x is wanted;
    each matrix whose own gradient is wanted is one product more.
    """
    spec, backend, needs = Spec.parse(others[-6]), others[-5], others[-1]
    wanted = needs[1 + len(states) :]
    first = [slot.name.startswith("weight_ih_l0") for slot in module_slots(spec)]
    through = [shape for shape, reads_x in zip(params, first) if needs[0] or not reads_x]
    own = [shape for shape, want in zip(params, wanted) if want]
    # only our CUDA kernels compute gates again
    again = params if spec.recompute == "gates" and backend == "fused" else ()
    return sum(_of_matrices(x, some) for some in (through, own, again))


def register_formulas() -> None:
    """Tells `FlopCounterMode` what our operators count, where it does not know it yet."""
    for operator, formula in (
        (torch.ops.openrnn.forward, forward),
        (torch.ops.openrnn.backward, backward),
    ):
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)
