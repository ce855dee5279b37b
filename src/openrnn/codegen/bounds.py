"""Whether a cell's h stays within [-1, 1]: then float32 products read h and R as float16.

float16 has the 11 bits of tf32, takes half the registers and multiplies at twice the speed, but its
exponent is small. A number below 2^-14 is off by up to 2^-25: half of what float32 rounds 1 by. A
number beyond 65,504 counts as 65,504: an initial state or a weight may be one, a later h is not.
"""

from itertools import product
from math import inf, isnan
from typing import NamedTuple

from openrnn.codegen.graph import Node, Value
from openrnn.codegen.trace import Traced
from openrnn.memo import memo


class Interval(NamedTuple):
    """The least and the most that a value may be."""

    low: float
    high: float

    @property
    def sure(self) -> "Interval":
        """The interval, or ANY where an end is no number: nothing is known then."""
        return ANY if isnan(self.low) or isnan(self.high) else self

    def joined(self, other: "Interval") -> "Interval":
        """What either may be."""
        return Interval(min(self.low, other.low), max(self.high, other.high))


ANY, UNIT = Interval(-inf, inf), Interval(-1.0, 1.0)
_FIXED = {"sigmoid": Interval(0.0, 1.0), "tanh": UNIT, "sin": UNIT, "cos": UNIT, "erf": UNIT,
          "sign": UNIT}  # fmt: skip


def half_operands(cell: Traced, dtype: str) -> bool:
    """Whether forward's products read values of `dtype` as float16."""
    return dtype == "float32" and bounded(cell)


@memo(256)
def bounded(cell: Traced) -> bool:
    """Whether h is within [-1, 1] whatever the gates and the other states are, if it was before."""
    graph, state = cell.summed_step, cell.states[0]
    found, nodes = {f"s_{state}": UNIT}, {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        known = _mixed(node, nodes, found) or _clamped(node, nodes, found)
        found[node.name] = (known or _of(node, [_interval(arg, found) for arg in node.args])).sure
    h = _interval(graph.outputs[state], found)
    return UNIT.low <= h.low and h.high <= UNIT.high


def _interval(value: Value, found: dict[str, Interval]) -> Interval:
    return found.get(value, ANY) if isinstance(value, str) else Interval(value, value).sure


def _of(node: Node, args: list[Interval]) -> Interval:
    """What one operation gives; ANY where nothing is known of it."""
    if node.op in _FIXED:
        return _FIXED[node.op]
    if node.op == "neg":
        return Interval(-args[0].high, -args[0].low)
    if node.op == "abs":
        least = max(args[0].low, -args[0].high, 0.0)
        return Interval(least, max(-args[0].low, args[0].high))
    if node.op == "add":
        return Interval(args[0].low + args[1].low, args[0].high + args[1].high)
    if node.op == "sub":
        return Interval(args[0].low - args[1].high, args[0].high - args[1].low)
    if node.op == "where":
        return args[1].joined(args[2])
    if node.op in ("maximum", "minimum"):
        choose = max if node.op == "maximum" else min
        return Interval(choose(args[0].low, args[1].low), choose(args[0].high, args[1].high))
    if node.op == "mul" and all(abs(end) < inf for arg in args for end in arg):
        ends = [low * high for low, high in product(*args)]
        return Interval(min(ends), max(ends))
    return ANY


def _mixed(node: Node, nodes: dict[str, Node], found: dict[str, Interval]) -> Interval | None:
    """The interval of u a + (1 - u) b or b + u (a - b), u in [0, 1], as in a GRU: a or b."""
    if node.op != "add":
        return None
    for part, other in (node.args, node.args[::-1]):
        for u, a in _products(part, nodes):
            share, gap = _interval(u, found), nodes.get(str(a))
            if share.low < 0 or share.high > 1:
                continue
            if gap and gap.op == "sub" and gap.args[1] == other:
                return _interval(gap.args[0], found).joined(_interval(other, found))
            for less, b in _products(other, nodes):
                rest = nodes.get(str(less))
                if rest and rest.op == "sub" and rest.args == (1.0, u):
                    return _interval(a, found).joined(_interval(b, found))
    return None


def _clamped(node: Node, nodes: dict[str, Node], found: dict[str, Interval]) -> Interval | None:
    """The interval of x < 1 ? y : x, with any number or comparison: x beyond it is not taken."""
    asked = nodes.get(str(node.args[0])) if node.op == "where" else None
    if asked is None or asked.op not in ("lt", "le", "gt", "ge") or asked.args[0] != node.args[2]:
        return None
    if isinstance(asked.args[1], str):  # it may be nan, and then nothing is compared
        return None
    x, bound, instead = (_interval(arg, found) for arg in (*asked.args, node.args[1]))
    if asked.op in ("lt", "le"):
        return instead.joined(Interval(max(x.low, bound.low), max(x.high, bound.low)))
    return instead.joined(Interval(min(x.low, bound.high), min(x.high, bound.high)))


def _products(value: Value, nodes: dict[str, Node]) -> tuple[tuple[Value, Value], ...]:
    """A product's two factors, both ways; none of another value."""
    node = nodes.get(str(value))
    if node is None or node.op != "mul":
        return ()
    first, second = node.args
    return (first, second), (second, first)
