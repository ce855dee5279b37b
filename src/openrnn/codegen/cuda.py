"""Graph -> CUDA C++: a cell's step and derivative as device functions under the time loops.

A kernel's source is constants, then the text of `kernels/<kind>.cuh` with its includes, the cell's
functions between them: no include file is needed to compile it.
"""

import math
import re
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files

from openrnn.codegen.graph import Node, Value
from openrnn.codegen.trace import Traced

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&&", "or": "||",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_TRUTHS = frozenset("eq ne lt le gt ge and or not".split())
_NAMES = {
    "sigmoid": "logistic", "tanh": "hyperbolic", "reciprocal": "inverse_of", "abs": "fabsf",
    "exp": "exponential", "expm1": "expm1f", "log": "logf", "log1p": "log1pf", "sqrt": "sqrtf",
    "sin": "sinf", "cos": "cosf", "erf": "erff", "pow": "powf", "floor": "floorf",
}  # fmt: skip


@dataclass(frozen=True)
class Forward:
    """The constants of a forward kernel.

    Args:
        units: H, rounded up to a multiple of 8.
        cluster: blocks that share R; warps: of a block; per_warp: groups of 8 units of a warp.
        tiles: of 8 rows, that one product takes; flight: such products that take turns.
        resident: pieces of R in registers, of a warp; stages: of the ring of inputs.
        lengths, reset, every, keep: what the kernel knows to do.
    """

    units: int
    cluster: int
    warps: int
    per_warp: int
    tiles: int
    flight: int
    resident: int
    stages: int = 4
    lengths: bool = False
    reset: bool = False
    every: bool = False
    keep: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Of the batch, a cluster."""
        return 8 * self.tiles * self.flight


@dataclass(frozen=True)
class Backward:
    """The constants of a backward kernel, where they differ from `Forward`'s.

    Args:
        block_groups: groups of 8 units that a block owns.
        fresh: whether the gradient of the fresh states is wanted.
    """

    units: int
    cluster: int
    warps: int
    block_groups: int
    tiles: int
    flight: int
    resident: int
    stages: int = 4
    lengths: bool = False
    reset: bool = False
    every: bool = False
    fresh: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Of the batch, a cluster."""
        return 8 * self.tiles * self.flight


def kept(cell: Traced) -> tuple[str, ...]:
    """What forward keeps of each cell, in order: sides of gates, then previous states."""
    states = (f"s_{state}" for state in cell.states)
    return (*cell.kept, *(name for name in states if name in cell.derivative.reads))


def record(cell: Traced, dtype: str) -> int:
    """The values of a kept record: pairs where they are 16 bits wide, and never three."""
    count = len(kept(cell))
    return count + (count % 4 == 3 or (SIZES[dtype] == 2 and count % 4 == 1))


def apart(cell: Traced) -> tuple[str, ...]:
    """The gates whose two sides have gradients of their own."""
    return tuple(gate for gate in cell.gates if f"da_{gate}" not in cell.derivative.outputs)


def planes(cell: Traced) -> tuple[str, ...]:
    """The gate gradients in the order of memory: left sides alone, sums, right sides alone.

    So the gradients of each side lie together: the first or the last `len(cell.gates)` planes.
    """
    alone = apart(cell)
    shared = [f"da_{gate}" for gate in cell.gates if gate not in alone]
    return (*(f"dx_{g}" for g in alone), *shared, *(f"dr_{g}" for g in alone))


def forward_source(cell: Traced, dtype: str, how: Forward) -> str:
    """The forward kernel of a cell."""
    names = ("initial", "fresh", "final", "every")
    return _source("forward", cell, dtype, how, _forward_shared(cell, dtype, how), names)


def backward_source(cell: Traced, dtype: str, how: Backward) -> str:
    """The backward kernel of a cell."""
    names = ("d_final", "d_every", "d_initial", "d_fresh")
    return _source("backward", cell, dtype, how, _backward_shared(cell, dtype, how), names)


def plain_source(name: str, dtype: str) -> str:
    """A kernel that no cell changes, such as "dropout"."""
    head = f"#define BFLOAT {int(dtype == 'bfloat16')}\n#define NARROW {int(SIZES[dtype] == 2)}\n"
    return head + "#define CLUSTER 1\n#define UNITS 8\n" + _expanded(f"{name}.cuh", "")


def examples(cell: Traced, dtype: str) -> tuple[str, str]:
    """Both kernels of a cell, with tiles for a hidden size of 256 and nothing optional."""
    forward = Forward(256, 8, 4, 1, 1, 1, 0)
    backward = Backward(256, 8, 4, 4, 1, 1, 0)
    return forward_source(cell, dtype, forward), backward_source(cell, dtype, backward)


def shared_bytes(cell: Traced, dtype: str, how: Forward | Backward) -> int:
    """The shared memory of a block; the kernel checks that it counts the same."""
    if isinstance(how, Forward):
        return _forward_shared(cell, dtype, how)
    return _backward_shared(cell, dtype, how)


def slices(cell: Traced, dtype: str, how: Forward | Backward) -> int:
    """Slices of K, 64 bytes each, that a warp multiplies."""
    wide = 64 // SIZES[dtype]
    if isinstance(how, Forward):
        return -(-how.units // wide)
    return -(-len(cell.gates) * how.block_groups * 8 // wide)


def mma_rows(cell: Traced, how: Forward | Backward) -> int:
    """Products of 16 rows, a warp and a slice."""
    if isinstance(how, Forward):
        return -(-how.per_warp * len(cell.gates) // 2)
    pairs = (how.units + 15) // 16
    return -(-pairs // how.warps)


def pieces(cell: Traced, dtype: str, how: Forward | Backward) -> int:
    """Pieces of R of a warp, each 8 registers of a lane or 1 KiB of shared memory."""
    return slices(cell, dtype, how) * mma_rows(cell, how)


def _matrix_bytes(cell: Traced, dtype: str, how: Forward | Backward) -> int:
    return how.threads // 32 * (pieces(cell, dtype, how) - how.resident) * 1024


def _front(how: Forward | Backward) -> int:
    """Mailboxes and row numbers."""
    return -(-(how.flight * 16 + how.rows * 4) // 128) * 128


def _forward_shared(cell: Traced, dtype: str, how: Forward) -> int:
    hidden = how.flight * 2 * slices(cell, dtype, how) * how.tiles * 512
    stage = how.per_warp * how.tiles * len(cell.gates) * 64 * SIZES[dtype]
    ring = how.warps * how.stages * how.flight * stage
    return _front(how) + hidden + ring + _matrix_bytes(cell, dtype, how)


def _backward_shared(cell: Traced, dtype: str, how: Backward) -> int:
    size = SIZES[dtype]
    gate_rows = how.flight * slices(cell, dtype, how) * how.tiles * 512
    parts = how.cluster * how.tiles * how.block_groups * 256
    slots = -(-how.block_groups * how.tiles // how.warps)
    ring = how.warps * slots * how.stages * how.flight * 64 * (1 + record(cell, dtype)) * size
    matrix = _matrix_bytes(cell, dtype, how)
    return _front(how) + gate_rows + 2 * how.flight * parts + ring + matrix


def _source(
    kind: str,
    cell: Traced,
    dtype: str,
    how: Forward | Backward,
    shared: int,
    names: tuple[str, ...],
) -> str:
    summed = sum(1 << place for place, gate in enumerate(cell.gates) if gate in cell.summed)
    constants = {
        "BFLOAT": dtype == "bfloat16", "NARROW": SIZES[dtype] == 2,
        "GATES": len(cell.gates), "STATES": len(cell.states), "VECTORS": len(cell.unit_params),
        "KEPT": len(kept(cell)), "PLANES": len(planes(cell)), "SUMMED": summed,
        "SHARED_GIVEN": shared,
        **{field.name.upper(): getattr(how, field.name) for field in fields(how)},
    }  # fmt: skip
    lines = [f"// {kind} kernel of cell {cell.name} in {dtype}, generated by OpenRNN"]
    lines += [f"#define {name} {int(value)}" for name, value in constants.items()]
    lines += ["#ifndef PATIENCE\n#define PATIENCE 0\n#endif", _pointers(kind, cell, names)]
    function = step_function(cell) if kind == "forward" else derivative_function(cell)
    return "\n".join(lines) + "\n\n" + _expanded(f"{kind}.cuh", function)


def _pointers(kind: str, cell: Traced, names: tuple[str, ...]) -> str:
    """The pointers to states as arguments by name, and as arrays by number."""
    word = "STATE" if kind == "forward" else "GRADIENT"
    reads = 2  # the first two groups are read, the others written
    arguments, arrays = [], []
    for place, name in enumerate(names):
        constant = "const " if place < reads else ""
        arguments += [f"{constant}stored* {name}_{state}" for state in cell.states]
        listed = ", ".join(f"{name}_{state}" for state in cell.states)
        arrays.append(f"{constant}stored* const {name}[STATES] = {{{listed}}};")
    return (
        f"#define {word}_ARGUMENTS {', '.join(arguments)}\n#define {word}_ARRAYS {' '.join(arrays)}"
    )


@lru_cache(maxsize=16)
def _text(name: str) -> str:
    return (files("openrnn.kernels") / name).read_text(encoding="utf-8")


def _expanded(name: str, function: str) -> str:
    """A skeleton with its includes in place, and the cell's function after what it calls."""

    def included(found: re.Match[str]) -> str:
        text = _text(found[1])
        return f"{text}\n{function}" if found[1] == "device.cuh" else text

    return re.sub(r'^#include "([\w.]+)"$', included, _text(name), flags=re.MULTILINE)


def step_function(cell: Traced) -> str:
    """New states of one unit in one row, and what backward needs of it.

    `r` of a gate of which the cell reads only the sum is that sum.
    """
    graph = cell.summed_step
    reads = graph.reads | set(kept(cell))
    lines: list[str] = []
    for place, gate in enumerate(cell.gates):
        if gate in cell.summed:
            lines.append(f"const float a_{gate} = r[{place}];")
        else:
            sides = [side for side in "xr" if f"{side}_{gate}" in reads]
            lines += [f"const float {side}_{gate} = {side}[{place}];" for side in sides]
    lines += _states_before(cell, reads) + [_line(node) for node in graph.nodes]
    for place, state in enumerate(cell.states):
        lines.append(f"after[{place}] = {_value(graph.outputs[state])};  // {state}")
    lines += [f"kept[{place}] = {name};" for place, name in enumerate(kept(cell))]
    return _function(
        f"{cell.name}: {', '.join(cell.states)} from gates {', '.join(cell.gates)}", "step",
        ("const float (&x)[GATES]", "const float (&r)[GATES]", "const float (&before)[STATES]",
         "const float (&vectors)[VECTORS + 1]", "float (&after)[STATES]",
         "float (&kept)[KEPT + 4]"),
        lines,
    )  # fmt: skip


def derivative_function(cell: Traced) -> str:
    """Gradients of gates, previous states and per-unit vectors of one unit in one row."""
    graph = cell.derivative
    lines = [f"const float {name} = kept[{place}];" for place, name in enumerate(kept(cell))]
    for place, name in enumerate(cell.unit_params):
        if f"p_{name}" in graph.reads:
            lines.append(f"const float p_{name} = vectors[{place}];")
    for place, state in enumerate(cell.states):
        if f"d_{state}" in graph.reads:
            lines.append(f"const float d_{state} = d_after[{place}];")
    lines += [_line(node) for node in graph.nodes]
    for place, name in enumerate(planes(cell)):
        lines.append(f"d_gates[{place}] = {_value(graph.outputs[name])};  // {name}")
    for place, state in enumerate(cell.states):
        lines.append(f"d_before[{place}] = {_value(graph.outputs[f'ds_{state}'])};  // {state}")
    for place, name in enumerate(cell.unit_params):
        lines.append(f"d_vectors[{place}] = {_value(graph.outputs[f'dp_{name}'])};  // {name}")
    return _function(
        f"{cell.name}: gradients of gates and previous states", "derivative",
        ("const float (&kept)[KEPT + 4]", "const float (&vectors)[VECTORS + 1]",
         "const float (&d_after)[STATES]", "float (&d_gates)[PLANES]", "float (&d_before)[STATES]",
         "float (&d_vectors)[VECTORS + 1]"),
        lines,
    )  # fmt: skip


def _states_before(cell: Traced, reads: set[str] | frozenset[str]) -> list[str]:
    lines = [
        f"const float s_{state} = before[{place}];"
        for place, state in enumerate(cell.states)
        if f"s_{state}" in reads
    ]
    return lines + [
        f"const float p_{name} = vectors[{place}];"
        for place, name in enumerate(cell.unit_params)
        if f"p_{name}" in reads
    ]


def _function(title: str, name: str, arguments: tuple[str, ...], lines: list[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    head = ",\n    ".join(arguments)
    return f"// {title}\nINLINE void {name}(\n    {head}\n) {{\n{body}\n}}\n"


def _value(value: Value) -> str:
    if isinstance(value, str):
        return value
    if math.isfinite(value):
        return f"{float(value)!r}f"
    bits = "0x7fc00000" if math.isnan(value) else "0x7f800000" if value > 0 else "0xff800000"
    return f"__int_as_float({bits})"


def _line(node: Node) -> str:
    args = [_value(arg) for arg in node.args]
    if node.op in _INFIX:
        said = f"{args[0]} {_INFIX[node.op]} {args[1]}"
    elif node.op == "where":
        said = f"{args[0]} ? {args[1]} : {args[2]}"
    elif node.op in ("neg", "not"):
        said = f"{'-' if node.op == 'neg' else '!'}{args[0]}"
    else:
        said = f"{_NAMES.get(node.op, node.op)}({', '.join(args)})"
    return f"const {'bool' if node.op in _TRUTHS else 'float'} {node.name} = {said};"
