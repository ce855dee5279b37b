"""Cell -> elementwise graphs of a step and of its derivative, and what backward must keep.

Inputs are named by role: `x_i` and `r_i` (the two sides of gate i), `a_i` (their sum, where the
cell reads nothing else), `s_c` (previous state), `p_f` (per-unit parameter), `d_c` (gradient of
the new state c). Outputs of the step are named like the states, those of the derivative `dx_i`,
`dr_i` (one of them, `da_i`, where both are the same), `ds_c`, `dp_f`.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from openrnn.codegen.aten import RULES, decompositions, known, name_of
from openrnn.codegen.graph import Builder, Graph, Value
from openrnn.errors import CellError

if TYPE_CHECKING:
    from openrnn.cells import Cell

SHAPE = (2, 3)
Clip = tuple[float, float] | None


@dataclass(frozen=True, eq=False)
class Traced:
    """A cell as graphs.

    Args:
        step: new states from x_*, r_*, s_*, p_*; summed_step the same from a_* where possible.
        derivative: da_* or dx_* and dr_*, ds_*, dp_* from what `kept` names, s_*, p_*, d_*.
        kept: the gate inputs that the derivative reads and forward keeps, `a_i` or `x_n`, `r_n`.
        summed: the gates of which the cell reads only x + r.
    """

    name: str
    gates: tuple[str, ...]
    states: tuple[str, ...]
    unit_params: tuple[str, ...]
    step: Graph
    summed_step: Graph
    derivative: Graph
    kept: tuple[str, ...]
    summed: frozenset[str]


def trace(cell: "Cell", clip: Clip = None) -> Traced:
    """Traces a cell, with `clip` applied where it clips.

    Raises:
        CellError: the function is not elementwise, or cannot be traced; the message names the
            operator and the line.
    """
    with _LOCK:
        return _trace_once(cell, clip)


def check_elementwise(cell: "Cell") -> None:
    """Runs a cell once on small tensors.

    Raises:
        CellError: it calls something that is not elementwise, or a new state changes its shape.
    """
    with _LOCK:
        _check_once(cell)


_LOCK = Lock()
Result = TypeVar("Result")


def _apart(function: Callable[..., Result], *args: object) -> Result:
    # a thread of its own has none of the modes, fake tensors and switched-off keys of its caller,
    # which may be a compiler in the middle of an operator
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(function, *args).result()


@lru_cache(maxsize=256)
def _trace_once(cell: "Cell", clip: Clip) -> Traced:
    return _apart(_trace, cell, clip)


@lru_cache(maxsize=256)
def _check_once(cell: "Cell") -> None:
    _apart(_check, cell, _step(cell, None), _examples(len(_names(cell))))


def _names(cell: "Cell") -> tuple[str, ...]:
    return (
        *(f"x_{gate}" for gate in cell.gates),
        *(f"r_{gate}" for gate in cell.gates),
        *(f"s_{state}" for state in cell.states),
        *(f"p_{param}" for param in cell.unit_params),
    )


def _examples(count: int) -> list[Tensor]:
    return [torch.full(SHAPE, 0.5, dtype=torch.float32, device="cpu") for _ in range(count)]


def _step(cell: "Cell", clip: Clip) -> Callable[..., tuple[Tensor, ...]]:
    count, states = len(cell.gates), len(cell.states)

    def bound(c: Tensor) -> Tensor:
        return c if clip is None else torch.clamp(c, min=clip[0], max=clip[1])

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        x, r, rest = flat[:count], tuple(flat[count : 2 * count]), flat[2 * count :]
        return cell.step(x, r, rest[:states], rest[states:], bound)

    return step


def _trace(cell: "Cell", clip: Clip) -> Traced:
    if cell.dependent_product:
        raise CellError(f"cell '{cell.name}' has two dependent products a step and no single graph")
    gates, states, params = cell.gates, cell.states, cell.unit_params
    names, step = _names(cell), _step(cell, clip)

    def derivative(*flat: Tensor) -> tuple[Tensor, ...]:
        pullback: Any = torch.func.vjp(step, *flat[: len(names)])[1]
        grads: tuple[Tensor, ...] = pullback(tuple(flat[len(names) :]))
        return grads

    examples = _examples(len(names) + len(states))
    _check(cell, step, examples[: len(names)])
    forward = _graph(cell, step, names, states, examples)
    cotangents = tuple(f"d_{state}" for state in states)
    grads = tuple(f"d{name}" for name in names)
    backward = _graph(cell, derivative, names + cotangents, grads, examples)

    summed = frozenset(gate for gate in gates if _only_sum(forward, gate))
    backward = _with_sums(backward, summed)
    outputs = dict(backward.outputs)
    for gate in gates:
        if gate in summed and outputs[f"dx_{gate}"] == outputs[f"dr_{gate}"]:
            outputs[f"da_{gate}"] = outputs.pop(f"dx_{gate}")
            del outputs[f"dr_{gate}"]
    backward = Graph(backward.inputs, backward.nodes, outputs).pruned()
    kept = tuple(name for name in backward.inputs if name[0] in "axr" and name in backward.reads)
    apart = _with_sums(forward, summed)
    return Traced(cell.name, gates, states, params, forward, apart, backward, kept, summed)


def _graph(
    cell: "Cell",
    function: Callable[..., tuple[Tensor, ...]],
    names: tuple[str, ...],
    outputs: tuple[str, ...],
    examples: list[Tensor],
) -> Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(function, decomposition_table=decompositions())(*examples[: len(names)])
    emit = Builder(names)
    values: dict[Any, Any] = {}

    def value(arg: object) -> object:
        if isinstance(arg, torch.fx.Node):
            return values[arg]
        return float(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else arg

    inputs = iter(names)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = _constant(cell, node, getattr(traced, str(node.target)))
        elif node.op == "output":
            results = node.args[0]
        elif node.target.__name__ == "getitem":
            values[node] = values[node.args[0]][node.args[1]]
        else:
            rule = RULES.get(name_of(node.target))
            if rule is None:
                word = str(node.target).rsplit(".", 1)[0]
                raise CellError(f"cell '{cell.name}': no kernel knows {word} (codegen/aten.py)")
            kwargs = {key: value(arg) for key, arg in node.kwargs.items()}
            values[node] = rule(emit, *map(value, node.args), **kwargs)
    return emit.graph({name: _value(values[node]) for name, node in zip(outputs, results)})


def _constant(cell: "Cell", node: torch.fx.Node, tensor: Tensor) -> float:
    """The number of a tensor that the cell makes; one from outside could change, or be trained."""
    shape = tuple(tensor.shape)
    if not all("lift_fresh" in str(user.target) for user in node.users):
        raise CellError(
            f"cell '{cell.name}' reads a tensor of shape {shape} from outside: pass it as a "
            "per-unit parameter (params=), or as a number, which a kernel keeps as it is"
        )
    if tensor.numel() != 1:
        raise CellError(f"cell '{cell.name}': a tensor of shape {shape} is no constant")
    return float(tensor.item())


def _value(found: object) -> Value:
    if not isinstance(found, (str, float)):
        raise TypeError(f"a traced output must be one value, got {found!r}")
    return found


def _only_sum(step: Graph, gate: str) -> bool:
    sides = {f"x_{gate}", f"r_{gate}"}
    users = [node for node in step.nodes if sides & set(node.args)]
    return (
        len(users) == 1
        and users[0].op == "add"
        and set(users[0].args) == sides
        and not sides & set(step.outputs.values())
    )


def _with_sums(graph: Graph, summed: frozenset[str]) -> Graph:
    """Replaces x_i + r_i by the input a_i."""
    replaced: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        gate = str(node.args[0])[2:] if node.op == "add" else ""
        if gate in summed and set(node.args) == {f"x_{gate}", f"r_{gate}"}:
            replaced[node.name] = f"a_{gate}"
        else:
            nodes.append(node)
    for gate in summed:
        replaced[f"x_{gate}"] = replaced[f"r_{gate}"] = f"a_{gate}"

    def rename(value: Value) -> Value:
        return replaced.get(value, value) if isinstance(value, str) else value

    return Graph(graph.inputs, tuple(nodes), graph.outputs).renamed(rename)


class _Watch(TorchDispatchMode):
    """Refuses, by name and line, what is not elementwise."""

    def __init__(self, cell: "Cell") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.cell = cell
        self.decomposed = decompositions()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not known(func) and not self._pointwise(func):
            word = str(func).rsplit(".", 1)[0]
            raise CellError(f"cell '{self.cell.name}': {word} is not elementwise{self._line()}")
        return func(*args, **(kwargs or {}))

    def _pointwise(self, func: Any) -> bool:
        return torch.Tag.pointwise in func.tags and func in self.decomposed

    def _line(self) -> str:
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code is self.cell.function.__code__:
                return f" (line {frame.f_lineno})"
            frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
        return ""


def _check(cell: "Cell", step: Callable[..., tuple[Tensor, ...]], examples: list[Tensor]) -> None:
    with torch.no_grad(), _Watch(cell):
        new = step(*(example.clone() for example in examples))
    for state, value in zip(cell.states, new):
        if tuple(value.shape) != SHAPE:
            raise CellError(
                f"cell '{cell.name}': new state {state} must keep the shape {SHAPE} of its inputs, "
                f"got {tuple(value.shape)}"
            )
