"""Graph -> numba source: a cell's two row functions above the time loops of `openrnn.kernels`."""

from importlib.resources import files

from openrnn.codegen.graph import Graph, Node, Value
from openrnn.codegen.trace import Traced

SIZES = {"float32": 4, "float64": 8}

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
# functions of `openrnn.kernels.elementwise`, by dtype, and of Python's math
_OURS = frozenset(
    "exp log log1p logsigmoid maximum minimum sigmoid tanh floor ceil trunc round copysign "
    "fmod".split()
)
_MATH = frozenset(
    "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc lgamma expm1 log2 "
    "log10 pow hypot sqrt".split()
)

# what the row functions take: the address of a first row, and the distance of rows in elements;
# `stride` is that of gates and of states
STEP_ROWS = {
    "x": "[GATES, stride], read and kept: sums of both sides where only they matter",
    "r": "[GATES, stride], the recurrent side, where it matters apart",
    "bias": "[GATES, stride], of the input side, or of both sides where only sums matter",
    "bias_r": "[GATES, stride], of the recurrent side",
    "h_before": "[units]",
    "before": "[OTHERS, stride]",
    "vectors": "[VECTORS, stride]",
    "h_after": "[units], out",
    "after": "[OTHERS, stride], out",
    "kept": "[KEPT, stride], out: recurrent sides that backward reads",
}
DERIVATIVE_ROWS = {
    "x": "[GATES, stride]",
    "r": "[KEPT, stride]",
    "bias": "[GATES, stride], of both sides, where x was kept without",
    "h_before": "[units]",
    "before": "[OTHERS, stride]",
    "vectors": "[VECTORS, stride]",
    "d_h_after": "[units]",
    "d_after": "[OTHERS, stride]",
    "dr": "[GATES, stride], out",
    "dx": "[GATES, stride], out, where it differs from dr",
    "d_h_before": "[units], out",
    "d_before": "[OTHERS, stride], out",
    "d_vectors": "[VECTORS, stride], added to",
}

_FORWARD_IMPORTS = """\
from openrnn.kernels.crew import LINE, meet, share_of
from openrnn.kernels.jobs import *
from openrnn.kernels.memory import {dtype}_at as reals
from openrnn.kernels.memory import float64_at, int64_at, no_overlap
from openrnn.kernels.product import dots_{dtype} as dots
from openrnn.kernels.product import product_{dtype} as product
from openrnn.kernels.regions import task_kernel
from openrnn.kernels.rows import copy_{dtype} as copy
from openrnn.kernels.rows import drop_{dtype} as drop
from openrnn.kernels.rows import spread_{dtype} as spread
from openrnn.kernels.rows import ends_reset, is_reset, length_of, row_of, slot_of, time_of
"""
_BACKWARD_IMPORTS = """\
from openrnn.kernels.crew import LINE, meet, share_of
from openrnn.kernels.jobs import *
from openrnn.kernels.layout import STRIP_ELEMENTS, STRIP_ROWS
from openrnn.kernels.memory import {dtype}_at as reals
from openrnn.kernels.memory import float64_at, int64_at, no_overlap
from openrnn.kernels.product import product_{dtype} as product
from openrnn.kernels.regions import task_kernel
from openrnn.kernels.rows import add_{dtype} as add
from openrnn.kernels.rows import copy_{dtype} as copy
from openrnn.kernels.rows import drop_{dtype} as drop
from openrnn.kernels.rows import spread_{dtype} as spread
from openrnn.kernels.rows import ends_reset, is_reset, length_of, row_of, slot_of, time_of
"""


def forward_source(cell: Traced, dtype: str) -> str:
    """The forward kernel of a cell, as one module of numba source; names in it are ours."""
    legend, cell = cell.legend, cell.numbered
    groups = "INITIAL, FRESH, FINAL, EVERY = " + _places(cell, range(4))
    body = groups, _step_rows(cell), cell.summed_step
    return _module(cell, dtype, "forward", legend, *body)


def backward_source(cell: Traced, dtype: str) -> str:
    """The backward kernel of a cell, as one module of numba source; names in it are ours."""
    legend, cell = cell.legend, cell.numbered
    groups = (
        f"INITIAL, FRESH = {_places(cell, range(2))}\n"
        f"D_INITIAL, D_FRESH, D_FINAL, D_EVERY = {_places(cell, range(4, 8))}"
    )
    body = groups, _derivative_row(cell), cell.derivative
    return _module(cell, dtype, "backward", legend, *body)


def kept_sides(cell: Traced) -> tuple[str, ...]:
    """The gates whose recurrent side is kept apart for backward, in order."""
    return tuple(name[2:] for name in cell.kept if name.startswith("r_"))


def all_summed(cell: Traced) -> bool:
    """Whether one row serves both sides of every gate, in forward and of their gradients."""
    return not cell.apart


def _places(cell: Traced, groups: range) -> str:
    count = len(cell.states)
    return ", ".join(f"TAIL + {group * count}" for group in groups)


def _module(
    cell: Traced, dtype: str, kind: str, legend: str, groups: str, row: str, graph: Graph
) -> str:
    imports = _FORWARD_IMPORTS if kind == "forward" else _BACKWARD_IMPORTS
    constants = (
        f"GATES, OTHERS, VECTORS = {len(cell.gates)}, {len(cell.states) - 1}, "
        f"{len(cell.unit_params)}\n"
        f"KEPT, SUMMED, SIZE = {len(kept_sides(cell))}, {all_summed(cell)}, {SIZES[dtype]}\n"
        f'PANEL = PANELS["{dtype}"]\n{groups}'
    )
    ops = {node.op for node in graph.nodes}
    ours = "\n".join(
        f"from openrnn.kernels.elementwise import {name}_{dtype} as {name}"
        for name in sorted(_OURS & ops)
    )
    known = ", ".join(sorted(_MATH & ops | {"inf", "nan"}))
    return (
        f'"""{kind.capitalize()} kernel of cell {cell.name} in {dtype}; '
        f'generated by OpenRNN, do not edit.\n\n{legend}\n"""\n\n'
        f"from math import {known}\n\n"
        f"from numba import {dtype} as real\nfrom numba import njit\n\n"
        f"{ours}\n{imports.format(dtype=dtype)}"
        "from openrnn.kernels.vectors import PANEL as PANELS\n\n"
        f"{constants}\n\n\n{row}\n\n\n{_skeleton(kind)}"
    )


def _skeleton(kind: str) -> str:
    """The time loop: the text of `kernels/<kind>.py` after its sample cell."""
    text = (files("openrnn.kernels") / f"{kind}.py").read_text(encoding="utf-8")
    return "@njit" + "\n\n\n@njit".join(text.split("\n\n\n@njit")[2:])


def _step_rows(cell: Traced) -> str:
    graph = cell.summed_step
    lines: list[str] = []
    apart = not all_summed(cell)
    for place, gate in enumerate(cell.gates):
        at = _at(place)
        if not apart:
            lines.append(f"a_{gate} = x[{at}] + bias[{at}]")
        elif gate in cell.summed:
            lines.append(f"a_{gate} = x[{at}] + bias[{at}] + (r[{at}] + bias_r[{at}])")
            lines.append(f"x[{at}] = a_{gate}")
        else:
            lines.append(f"x_{gate} = x[{at}] + bias[{at}]")
            lines.append(f"r_{gate} = r[{at}] + bias_r[{at}]")
            lines.append(f"x[{at}] = x_{gate}")
    lines += _states_before(cell, graph)
    lines += map(_line, graph.nodes)
    lines += [f"kept[{_at(k)}] = r_{gate}" for k, gate in enumerate(kept_sides(cell))]
    for place, state in enumerate(cell.states):
        target = "h_after[j]" if place == 0 else f"after[{_at(place - 1)}]"
        lines.append(f"{target} = {_text(graph.outputs[state])}")
    return _function("step_rows", STEP_ROWS, "New states of a row.", lines)


def _derivative_row(cell: Traced) -> str:
    graph = cell.derivative
    reads = graph.reads
    lines: list[str] = []
    bias = " + bias[{at}]" if all_summed(cell) else ""
    for place, gate in enumerate(cell.gates):
        for name in (f"a_{gate}", f"x_{gate}"):
            if name in reads:
                at = _at(place)
                lines.append(f"{name} = x[{at}]" + bias.format(at=at))
    for place, gate in enumerate(kept_sides(cell)):
        lines.append(f"r_{gate} = r[{_at(place)}]")
    lines += _states_before(cell, graph)
    for place, state in enumerate(cell.states):
        if f"d_{state}" in reads:
            source = "d_h_after[j]" if place == 0 else f"d_after[{_at(place - 1)}]"
            lines.append(f"d_{state} = {source}")
    lines += map(_line, graph.nodes)
    apart = not all_summed(cell)
    for place, gate in enumerate(cell.gates):
        both = graph.outputs.get(f"da_{gate}")
        at = _at(place)
        right = graph.outputs[f"dr_{gate}"] if both is None else both
        lines.append(f"dr[{at}] = {_text(right)}")
        if apart:
            left = graph.outputs[f"dx_{gate}"] if both is None else both
            lines.append(f"dx[{at}] = {_text(left)}")
    for place, state in enumerate(cell.states):
        target = "d_h_before[j]" if place == 0 else f"d_before[{_at(place - 1)}]"
        lines.append(f"{target} = {_text(graph.outputs[f'ds_{state}'])}")
    for place, name in enumerate(cell.unit_params):
        lines.append(f"d_vectors[{_at(place)}] += {_text(graph.outputs[f'dp_{name}'])}")
    doc = "Gradients of gates, previous states and per-unit vectors of a row."
    return _function("derivative_rows", DERIVATIVE_ROWS, doc, lines)


def _states_before(cell: Traced, graph: Graph) -> list[str]:
    lines = []
    for place, state in enumerate(cell.states):
        if f"s_{state}" in graph.reads:
            source = "h_before[j]" if place == 0 else f"before[{_at(place - 1)}]"
            lines.append(f"s_{state} = {source}")
    for place, name in enumerate(cell.unit_params):
        if f"p_{name}" in graph.reads:
            lines.append(f"p_{name} = vectors[{_at(place)}]")
    return lines


def _function(name: str, arguments: dict[str, str], doc: str, lines: list[str]) -> str:
    """A function of one row, and one that calls it for some rows."""
    shapes = "\n".join(f"    {at},  # {shape}" for at, shape in arguments.items())
    body = "\n".join(f"        {line}" for line in lines)
    head = ", ".join(("rows", "units", "stride", *(f"{at}_at, {at}_row" for at in arguments)))
    pointers = ",\n            ".join(f"reals({at}_at + row * {at}_row * SIZE)" for at in arguments)
    jit = '@njit(nogil=True, error_model="numpy", fastmath={"contract"})\n'
    return (
        f'{jit}def {name[:-1]}(\n    units,\n    stride,\n{shapes}\n):\n    """{doc}"""\n'
        f"    no_overlap()\n    for j in range(units):\n{body}\n\n\n"
        f"{jit}def {name}(\n    {head}\n):\n"
        f"    for row in range(rows):\n        {name[:-1]}(\n            units,\n"
        f"            stride,\n            {pointers},\n        )"
    )


def _at(place: int) -> str:
    return ("j", "stride + j")[place] if place < 2 else f"{place} * stride + j"


def _text(value: Value) -> str:
    # a bare number would be a float64 to numba and widen all it meets
    return value if isinstance(value, str) else f"real({value!r})"


def _line(node: Node) -> str:
    args = [_text(arg) for arg in node.args]
    if node.op in _INFIX:
        said = f"{args[0]} {_INFIX[node.op]} {args[1]}"
    elif node.op == "where":
        said = f"{args[1]} if {args[0]} else {args[2]}"
    elif node.op == "neg":
        said = f"-{args[0]}"
    elif node.op == "not":
        said = f"not {args[0]}"
    elif node.op == "reciprocal":
        said = f"real(1.0) / {args[0]}"
    elif node.op == "sign":
        said = f"real({args[0]} > 0) - real({args[0]} < 0)"
    else:
        said = f"{node.op}({', '.join(args)})"
    return f"{node.name} = {said}"
