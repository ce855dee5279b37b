"""Cell -> elementwise graphs of a step and of its derivative, and what forward saves for backward.

Inputs are named by role: `x_i` and `r_i` (the two sides of gate i), `a_i` (their sum, where the
cell reads nothing else), `s_c` (previous state), `p_f` (per-unit parameter), `d_c` (gradient of
the new state c). Outputs of the step are named like the states, those of the derivative `dx_i`,
`dr_i` (one of them, `da_i`, where both are the same), `ds_c`, `dp_f`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrnn import fresh
from openrnn.codegen.aten import decompositions
from openrnn.codegen.check import SHAPE, Clip, check_elementwise, examples, names_of, step_of
from openrnn.codegen.graph import Graph, Value
from openrnn.codegen.kept import kept
from openrnn.codegen.reader import read
from openrnn.errors import CellError
from openrnn.memo import memo

if TYPE_CHECKING:
    from openrnn.cells import Cell

# of examples that must give the same graphs as those of SHAPE and float32
_OTHER_SHAPE, _OTHER_DTYPE = (3, 5), torch.float64


@dataclass(frozen=True, eq=False)
class Traced:
    """A cell as graphs.

    Args:
        step: new states from x_*, r_*, s_*, p_*; summed_step the same from a_* where possible.
        derivative: da_* or dx_* and dr_*, ds_*, dp_* from what `saved` names, s_*, p_*, d_*.
        saved: the gate inputs that forward saves for the derivative, `a_i` or `x_n`, `r_n`.
        summed: the gates of which cell and derivative read only x + r; their gradients may differ.
        no_float64_reason: why no kernel of float64 is right, or None.
    """

    name: str
    gates: tuple[str, ...]
    states: tuple[str, ...]
    unit_params: tuple[str, ...]
    step: Graph
    summed_step: Graph
    derivative: Graph
    saved: tuple[str, ...]
    summed: frozenset[str]
    no_float64_reason: str | None = None

    @cached_property
    def split_gates(self) -> tuple[str, ...]:
        """The gates whose two sides have gradients of their own."""
        outputs = self.derivative.outputs
        return tuple(gate for gate in self.gates if f"da_{gate}" not in outputs)

    @cached_property
    def legend(self) -> str:
        """The names behind the numbers of `numbered`, harmless in any comment."""
        kinds = (("gates", self.gates), ("states", self.states), ("vectors", self.unit_params))
        return "; ".join(
            f"{kind} {', '.join(f'{n} {_harmless(name)}' for n, name in enumerate(names))}"
            for kind, names in kinds
            if names
        )

    @cached_property
    def numbered(self) -> "Traced":
        """The trace with numbers for the user's names, which generated source must not hold."""
        inputs: dict[str, str] = {}
        outputs: dict[str, str] = {}
        for names, reads, gives in (
            (self.gates, "x r a", "dx dr da"),
            (self.states, "s d", "ds"),
            (self.unit_params, "p", "dp"),
        ):
            inputs |= _numbered(names, reads.split())
            outputs |= _numbered(names, gives.split())
        states = {name: str(n) for n, name in enumerate(self.states)}
        return replace(
            self,
            name=_harmless(self.name),
            gates=_numbers(self.gates), states=_numbers(self.states),
            unit_params=_numbers(self.unit_params),
            step=self.step.named(inputs, states),
            summed_step=self.summed_step.named(inputs, states),
            derivative=self.derivative.named(inputs, outputs),
            saved=tuple(inputs[name] for name in self.saved),
            summed=frozenset(str(self.gates.index(gate)) for gate in self.summed),
        )  # fmt: skip


def _numbers(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(str, range(len(names))))


def _numbered(names: tuple[str, ...], kinds: Iterable[str]) -> dict[str, str]:
    return {f"{kind}_{name}": f"{kind}_{n}" for kind in kinds for n, name in enumerate(names)}


def _harmless(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z_.@-]", "_", name)


def trace(cell: "Cell", clip: Clip = None) -> Traced:
    """Traces a cell, with `clip` applied where it clips.

    Raises:
        CellError: the function is not elementwise, or cannot be traced; the message names the
            operator and the line.
    """
    with _LOCK:
        found = _trace_once(cell, clip)
    if isinstance(found, str):
        raise CellError(found)
    return found


_LOCK = Lock()


@memo(256)
def _trace_once(cell: "Cell", clip: Clip) -> Traced | str:
    """A trace, or why there is none: both are asked for at every report."""
    if cell.dependent_product:
        return f"cell '{cell.name}' has two dependent products a step and no single graph"
    if _is_ours(cell):
        found: Traced = kept(_identity(cell, clip), lambda: fresh.run(_trace, cell, clip), Traced)
        return found
    check_elementwise(cell)
    try:
        return fresh.run(_trace, cell, clip)
    except CellError as error:
        return str(error)


def _trace(cell: "Cell", clip: Clip) -> Traced:
    gates = cell.gates
    forward, backward = _graphs(cell, clip, SHAPE, torch.float32)
    no_float64_reason = None if _is_ours(cell) else _compare(cell, clip, (forward, backward))

    summed = frozenset(
        gate for gate in gates if _only_sum(forward, gate) and _only_sum(backward, gate, 0)
    )
    backward = _with_sums(backward, summed)
    outputs = dict(backward.outputs)
    for gate in gates:
        if gate in summed and outputs[f"dx_{gate}"] == outputs[f"dr_{gate}"]:
            outputs[f"da_{gate}"] = outputs.pop(f"dx_{gate}")
            del outputs[f"dr_{gate}"]
    backward = Graph(backward.inputs, backward.nodes, outputs).pruned()
    saved = tuple(name for name in backward.inputs if name[0] in "axr" and name in backward.reads)
    return Traced(
        cell.name, gates, cell.states, cell.unit_params, forward, _with_sums(forward, summed),
        backward, saved, summed, no_float64_reason,
    )  # fmt: skip


def _is_ours(cell: "Cell") -> bool:
    return cell.function.__module__ == "openrnn.cells"


def _identity(cell: "Cell", clip: Clip) -> str:
    """What a trace of our function depends on, beside sources: others may register it, too."""
    names = cell.name, cell.function.__qualname__, cell.gates, cell.states, cell.unit_params
    return repr((*names, cell.takes_clip, clip))


def _graphs(
    cell: "Cell", clip: Clip, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Graph, Graph]:
    """The step and its derivative, as traced with examples of this shape and dtype."""
    names, step = names_of(cell), step_of(cell, clip)

    def both(*flat: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in flat[: len(names)]]
        new = step(*leaves)
        pairs = [(value, d) for value, d in zip(new, flat[len(names) :]) if value.requires_grad]
        grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if pairs:
            values, ds = zip(*pairs)
            grads = torch.autograd.grad(values, leaves, ds, allow_unused=True)
        return *new, *(
            torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads)
        )

    states, cotangents = cell.states, tuple(f"d_{state}" for state in cell.states)
    grads = tuple(f"d{name}" for name in names)
    with torch.no_grad():
        forward = _graph(cell, step, names, states, shape, dtype)
    found = _graph(cell, both, names + cotangents, (*states, *grads), shape, dtype)
    again = found.outputs_of(states)
    if str((again.nodes, again.outputs)) != str((forward.nodes, forward.outputs)):
        raise CellError(
            f"cell '{cell.name}' does other things where gradients are recorded, or in each call, "
            "as one that draws at random: a kernel's gradients would be those of another function"
        )
    return forward, found.outputs_of(grads)


def _graph(
    cell: "Cell",
    function: Callable[..., tuple[Tensor, ...]],
    names: tuple[str, ...],
    outputs: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    given = examples(len(names), shape, dtype)
    try:
        traced: Any = make_fx(function, decomposition_table=decompositions())(*given)
        return read(cell, traced, names, outputs, dtype)
    except CellError:
        raise
    except Exception as error:  # of the cell, its derivative or torch: the reference may run it
        line = str(error).strip().partition("\n")[0]
        raise CellError(
            f"cell '{cell.name}' cannot be traced: {type(error).__name__}: {line}"
        ) from error


def _compare(cell: "Cell", clip: Clip, found: tuple[Graph, Graph]) -> str | None:
    """Why no kernel of float64 is right, or None.

    Raises:
        CellError: what the cell does depends on the shape of its inputs, or changes by itself.
    """
    # compared as text, in which nan is nan
    no_float64_reason = None
    if str(_again(cell, clip, _OTHER_SHAPE, _OTHER_DTYPE)) != str(found):
        other = _again(cell, clip, _OTHER_SHAPE, torch.float32)
        if str(other) != str(found):
            why = f" ({other})" if isinstance(other, str) else ""
            raise CellError(
                f"cell '{cell.name}' does other things for inputs of shape {_OTHER_SHAPE} than of "
                f"{SHAPE}{why}: a kernel would keep what it reads of shapes or values, or draws at "
                "random"
            )
        no_float64_reason = (
            f"cell '{cell.name}' does other things in float64 than in float32: it names a dtype, "
            "as x.f.float() does where x.f.to(s.h.dtype) is right in both, or has numbers of one"
        )
    if str(_again(cell, clip, (1, 1), torch.float32)) != str(found):
        raise CellError(f"cell '{cell.name}' does other things for B 1 and H 1 than for others")
    asked = _asked_of_sizes(cell, clip)
    if asked is not None:
        raise CellError(
            f"cell '{cell.name}' depends on whether {asked}, of a batch of B and H units: a kernel "
            "is the same for all sizes"
        )
    return no_float64_reason


def _asked_of_sizes(cell: "Cell", clip: Clip) -> str | None:
    """What the step asks of B and H, or None: sizes are symbols while it is traced."""
    from torch.fx.experimental.proxy_tensor import make_fx

    given = examples(len(names_of(cell)), _OTHER_SHAPE, torch.float32)
    try:
        traced: Any = make_fx(step_of(cell, clip), tracing_mode="symbolic")(*given)
    except Exception:  # what torch cannot trace so is compared for two sizes alone
        return None
    example = next(node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder")
    if not (guards := example.fake_mode.shape_env.guards):
        return None
    asked = guards[0].expr
    text = str(asked)
    if hasattr(asked, "rel_op"):
        text = f"{asked.lhs} {asked.rel_op} {asked.rhs}"
    for name, size in zip("BH", example.shape):
        text = text.replace(str(size.node._expr), name)
    return text


def _again(
    cell: "Cell", clip: Clip, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Graph, Graph] | str:
    """The graphs for other examples, or why there are none."""
    try:
        return _graphs(cell, clip, shape, dtype)
    except CellError as error:
        return str(error)


def _only_sum(graph: Graph, gate: str, least: int = 1) -> bool:
    """Whether a graph reads both sides of a gate in `least` to one sums, and nowhere else."""
    sides = {f"x_{gate}", f"r_{gate}"}
    users = [node for node in graph.nodes if sides & set(node.args)]
    return (
        least <= len(users) <= 1
        and all(node.op == "add" and set(node.args) == sides for node in users)
        and not sides & set(graph.outputs.values())
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
