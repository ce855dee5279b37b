"""A cell's step or its derivative as a short list of primitive elementwise operations."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# what gives a truth value, which `where`, `and`, `or`, `not` take
TRUTHS = frozenset("eq ne lt le gt ge and or not".split())
# what a printer must know; `round` is to the even one of two
PRIMITIVES = TRUTHS | frozenset(
    "neg add sub mul div abs sign exp expm1 log log1p log2 log10 sqrt reciprocal sin cos tan asin "
    "acos atan atan2 sinh cosh asinh acosh atanh erf erfc lgamma pow hypot fmod copysign sigmoid "
    "tanh logsigmoid maximum minimum floor ceil trunc round where".split()
)

Value = str | float
_NUMBERS: dict[str, Callable[[float, float], float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def signed(value: Value) -> Value | tuple[float, float]:
    """What tells a value from every other: 0.0 equals -0.0, and copysign and 1 / x do not."""
    return value if isinstance(value, str) else (value, math.copysign(1.0, value))


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

    def outputs_of(self, names: tuple[str, ...]) -> "Graph":
        """With some of the outputs, and what they need."""
        return Graph(self.inputs, self.nodes, {name: self.outputs[name] for name in names}).pruned()

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

    def named(self, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> "Graph":
        """With other names of inputs and outputs, and of nodes what follows from those."""
        emit = Builder(tuple(inputs[name] for name in self.inputs))
        values: dict[Value, Value] = {name: inputs[name] for name in self.inputs}
        for node in self.nodes:
            values[node.name] = emit(node.op, *(values.get(arg, arg) for arg in node.args))
        return emit.graph(
            {outputs[name]: values.get(value, value) for name, value in self.outputs.items()}
        )


class Builder:
    """Collects nodes; the same operation on the same values is one node.

    Every node gets what it takes, numbers or truth values: one becomes the other where it must. A
    constant truth value is 1.0 or 0.0.
    """

    def __init__(self, inputs: tuple[str, ...]) -> None:
        self.inputs = inputs
        self.nodes: list[Node] = []
        self._known: dict[tuple[object, ...], str] = {}
        self._names = set(inputs)
        self._gates: dict[str, str] = {}
        self._truths: set[Value] = set()
        self._choices: set[Value] = set()
        self._reals: dict[Value, Value] = {}  # truth values by the numbers made of them

    def truth(self, value: Value) -> Value:
        """Whether a value is not 0."""
        if value in self._truths:
            return value
        return self._reals.get(value) or self("ne", value, 0.0)

    def real(self, value: Value) -> Value:
        """The value as a number, 1 for true."""
        if value not in self._truths:
            return value
        number = self("where", value, 1.0, 0.0)
        self._reals[number] = value
        return number

    def is_choice(self, value: Value) -> bool:
        """Whether a value is one of two numbers, exact in whatever dtype they are."""
        return value in self._choices

    def __call__(self, op: str, *args: Value) -> Value:
        if op in ("and", "or", "not"):
            args = tuple(map(self.truth, args))
        elif op == "where":
            args = (self.truth(args[0]), *map(self.real, args[1:]))
        else:
            args = tuple(map(self.real, args))
        simple = _fold(op, args)
        if simple is not None:
            return simple
        key = (op, *map(signed, args))
        if key not in self._known:
            self._known[key] = self._name(op, args)
            self.nodes.append(Node(self._known[key], op, args))
            if op in TRUTHS:
                self._truths.add(self._known[key])
            elif op == "where" and all(isinstance(arg, float) for arg in args[1:]):
                self._choices.add(self._known[key])
        return self._known[key]

    def _name(self, op: str, args: tuple[Value, ...]) -> str:
        # a value made of one gate alone carries the gate's name: sigmoid(x_i + r_i) is sigmoid_i
        gates = {self._gate(arg) for arg in args if isinstance(arg, str)}
        gate = gates.pop() if len(gates) == 1 else None
        base = f"logic_{op}" if op in ("and", "or", "not") else op
        name = f"{base}_{gate}" if gate else f"{base}_v1"
        count = 1
        while name in self._names:
            count += 1
            name = f"{base}_{gate}_{count}" if gate else f"{base}_v{count}"
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
    """The graph with products regrouped, where every output is linear in the inputs `linear`.

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
            first, factor = terms[str(value)]
            return first if factor == 1.0 else emit("mul", first, factor)
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
    """What an operation on 0, 1, equal values or numbers is, exact for every input.

    But for the sign of a zero that x + 0 or x - 0 gives, which is that of x here.
    """
    if op in TRUTHS and any(isinstance(arg, float) for arg in args):
        found = _fold_truth(op, args)
        if found is not None:
            return found
    if op in ("add", "sub") and args[1] == 0.0:
        return args[0]
    if op == "add" and args[0] == 0.0:
        return args[1]
    if op in ("mul", "div") and args[1] == 1.0:
        return args[0]
    if op == "mul" and args[0] == 1.0:
        return args[1]
    if op == "where" and isinstance(args[0], float):
        return args[1] if args[0] else args[2]
    if op == "where" and signed(args[1]) == signed(args[2]):
        return args[1]
    if op == "neg" and isinstance(args[0], float):
        return -args[0]
    if len(args) == 2 and op in _NUMBERS:
        first, second = args
        if isinstance(first, float) and isinstance(second, float) and (op != "div" or second):
            return float(_NUMBERS[op](first, second))
    return None


def _fold_truth(op: str, args: tuple[Value, ...]) -> Value | None:
    """Folds `and`, `or` and `not` where an argument is constant."""
    if op == "not":
        return float(not args[0])
    if op not in ("and", "or"):
        return None
    number, other = args if isinstance(args[0], float) else args[::-1]
    keeps = bool(number) == (op == "and")
    return other if keeps else float(bool(number))
