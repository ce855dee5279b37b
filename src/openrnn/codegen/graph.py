"""A cell's step or its derivative as a short list of primitive elementwise operations."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

# what a printer must know; a comparison gives a truth value that `where`, `and`, `or`, `not` take
PRIMITIVES = frozenset(
    "const neg add sub mul div abs sign exp expm1 log log1p sqrt reciprocal sin cos erf pow "
    "sigmoid tanh logsigmoid maximum minimum floor eq ne lt le gt ge and or not where".split()
)

Value = str | float
_NUMBERS: dict[str, Callable[[float, float], float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """`name = op(*args)`; an argument is the name of a node or input, or a number."""

    name: str
    op: str
    args: tuple[Value, ...]


@dataclass(frozen=True)
class Graph:
    """Inputs, nodes in order, and for each output the value it takes."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: dict[str, Value]

    @property
    def reads(self) -> frozenset[str]:
        """The inputs that matter."""
        used = {arg for node in self.nodes for arg in node.args}
        used.update(self.outputs.values())
        return frozenset(name for name in self.inputs if name in used)

    def pruned(self) -> "Graph":
        """Without the nodes that no output needs."""
        needed = set(self.outputs.values())
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if node.name in needed:
                kept.append(node)
                needed.update(node.args)
        return Graph(self.inputs, tuple(reversed(kept)), self.outputs)

    def split(self, late: frozenset[str]) -> tuple["Graph", "Graph"]:
        """What reads none of the inputs `late`; and the rest, which reads them and its outputs."""
        after: list[Node] = []
        waiting = set(late)
        for node in self.nodes:
            if waiting.intersection(node.args):
                waiting.add(node.name)
                after.append(node)
        asked = [arg for node in after for arg in node.args] + list(self.outputs.values())
        known: dict[str, Value] = {
            arg: arg for arg in asked if isinstance(arg, str) and arg not in waiting
        }
        early = tuple(name for name in self.inputs if name not in late)
        before = Graph(early, self.nodes, known).pruned()
        inputs = (*known, *(name for name in self.inputs if name in late))
        return before, Graph(inputs, tuple(after), self.outputs)

    def renamed(self, rename: Callable[[Value], Value]) -> "Graph":
        """With every name passed through `rename`; inputs that get the same name become one."""
        nodes = tuple(
            Node(str(rename(node.name)), node.op, tuple(rename(arg) for arg in node.args))
            for node in self.nodes
        )
        inputs = tuple(dict.fromkeys(str(rename(name)) for name in self.inputs))
        return Graph(inputs, nodes, {out: rename(value) for out, value in self.outputs.items()})


class Builder:
    """Collects nodes; the same operation on the same values is one node."""

    def __init__(self, inputs: tuple[str, ...]) -> None:
        self.inputs = inputs
        self.nodes: list[Node] = []
        self._known: dict[tuple[str, tuple[Value, ...]], str] = {}
        self._names = set(inputs)
        self._gates: dict[str, str] = {}

    def __call__(self, op: str, *args: Value) -> Value:
        simple = _fold(op, args)
        if simple is not None:
            return simple
        key = (op, args)
        if key not in self._known:
            self._known[key] = self._name(op, args)
            self.nodes.append(Node(self._known[key], op, args))
        return self._known[key]

    def _name(self, op: str, args: tuple[Value, ...]) -> str:
        # a value made of one gate alone carries the gate's name: sigmoid(x_i + r_i) is sigmoid_i
        gates = {self._gate(arg) for arg in args if isinstance(arg, str)}
        gate = gates.pop() if len(gates) == 1 else None
        base = f"logic_{op}" if op in ("and", "or", "not") else op
        name = f"{base}_{gate}" if gate else f"{base}_1"
        count = 1
        while name in self._names:
            count += 1
            name = f"{base}_{gate}_{count}" if gate else f"{base}_{count}"
        self._names.add(name)
        if gate:
            self._gates[name] = gate
        return name

    def _gate(self, value: str) -> str | None:
        if value in self.inputs:
            kind, _, name = value.partition("_")
            return name if kind in ("x", "r", "a") else None
        return self._gates.get(value)

    def graph(self, outputs: dict[str, Value]) -> Graph:
        return Graph(self.inputs, tuple(self.nodes), outputs).pruned()


def factored(graph: Graph, linear: frozenset[str]) -> Graph:
    """The same with products regrouped, where every output is linear in the inputs `linear`.

    (d * a) * b becomes d * (a * b), and d * a + d * b becomes d * (a + b): what is multiplied by
    gradients can be known before they are. The numbers differ in rounding only, but for a * b
    that overflows where d is small.
    """
    emit = Builder(graph.inputs)
    values: dict[str, Value] = {name: name for name in graph.inputs if name not in linear}
    # what depends on `linear`: a value of the new graph, and what it is multiplied by
    terms: dict[str, tuple[Value, Value]] = {name: (name, 1.0) for name in linear}

    def whole(value: Value) -> Value:
        if value in terms:
            return emit("mul", *terms[str(value)])
        return values[value] if isinstance(value, str) else value

    for node in graph.nodes:
        ours = [terms[str(arg)] for arg in node.args if arg in terms]
        first, *rest = node.args
        if not ours:
            values[node.name] = emit(node.op, *map(whole, node.args))
        elif len(ours) == 2 and node.op in ("add", "sub") and ours[0][0] == ours[1][0]:
            terms[node.name] = ours[0][0], emit(node.op, ours[0][1], ours[1][1])
        elif len(ours) == 1 and node.op == "neg":
            terms[node.name] = ours[0][0], emit("neg", ours[0][1])
        elif len(ours) == 1 and (node.op == "mul" or (node.op == "div" and first in terms)):
            other = rest[0] if first in terms else first
            terms[node.name] = ours[0][0], emit(node.op, ours[0][1], whole(other))
        else:
            terms[node.name] = emit(node.op, *map(whole, node.args)), 1.0
    return emit.graph({name: whole(value) for name, value in graph.outputs.items()})


def _fold(op: str, args: tuple[Value, ...]) -> Value | None:
    """What an operation on 0, 1, equal values or numbers is, exact for every input."""
    if op == "const":
        return args[0]
    if op in ("add", "sub") and args[1] == 0.0:
        return args[0]
    if op == "add" and args[0] == 0.0:
        return args[1]
    if op in ("mul", "div") and args[1] == 1.0:
        return args[0]
    if op == "mul" and args[0] == 1.0:
        return args[1]
    if op == "where" and args[1] == args[2]:
        return args[1]
    if op == "neg" and isinstance(args[0], float):
        return -args[0]
    if len(args) == 2 and op in _NUMBERS:
        first, second = args
        if isinstance(first, float) and isinstance(second, float) and (op != "div" or second):
            return _NUMBERS[op](first, second)
    return None
