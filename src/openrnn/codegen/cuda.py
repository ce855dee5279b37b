"""Graph -> CUDA C++: a cell's step and derivative as device functions of the time loops.

A kernel's source is constants, then the text of `kernels/cuda/<kind>.cuh` with its includes and the
cell's functions in place. No include file is needed to compile it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files

from openrnn.codegen.bounds import half_operands
from openrnn.codegen.cluster_stack_config import ClusterStackConfig, ClusterStackForwardConfig
from openrnn.codegen.config import (
    SIZES,
    BackwardConfig,
    ForwardConfig,
    KernelConfig,
    saved_names,
)
from openrnn.codegen.graph import TRUTHS, Graph, Node, Value, factored
from openrnn.codegen.multicast_config import MulticastConfig
from openrnn.codegen.step_config import WARPS, StepConfig
from openrnn.codegen.trace import Traced
from openrnn.kernels.cuda.args import LOOPS, PLAIN, STEPS
from openrnn.kernels.cuda.table import Args
from openrnn.memo import memo

PLAIN_THREADS = 256  # of a block of a kernel that no cell changes
PERMUTE_TILE = 64  # rows and columns that a block of permute_weights.cuh moves
NARROWED = 8  # values that a thread of narrow_values.cuh takes
# what kernels that take sizes as arguments have in place of the constants of a time loop
_ANY_SIZE = {"CLUSTER": 1, "UNITS": 8, "LOW_REGISTER": False}
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&&", "or": "||",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_NAMES = {
    "sigmoid": "logistic", "sigmoid_of_half": "logistic_of_half", "tanh": "hyperbolic",
    "abs": "fabsf",
    "exp": "exponential", "expm1": "expm1f", "log": "logf", "log1p": "log1pf", "sqrt": "sqrtf",
    "round": "rintf", "sin": "sine", "cos": "cosine", "tan": "tangent",
    **{
        name: f"{name}f"
        for name in (
            "log2 log10 asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc "
            "lgamma pow hypot fmod copysign floor ceil trunc"
        ).split()
    },
}  # fmt: skip


def planes(cell: Traced) -> tuple[str, ...]:
    """The gate gradients in the order of memory: input sides, both in one, recurrent sides.

    So the gradients of the input side are the first `len(cell.gates)` planes, and those of the
    recurrent side the last.
    """
    alone = cell.split_gates
    shared = [f"da_{gate}" for gate in cell.gates if gate not in alone]
    return (*(f"dx_{g}" for g in alone), *shared, *(f"dr_{g}" for g in alone))


@memo(256)
def halved_gates(cell: Traced, dtype: str) -> frozenset[str]:
    """Gates whose pre-activation is stored halved: in 16 bits those that only a sigmoid reads.

    A sigmoid of 16 bits is computed as (1 + tanh(a / 2)) / 2.
    """
    if SIZES[dtype] != 2:
        return frozenset()
    users = [*cell.summed_step.nodes, *cell.derivative.nodes]
    outputs = {*cell.summed_step.outputs.values(), *cell.derivative.outputs.values()}
    return frozenset(
        gate for gate in cell.summed
        if f"a_{gate}" not in outputs
        and all(node.op == "sigmoid" for node in users if f"a_{gate}" in node.args)
    )  # fmt: skip


def _accumulated_halved(cell: Traced, dtype: str, config: KernelConfig) -> frozenset[str]:
    """Gates of which a forward kernel halves R, inputs and biases, instead of the pre-activation.

    None in a grid, whose step is bound by the way through L2, and none with wgmma, whose step is
    bound by shared memory: there it saves no time and takes more registers. None where a GEMM
    multiplies R.
    """
    through_l2 = config.is_cooperative and not isinstance(config, ClusterStackForwardConfig)
    plain = config.kind == "backward" or through_l2 or config.wgmma or config.stepwise
    return frozenset() if plain else halved_gates(cell, dtype)


def _half_names(cell: Traced, dtype: str) -> dict[str, str]:
    """The names of halved pre-activations, by the names of the whole ones."""
    return {f"a_{gate}": f"half_{gate}" for gate in halved_gates(cell, dtype)}


def _reading_halves(graph: Graph, half: Mapping[str, str]) -> Graph:
    """The graph with sigmoids that read halved pre-activations, where `half` names them."""
    nodes = tuple(
        Node(node.name, "sigmoid_of_half", node.args) if half.keys() & set(node.args) else node
        for node in graph.nodes
    )
    return Graph(graph.inputs, nodes, graph.outputs).renamed(
        lambda value: half.get(value, value) if isinstance(value, str) else value
    )


def source(cell: Traced, dtype: str, config: KernelConfig) -> str:
    """The CUDA source of a cell's kernel; its function is called `config.kind`."""
    config, legend, cell = config.as_compiled, cell.legend, cell.numbered
    given = _accumulated_halved(cell, dtype, config)
    constants = {
        **_cell_constants(cell, dtype),
        "SCALED": sum(1 << cell.gates.index(gate) for gate in given),
        "SLOT_BYTES": config.slot_bytes(cell, dtype), "SHARED_GIVEN": config.shared(cell, dtype),
        **_constants(config),
    }  # fmt: skip
    if config.kind == "backward":
        constants["FACTORS"] = len(derivative_parts(cell)[0].outputs)
    if isinstance(config, ClusterStackConfig):
        constants["INPUT_REGISTER_FRAGMENTS"] = config.input_register_fragments(cell, dtype)
        constants["POLLS_GIVEN"] = config.polls(cell, dtype)
        constants["POLLS_IN_FLIGHT"] = config.polls_in_flight(cell, dtype)
    if isinstance(config, MulticastConfig):
        memory = config.flag_buffer(cell, 1, config.rows)
        constants["PARTS_IN_CLUSTER"] = config.parts_in_cluster
        constants["FLAG_ROWS_GIVEN"] = memory.shape[1]
        constants["FILLED_ROWS_GIVEN"] = memory.filled
    lines = _head(config.kind, cell, dtype, legend)
    lines += _defined(constants)
    lines += ["#ifndef SPIN_LIMIT\n#define SPIN_LIMIT 0\n#endif"]
    lines += _wgmma(dtype, config) if config.wgmma else []
    if config.kind == "forward":
        function = step_function(cell, dtype, given)
    else:
        function = derivative_functions(cell, dtype)
    return "\n".join(lines) + "\n\n" + _expanded(config.skeleton, LOOPS[config.kind], function)


def step_source(cell: Traced, dtype: str, config: StepConfig) -> str:
    """The CUDA source of the kernel of a single step; its function is called `config.kind`."""
    legend, cell = cell.legend, cell.numbered
    constants = {
        **_cell_constants(cell, dtype), **_ANY_SIZE,
        "FACTORS": len(derivative_parts(cell)[0].outputs),
        "TILES": config.tiles, "WARPS": WARPS, "UNIT_GROUPS": config.unit_groups,
        "STAGES": config.stages, "SHARED_GIVEN": config.shared(len(cell.gates)),
    }  # fmt: skip
    lines = _head(config.kind, cell, dtype, legend) + _defined(constants)
    if config.kind == "step_backward":
        function = derivative_functions(cell, dtype)
    else:
        function = step_function(cell, dtype, frozenset())
    expanded = _expanded(f"{config.kind}.cuh", STEPS[config.kind], function)
    return "\n".join(lines) + "\n\n" + expanded


def _head(kind: str, cell: Traced, dtype: str, legend: str) -> list[str]:
    title = f"{kind} kernel of cell {cell.name} in {dtype}, generated by OpenRNN"
    return [f"// {title}", f"// {legend}"]


def _cell_constants(cell: Traced, dtype: str) -> dict[str, int]:
    """The constants of a cell and a dtype."""
    return {
        **_numbers(dtype),
        "GATES": len(cell.gates), "STATES": len(cell.states), "VECTORS": len(cell.unit_params),
        "ACTIVATIONS": len(saved_names(cell)), "PLANES": len(planes(cell)),
        "SUMMED": sum(1 << place for place, gate in enumerate(cell.gates) if gate in cell.summed),
    }  # fmt: skip


def _constants(config: KernelConfig) -> dict[str, int]:
    """The fields of a configuration under their names in `kernels/cuda/`."""
    names = {field.name: field.name.upper() for field in fields(config)}
    names["groups"] = f"GROUPS_OF_{config.groups_of.upper()}"
    names.pop("delay", None)  # an argument of the kernel
    return {constant: getattr(config, name) for name, constant in names.items()}


def _numbers(dtype: str) -> dict[str, int]:
    """The constants of a dtype, and zeros for what only some configurations define."""
    return {
        "BFLOAT": dtype == "bfloat16", "NARROW": SIZES[dtype] == 2, "HALF_OPERANDS": False,
        "PADDED": False, "SCALED": 0, "LAYERS": 1, "STREAMED_FRAGMENTS": 0,
        "INPUT_REGISTER_FRAGMENTS": 0,
    }  # fmt: skip


def _defined(constants: Mapping[str, int]) -> list[str]:
    return [f"#define {name} {int(value)}" for name, value in constants.items()]


def _wgmma(dtype: str, config: KernelConfig) -> list[str]:
    """Macros of the wgmma instruction, whose number of operands depends on the tiles."""
    narrow = config.operand_bytes(dtype) == 2
    kind = "bf16" if dtype == "bfloat16" else "f16" if narrow else "tf32"
    count = 4 * config.tiles  # sums of a lane
    names = [f"%{place}" for place in range(count + 5)]
    bound = [f'"+f"(sums[{n}][0][{place}])' for n in range(config.tiles) for place in range(4)]
    signs = ", 1, 1, 1"  # accumulate; neither a nor b is negated
    return [
        f'#define WGMMA_SHAPE "m64n{8 * config.tiles}k{16 if narrow else 8}.f32.{kind}.{kind}"',
        f'#define WGMMA_SUMS "{{{", ".join(names[:count])}}}"',
        f"#define WGMMA_BOUND(sums) {', '.join(bound)}",
        f'#define WGMMA_REGISTERS "{{{", ".join(names[count : count + 4])}}}, {names[count + 4]}"',
        f'#define WGMMA_SHARED "{names[count]}, {names[count + 1]}"',
        # 16 bits only: neither is transposed
        f'#define WGMMA_SIGNS_REGISTERS "{signs}{", 0" if narrow else ""}"',
        f'#define WGMMA_SIGNS_SHARED "{signs}{", 0, 0" if narrow else ""}"',
    ]


def plain_source(name: str, dtype: str, structs: int = 1) -> str:
    """A kernel that no cell changes, such as "dropout".

    Args:
        structs: of arguments, with blocks for each; not all kernels take several.
    """
    constants = {
        **_numbers(dtype), **_ANY_SIZE, "BLOCK_THREADS": PLAIN_THREADS, "TILE": PERMUTE_TILE,
        "NARROWED": NARROWED, "STRUCTS": structs,
    }  # fmt: skip
    return "\n".join([*_defined(constants), _expanded(f"{name}.cuh", PLAIN[name])])


def examples(cell: Traced, dtype: str) -> tuple[str, str]:
    """Both kernels of a cell, for a hidden size of 256 and with nothing optional."""
    half = half_operands(cell, dtype)
    forward = ForwardConfig(256, 8, 4, 1, 1, 1, 0, half_operands=half)
    backward = BackwardConfig(256, 8, 4, 4, 1, 1, 0)
    return source(cell, dtype, forward), source(cell, dtype, backward)


_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)


@memo(32)
def _text(name: str) -> str:
    return (files("openrnn.kernels.cuda") / name).read_text(encoding="utf-8")


def _expanded(name: str, args: type[Args], function: str = "") -> str:
    """A kernel with its includes in place.

    Its arguments and the cell's function follow `device.cuh`, whose types and functions they use.
    """

    def included(found: re.Match[str]) -> str:
        text = re.sub(_INCLUDE, included, _text(found[1]))
        return f"{text}\n{args.struct()}\n\n{function}" if found[1] == "device.cuh" else text

    return re.sub(_INCLUDE, included, _text(name))


def step_function(cell: Traced, dtype: str, given: frozenset[str]) -> str:
    """The function `step`: new states of one unit in one row, and its saved activations.

    Where the cell reads only a gate's sum, `r` is that sum; halved for gates in `given`.
    """
    half = _half_names(cell, dtype)
    graph = _reading_halves(cell.summed_step, half)
    reads = graph.reads | set(saved_names(cell))
    lines: list[str] = []
    for place, gate in enumerate(cell.gates):
        if gate in cell.summed:
            name = f"a_{gate}"
            factor = "0.5f * " if name in half and gate not in given else ""
            lines.append(f"const float {half.get(name, name)} = {factor}r[{place}];")
        else:
            sides = [side for side in "xr" if f"{side}_{gate}" in reads]
            lines += [f"const float {side}_{gate} = {side}[{place}];" for side in sides]
    lines += _states_before(cell, reads) + [_line(node) for node in graph.nodes]
    for place, state in enumerate(cell.states):
        lines.append(f"after[{place}] = {_value(graph.outputs[state])};")
    lines += [
        f"saved[{place}] = {half.get(name, name)};" for place, name in enumerate(saved_names(cell))
    ]
    return _function(
        "new states", "step",
        ("const float (&x)[GATES]", "const float (&r)[GATES]", "const float (&before)[STATES]",
         "const float (&vectors)[VECTORS + 1]", "float (&after)[STATES]",
         "float (&saved)[ACTIVATIONS + 4]"),
        lines,
    )  # fmt: skip


@memo(256)
def derivative_parts(cell: Traced) -> tuple[Graph, Graph]:
    """The derivative in two graphs: factors known before the states' gradients, and the rest."""
    gradients = frozenset(f"d_{state}" for state in cell.states)
    return factored(cell.derivative, gradients).split(gradients)


def derivative_functions(cell: Traced, dtype: str) -> str:
    """Two functions: gradients of gates, previous states and per-unit vectors of a unit in a row.

    `factors` reads saved activations alone; `derivative` its results and gradients of states.
    """
    half = _half_names(cell, dtype)
    early, late = derivative_parts(cell)
    early = _reading_halves(early, half)
    lines = [
        f"const float {half.get(name, name)} = saved[{place}];"
        for place, name in enumerate(saved_names(cell))
    ]
    for place, name in enumerate(cell.unit_params):
        if f"p_{name}" in early.reads:
            lines.append(f"const float p_{name} = vectors[{place}];")
    lines += [_line(node) for node in early.nodes]
    lines += [f"factor[{place}] = {name};" for place, name in enumerate(early.outputs)]
    factors = _function(
        "what gradients need of the step", "factors",
        ("const float (&saved)[ACTIVATIONS + 4]", "const float (&vectors)[VECTORS + 1]",
         "float (&factor)[FACTORS + 1]"),
        lines,
    )  # fmt: skip
    truths = {node.name for node in early.nodes if node.op in TRUTHS}
    lines = [
        f"const bool {name} = factor[{place}] != 0.0f;" if name in truths
        else f"const float {name} = factor[{place}];"
        for place, name in enumerate(early.outputs)
    ]  # fmt: skip
    for place, state in enumerate(cell.states):
        if f"d_{state}" in late.reads:
            lines.append(f"const float d_{state} = d_after[{place}];")
    lines += [_line(node) for node in late.nodes]
    for place, name in enumerate(planes(cell)):
        lines.append(f"d_gates[{place}] = {_value(late.outputs[name])};  // {name}")
    for place, state in enumerate(cell.states):
        lines.append(f"d_before[{place}] = {_value(late.outputs[f'ds_{state}'])};")
    for place, name in enumerate(cell.unit_params):
        lines.append(f"d_vectors[{place}] = {_value(late.outputs[f'dp_{name}'])};")
    return factors + _function(
        "gradients of gates, previous states and per-unit vectors", "derivative",
        ("const float (&factor)[FACTORS + 1]", "const float (&d_after)[STATES]",
         "float (&d_gates)[PLANES]", "float (&d_before)[STATES]",
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
    return f"const {'bool' if node.op in TRUTHS else 'float'} {node.name} = {said};"
