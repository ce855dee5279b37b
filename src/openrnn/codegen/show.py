"""The generated source of a cell's kernels, to be read."""

from typing import TYPE_CHECKING

from openrnn.codegen import cuda, numba
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
        target: "numba", the CPU kernels, or "cuda", those of a GPU for a hidden size of 256.
        dtype: "float32"; with numba also "float64", with cuda "float16" and "bfloat16".
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
    if target not in ("numba", "cuda"):
        raise ValueError(f"target must be 'numba' or 'cuda', got {target!r}")
    sizes = numba.SIZES if target == "numba" else cuda.SIZES
    if dtype not in sizes:
        raise ValueError(f"dtype must be one of {', '.join(sizes)}, got {dtype!r}")
    traced = trace(cell, cell_clip)
    if target == "numba":
        parts = numba.forward_source(traced, dtype), numba.backward_source(traced, dtype)
    else:
        parts = cuda.examples(traced, dtype)
    source = "\n\n".join(parts)
    if not quiet:
        print(source)  # what the function is for
    return source
