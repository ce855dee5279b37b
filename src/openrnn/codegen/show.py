"""The generated source of a cell's kernels, to be read."""

from typing import TYPE_CHECKING, Any

from torch import nn

from openrnn.codegen import cuda, numba
from openrnn.codegen.config import SIZES
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

    Gates, states and vectors have their numbers there; a comment at the top says which are which.

    Args:
        cell: any cell made by `openrnn.cell`, one of `openrnn.cells`, or a layer, whose cell and
            clip are taken.
        target: "numba", the steps of the CPU kernels, whose time loops are the same for every cell,
            or "cuda", the kernels of a GPU for a hidden size of 256.
        dtype: "float32"; with numba also "float64", with cuda "float16" and "bfloat16".
        cell_clip: bounds of the cell state where it is read, in place of the layer's.
        quiet: do not print.

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
    else:
        source = "\n\n".join(cuda.examples(traced, dtype))
    if not quiet:
        print(source)  # what the function is for
    return source
