"""Whether a cell is elementwise: it runs once on small tensors, watched.

What is not elementwise no backend runs. What is, but has no kernel, runs on the reference.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from openrnn import fresh
from openrnn.codegen.aten import RESHAPES, elementwise, name_of
from openrnn.errors import CellError
from openrnn.memo import memo

if TYPE_CHECKING:
    from openrnn.cells import Cell

SHAPE = (2, 3)
Clip = tuple[float, float] | None
Step = Callable[..., tuple[Tensor, ...]]
# what to do is told as well: products and sums over units are the commonest mistakes
NOT_ELEMENTWISE = (
    "is not elementwise: a cell computes each unit from numbers of that unit alone, so matrix "
    "products and other layers belong outside of it"
)


@memo(256)
def check_elementwise(cell: "Cell") -> None:
    """Runs a cell once on small tensors.

    Raises:
        CellError: it calls something that is not elementwise, changes what it is given in place,
            fits one number of units alone, or a new state has another shape or dtype.
    """
    fresh.run(_check, cell)


def names_of(cell: "Cell") -> tuple[str, ...]:
    """The names of all that a cell reads, in the order of `step_of`."""
    return (
        *(f"x_{gate}" for gate in cell.gates),
        *(f"r_{gate}" for gate in cell.gates),
        *(f"s_{state}" for state in cell.states),
        *(f"p_{param}" for param in cell.unit_params),
    )


def examples(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Small tensors for a cell to run on, whatever the default dtype and device."""
    # of another shape other values, too: a number that a cell reads off them is another one
    values = [0.5 if shape == SHAPE else 0.25 + 0.5 * k / count for k in range(count)]
    return [torch.full(shape, value, dtype=dtype, device="cpu") for value in values]


def step_of(cell: "Cell", clip: Clip) -> Step:
    """A cell as a function of tensors alone."""
    count, states = len(cell.gates), len(cell.states)

    def bound(c: Tensor) -> Tensor:
        return c if clip is None else torch.clamp(c, min=clip[0], max=clip[1])

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        x, r, rest = flat[:count], tuple(flat[count : 2 * count]), flat[2 * count :]
        return cell.step(x, r, rest[:states], rest[states:], bound)

    return step


def _check(cell: "Cell") -> None:
    names, dtype = names_of(cell), torch.float32
    vectors = len(cell.unit_params)
    given = examples(len(names) - vectors, SHAPE, dtype) + examples(vectors, SHAPE[1:], dtype)
    try:
        with torch.no_grad(), _Watch(cell):
            new = step_of(cell, None)(*given)
    except RuntimeError as error:
        if str(error).startswith("Boolean value of Tensor"):
            raise CellError(
                f"cell '{cell.name}' takes a tensor for true or false, by if, and, or, not: use "
                "torch.where"
            ) from error
        if not str(error).startswith("The size of tensor"):
            raise
        raise CellError(
            f"cell '{cell.name}' must work for any number of units, fails for {SHAPE[-1]}: "
            f"{error}; vectors of one number a unit are named in params= and read as p.NAME"
        ) from error
    for name, tensor in zip(names, given):
        if tensor._version:
            letter, word = name.split("_", 1)
            raise CellError(
                f"cell '{cell.name}' changes {letter}.{word} in place, a cell must make new tensors"
            )
    for state, value in zip(cell.states, new):
        said = f"cell '{cell.name}': new state {state} must"
        if not isinstance(value, Tensor):
            raise CellError(f"{said} be a tensor, got {type(value).__name__}")
        if tuple(value.shape) != SHAPE:
            raise CellError(
                f"{said} keep the shape {SHAPE} of its inputs, got {tuple(value.shape)}"
            )
        if value.dtype != dtype:
            raise CellError(f"{said} keep the dtype {dtype} of its inputs, got {value.dtype}")


class _Watch(TorchDispatchMode):
    """Refuses, by name and line, what is not elementwise."""

    def __init__(self, cell: "Cell") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.cell = cell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        # a view of all, as v.view_as(v), is no more than another name
        moves = name in RESHAPES and func(*args, **(kwargs or {})).shape != args[0].shape
        if moves or not elementwise(func):
            word = str(func).rsplit(".", 1)[0]
            why = NOT_ELEMENTWISE
            if name == "_local_scalar_dense":
                why = (
                    "makes a Python number of a tensor (item, float, bool, if): no elementwise step"
                )
            if name.startswith("index_put"):
                why = "writes where a mask says so: use torch.where"
            if name.endswith("_backward"):  # autograd's, in a derivative, not the user's
                raise CellError(f"cell '{self.cell.name}': {word} has no kernel")
            raise CellError(f"cell '{self.cell.name}': {word}{self._line()} {why}")
        return func(*args, **(kwargs or {}))

    def _line(self) -> str:
        code = getattr(self.cell.function, "__code__", None)
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code is code:
                return f" (line {frame.f_lineno})"
            frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
        return ""
