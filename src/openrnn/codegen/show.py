"""The generated source of a cell's kernels, to be read."""

from typing import TYPE_CHECKING, Any

from torch import nn

from openrnn.codegen import numba
from openrnn.codegen.trace import trace

if TYPE_CHECKING:
    from openrnn.cells import Cell


def show(
    cell: "Cell | nn.Module",
    target: str = "numba",
    *,
    dtype: str = "float32",
    cell_clip: tuple[float, float] | None = None,
    quiet: bool = False,
) -> str:
    """Prints and returns the source that is compiled for a cell.

    Args:
        cell: any cell made by `openrnn.cell`, one of `openrnn.cells`, or a layer, whose cell and
            clip are taken.
        target: "numba", the CPU kernels.
        dtype: "float32" or "float64".
        cell_clip: bounds of the cell state where it is read, in place of the layer's.
        quiet: do not print.

    Raises:
        TypeError: cell is neither a cell nor one of our layers.
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
    known: Any = cell
    if isinstance(cell, nn.Module) and hasattr(cell, "cell"):
        known = cell.cell
        cell_clip = cell_clip or getattr(cell, "_spec").cell_clip  # noqa: B009
    if not hasattr(known, "unit_params"):
        raise TypeError(f"cell must be a cell or a layer of openrnn, got {type(cell).__name__}")
    traced = trace(known, cell_clip)
    source = numba.forward_source(traced, dtype) + "\n\n" + numba.backward_source(traced, dtype)
    if not quiet:
        print(source)  # what the function is for
    return source
