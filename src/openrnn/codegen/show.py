"""The generated source of a cell's kernels, to be read."""

import re
from collections.abc import Iterable
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn

from openrnn.codegen import cuda, numba
from openrnn.codegen.config import SIZES
from openrnn.codegen.trace import Traced, trace

if TYPE_CHECKING:
    from openrnn.cells import Cell

REST = "what is around them is the same for every cell: codegen.show(cell, full=True) shows it"


@overload
def show(
    cell: "Cell | nn.Module", target: str = ..., *, dtype: str = ...,
    cell_clip: tuple[float, float] | None = ..., full: bool = ..., quiet: Literal[False] = ...,
) -> None: ...  # fmt: skip
@overload
def show(
    cell: "Cell | nn.Module", target: str = ..., *, dtype: str = ...,
    cell_clip: tuple[float, float] | None = ..., full: bool = ..., quiet: Literal[True],
) -> str: ...  # fmt: skip
def show(
    cell: "Cell | nn.Module",
    target: str = "numba",
    *,
    dtype: str = "float32",
    cell_clip: tuple[float, float] | None = None,
    full: bool = False,
    quiet: bool = False,
) -> str | None:
    """Prints what a cell became in its kernels, or returns it.

    That is the new states of one unit in one step, and their derivative. Gates, states and vectors
    have their numbers there; a comment at the top says which are which.

    Args:
        cell: any cell made by `openrnn.cell`, one of `openrnn.cells`, or a layer, whose cell and
            clip are taken.
        target: "numba", the steps of the CPU kernels, whose time loops are the same for every cell,
            or "cuda", the kernels of a GPU for a hidden size of 256.
        dtype: "float32"; with numba also "float64", with cuda "float16" and "bfloat16".
        cell_clip: bounds of the cell state where it is read, in place of the layer's.
        full: all of the source as it is compiled, and not the cell's part alone.
        quiet: return the source, a str, and print nothing.

    Raises:
        TypeError: cell is neither a cell nor one of our layers.
        ValueError: no such target or dtype.
        CellError: the cell cannot be traced.

    Example:
        >>> import openrnn
        >>> source = openrnn.codegen.show(openrnn.cells.gru, quiet=True)
        >>> "gates 0 r, 1 z, 2 n" in source and "sigmoid_1 = sigmoid(a_1)" in source
        True
    """
    if target not in ("numba", "cuda"):
        raise ValueError(f"target must be 'numba' or 'cuda', got {target!r}")
    sizes = numba.SIZES if target == "numba" else SIZES
    if dtype not in sizes:
        raise ValueError(f"dtype must be one of {', '.join(sizes)}, got {dtype!r}")
    known: Any = cell
    if isinstance(cell, nn.Module) and hasattr(cell, "cell"):
        known = cell.cell
        cell_clip = cell_clip or getattr(cell, "_spec").cell_clip  # noqa: B009
    if not hasattr(known, "unit_params"):
        raise TypeError(f"cell must be a cell or a layer of openrnn, got {type(cell).__name__}")
    traced = trace(known, cell_clip)
    if target == "numba":
        source = numba.source(traced, dtype)
        source = source if full else _numba_part(traced, dtype, source)
    else:
        both = cuda.examples(traced, dtype)
        source = "\n\n".join(both) if full else _cuda_part(traced, dtype, both)
    if quiet:
        return source
    print(source.rstrip())  # what the function is for
    return None


def _head(traced: Traced, dtype: str, mark: str) -> str:
    return f"{mark} cell {traced.name} in {dtype}: {traced.legend}\n{mark} {REST}"


def _numba_part(traced: Traced, dtype: str, source: str) -> str:
    """The functions of a row, their operands in one line each and without their shapes."""
    functions = []
    for name in ("step_row", "derivative_row"):
        found = re.search(rf"def {name}\((.*?)\n\):\n(.*?)\n\n\n", source, re.DOTALL)
        if found is not None:
            operands = ", ".join(re.findall(r"^    (\w+),", found[1], re.MULTILINE))
            head = "\n    ".join(wrap(operands, 90))
            functions.append(f"def {name}(\n    {head}\n):\n{found[2]}")
    return "\n\n\n".join([_head(traced, dtype, "#"), *functions]) + "\n\n\n"


def _cuda_part(traced: Traced, dtype: str, sources: Iterable[str]) -> str:
    """The functions of a unit."""
    functions = []
    for source in sources:
        for found in re.finditer(
            r"^// [^\n]*\nINLINE void (step|factors|derivative)\(\n.*?^}\n", source,
            re.DOTALL | re.MULTILINE,
        ):  # fmt: skip
            functions.append(found[0])
    return "\n\n".join([_head(traced, dtype, "//"), *functions])
