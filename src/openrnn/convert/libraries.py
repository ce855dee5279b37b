"""Every library by its name: the rows of `layouts`, and our own state dict of each cell."""

from openrnn import cells
from openrnn.convert.layouts import PATTERN, ROWS, Layout, Library, row
from openrnn.spec import Spec


def _own(cell: cells.Cell) -> Layout:
    gates = " ".join(cell.gates)
    return Layout(cell.key, (
        row("weight_ih", "W", gates, "(g o) d"), row("weight_hh", "R", gates, "(g o) d"),
        row("bias_ih", "bW", gates, "(g o)"), row("bias_hh", "bR", gates, "(g o)"),
        row("weight_hr", "P", "", "q o"),
        *(row(name, "p", name, "o") for name in cell.unit_params),
    ), "each")  # fmt: skip


_CELLS = tuple(cell for cell in vars(cells).values() if isinstance(cell, cells.Cell))
OPENRNN = Library("openrnn", tuple(map(_own, _CELLS)), names=PATTERN, clips=True, reverses=True)
LIBRARIES = {library.name: library for library in (OPENRNN, *ROWS)}


def library(what: str, name: str) -> Library:
    """The library of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in LIBRARIES:
        raise ValueError(f"{what} must be one of {', '.join(LIBRARIES)}, got {name!r}")
    return LIBRARIES[name]


def layouts(library: Library, cell: str | None) -> list[Layout]:
    """A library's layouts of a cell, or all.

    Raises:
        ValueError: it has no such cell.
    """
    fit = [layout for layout in library.layouts if cell in (None, layout.cell)]
    if not fit:
        has = ", ".join(dict.fromkeys(layout.cell for layout in library.layouts))
        raise ValueError(f"{library.name} has no cell {cell!r}, it has {has}")
    return fit


def layout_for(library: Library, spec: Spec) -> Layout:
    """How a library keeps a network of ours: the first layout of its cell.

    Raises:
        ValueError: it has no such cell or option.
    """
    layout = layouts(library, spec.cell)[0]
    if spec.proj_size and not any(array.sides == ("P",) for array in layout.arrays):
        raise ValueError(f"{library.name} has no projection, got proj_size {spec.proj_size}")
    if spec.input_mode != "linear":
        raise ValueError(f"{library.name} needs input_mode 'linear', got {spec.input_mode!r}")
    if spec.cell_clip is not None and not library.clips:
        raise ValueError(f"{library.name} bounds no cell state, got cell_clip {spec.cell_clip}")
    if spec.reverse and not library.reverses:
        raise ValueError(f"{library.name} has no reverse direction alone, got reverse True")
    return layout


def check_heads(layout: Layout, spec: Spec, heads: int) -> None:
    """Raises ValueError unless the matrices of a layout can be cut into so many heads."""
    cut = [array for array in layout.arrays if "n" in array.axes]
    sizes = {"hidden_size": spec.hidden_size}
    if any("W" in array.sides for array in cut):
        sizes["input_size"] = spec.input_size
    if not cut and heads != 1:
        raise ValueError(f"heads must be 1, as these matrices have none, got {heads}")
    for name, size in sizes.items():
        if heads < 1 or size % heads:
            raise ValueError(f"heads must divide {name} {size}, got {heads}")
