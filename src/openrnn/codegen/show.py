"""The generated source of a cell's kernels, to be read."""

from typing import TYPE_CHECKING

from openrnn.codegen import numba
from openrnn.codegen.trace import trace

if TYPE_CHECKING:
    from openrnn.cells import Cell


def show(
    cell: "Cell",
    target: str = "numba",
    *,
    dtype: str = "float32",
    cell_clip: tuple[float, float] | None = None,
    quiet: bool = False,
) -> str:
    """Prints and returns the source that is compiled for a cell.

    Args:
        cell: any cell made by `openrnn.cell`, or one of `openrnn.cells`.
        target: "numba", the CPU kernels.
        dtype: "float32" or "float64".
        cell_clip: bounds of the cell state where it is read.
        quiet: do not print.

    Raises:
        ValueError: no such target or dtype.
        CellError: the cell cannot be traced.

    Example:
        >>> import openrnn
        >>> source = openrnn.codegen.show(openrnn.cells.gru, quiet=True)
        >>> "sigmoid_z = sigmoid(a_z)" in source
        True
    """
    if target != "numba":
        raise ValueError(f"target must be 'numba', got {target!r}")
    if dtype not in numba.SIZES:
        raise ValueError(f"dtype must be one of {', '.join(numba.SIZES)}, got {dtype!r}")
    traced = trace(cell, cell_clip)
    source = numba.forward_source(traced, dtype) + "\n\n" + numba.backward_source(traced, dtype)
    if not quiet:
        print(source)  # what the function is for
    return source
