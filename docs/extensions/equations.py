"""A cell's equations as LaTeX, read from the source of its function, so that the two agree.

`x.f + r.f` becomes W_f x_t + R_f h_{t-1} + b_f, and `s.c` c_{t-1}. Each assignment, each state that
is returned and each gate whose activation stands within another expression is one equation. `clip`,
the identity unless a layer has `cell_clip`, is left out.
"""

import ast
import inspect
import textwrap

from openrnn.cells import Cell

SUM, PRODUCT, ATOM = 1, 2, 3  # how tightly an expression binds
GREEK = set(
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi chi "
    "psi omega".split()
)
FUNCTIONS = {
    "sigmoid": r"\sigma", "tanh": r"\tanh", "exp": r"\exp", "log": r"\log", "sin": r"\sin",
    "cos": r"\cos", "maximum": r"\max", "minimum": r"\min", "logsigmoid": r"\log\sigma",
}  # fmt: skip


class NotAnEquationError(Exception):
    """The function has a statement or an expression that no equation here stands for."""


def of(cell: Cell) -> list[str]:
    """One equation a line, with `&` before its equals sign.

    Raises:
        NotAnEquationError: the source is missing or has more than assignments and a return.
    """
    try:
        source = textwrap.dedent(inspect.getsource(cell.function))
    except OSError as error:
        raise NotAnEquationError(str(error)) from error
    (function,) = ast.parse(source).body
    if not isinstance(function, ast.FunctionDef):
        raise NotAnEquationError("no function")
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    writer = _Writer(cell, assigned | set(cell.states))
    lines: list[str] = []
    for statement in function.body:
        lines += writer.statement(statement)
    return lines


def block(cell: Cell) -> str:
    """All equations of a cell as one environment."""
    return "\\begin{aligned}\n" + " \\\\\n".join(of(cell)) + "\n\\end{aligned}"


def symbol(name: str, time: str = "") -> str:
    """A name as LaTeX: one letter is italic, a word upright, what follows `_` is an index."""
    first, _, rest = name.partition("_")
    base = first if len(first) == 1 else f"\\{first}" if first in GREEK else f"\\mathrm{{{first}}}"
    index = ", ".join(word for word in (rest.replace("_", " "), time) if word)
    return f"{base}_{{{index}}}" if index else base


class _Writer:
    def __init__(self, cell: Cell, taken: set[str]) -> None:
        self.cell = cell
        self.taken = taken  # names that the function or its states have
        self.emitted = symbol(cell.states[0], "t-1")
        self.other_names: dict[str, str] = {}  # of variables that get no equation of their own
        self.gates: list[str] = []  # equations of gates that the current statement needs

    def statement(self, node: ast.stmt) -> list[str]:
        """The equations of one statement."""
        self.gates = []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return []  # the docstring
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, _unclipped(node.value)
            if name in self.cell.gates and self._gate(value) == name:
                return [f"{symbol(name, 't')} &= {self._activation(value)}"]
            written = self.write(value)
            if isinstance(value, (ast.Compare, ast.Name)) or _named(value) or self._gate(value):
                self.other_names[name] = written
                return self.gates
            return [*self.gates, f"{symbol(name, 't')} &= {written}"]
        if isinstance(node, ast.Return) and node.value is not None:
            value = node.value
            parts = value.elts if isinstance(value, ast.Tuple) else [value]
            lines = [
                f"{symbol(state, 't')} &= {self.write(part)}"
                for state, part in zip(self.cell.states, parts)
                if not (isinstance(part, ast.Name) and part.id == state)
            ]
            return self.gates + lines
        raise NotAnEquationError(ast.unparse(node))

    def _gate(self, node: ast.expr) -> str | None:
        """The gate of a sum under a function, `sigmoid(x.f + r.f)`, where its name is free."""
        if not isinstance(node, ast.Call) or len(node.args) != 1:
            return None
        terms = [term for _, term in _terms(node.args[0])]
        named = [found for term in terms if (found := _named(term))]
        sides = {gate for side, gate in named if side in "xr"}
        sides |= {found[0] for term in terms if (found := self._recurrent(term))}
        gate = sides.pop() if len(sides) == 1 and ("x", *sides) in named else None
        return gate if gate not in self.taken or gate in self.cell.gates else None

    def write(self, node: ast.expr, around: int = 0) -> str:
        """An expression, in parentheses where what is around it binds more tightly."""
        text, binding = self._expression(node)
        return rf"\left({text}\right)" if binding < around else text

    def _expression(self, node: ast.expr) -> tuple[str, int]:
        if isinstance(node, ast.Constant):
            return str(node.value), ATOM
        if isinstance(node, ast.Name):
            return self.other_names.get(node.id, symbol(node.id, "t")), ATOM
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return f"-{self.write(node.operand, PRODUCT)}", SUM
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            return f"{self.write(node.left)} = {self.write(node.comparators[0])}", 0
        if isinstance(node, ast.BinOp):
            return self._operation(node)
        named = _named(node)
        if named and named[0] == "s":
            return symbol(named[1], "t-1"), ATOM
        if named and named[0] == "p":
            return symbol(named[1]), ATOM
        if named and named[0] == "x":
            return f"W_{{{named[1]}}} x_t + b^W_{{{named[1]}}}", SUM
        if self._recurrent(node):
            gate, state = self._recurrent(node) or ("", "")
            return f"R_{{{gate}}} {state} + b^R_{{{gate}}}", SUM
        if isinstance(node, ast.Call):
            return self._call(node)
        raise NotAnEquationError(ast.unparse(node))

    def _operation(self, node: ast.BinOp) -> tuple[str, int]:
        if isinstance(node.op, (ast.Add, ast.Sub)):
            return self._sum(node), SUM
        if isinstance(node.op, ast.Mult):
            left, right = self.write(node.left, PRODUCT), self.write(node.right, PRODUCT)
            times = r"\," if isinstance(node.left, ast.Constant) else r" \odot "
            return f"{left}{times}{right}", PRODUCT
        if isinstance(node.op, ast.Div):
            return rf"\frac{{{self.write(node.left)}}}{{{self.write(node.right)}}}", ATOM
        if isinstance(node.op, ast.Pow):
            return f"{self.write(node.left, ATOM)}^{{{self.write(node.right)}}}", ATOM
        raise NotAnEquationError(ast.unparse(node))

    def _sum(self, node: ast.expr) -> str:
        """The terms of a sum; the two sides of a gate share one bias."""
        terms = list(_terms(node))
        sides = {
            found[0]: term
            for sign, term in terms
            if sign == "+" and (found := self._recurrent(term))
        }
        written, done = "", []
        for sign, term in terms:
            if term in done:
                continue
            named = _named(term)
            if sign == "+" and named and named[0] == "x" and named[1] in sides:
                other = sides[named[1]]
                gate, state = self._recurrent(other) or ("", "")
                text = f"W_{{{gate}}} x_t + R_{{{gate}}} {state} + b_{{{gate}}}"
                done.append(other)
            else:
                text = self.write(term, SUM if sign == "+" else PRODUCT)
            written += f" {sign} {text}"
        return written.removeprefix(" + ").strip()

    def _recurrent(self, node: ast.expr) -> tuple[str, str] | None:
        """Gate and state of `r.f`, or of the product `r("f", state)`."""
        named = _named(node)
        if named and named[0] == "r":
            return named[1], self.emitted
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "r":
            gate, state = node.args
            return ast.literal_eval(gate), self.write(state, ATOM)
        return None

    def _call(self, node: ast.Call) -> tuple[str, int]:
        gate = self._gate(node)
        if gate and gate not in self.taken:
            line = f"{symbol(gate, 't')} &= {self._activation(node)}"
            self.gates += [line] if line not in self.gates else []
            return symbol(gate, "t"), ATOM
        return self._activation(node), ATOM

    def _activation(self, node: ast.Call) -> str:
        """A function of its arguments."""
        if _unclipped(node) is not node:
            return self.write(_unclipped(node))
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name in ("zeros_like", "ones_like"):
            return str(int(name == "ones_like"))
        texts = [self.write(argument) for argument in node.args]
        if name == "where":
            chosen, yes, no = texts
            lines = rf"{yes} & \text{{if }} {chosen} \\ {no} & \text{{else}}"
            return rf"\begin{{cases}} {lines} \end{{cases}}"
        function = FUNCTIONS.get(name, rf"\operatorname{{{name}}}")
        return rf"{function}\left({', '.join(texts)}\right)"


def _unclipped(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "clip":
        return node.args[0]
    return node


def _named(node: ast.expr) -> tuple[str, str] | None:
    """Letter and name of `x.f`, `r.f`, `s.h` and `p.v`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return (node.value.id, node.attr) if node.value.id in "xrsp" else None
    return None


def _terms(node: ast.expr, sign: str = "+") -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        flip = {"+": "-", "-": "+"}
        right = sign if isinstance(node.op, ast.Add) else flip[sign]
        return [*_terms(node.left, sign), *_terms(node.right, right)]
    return [(sign, node)]
