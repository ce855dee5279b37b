"""Source of random cells: elementwise, bounded, with every operator of torch in its turn."""

import linecache
import random
import re
from dataclasses import dataclass

import torch
from torch import Tensor

import openrnn
from openrnn.cells import Cell

from .operators import NEVER, OPERATORS

NAMES = (
    "f i o g h c n m z k j x r s d p a b w u q y e t v l after before vectors saved factor stride "
    "units row dx dr da exp log pow real float int const register template asm step derivative "
    "GATES STATES word wide stored INLINE math njit bias h_before h_after d_h_after rows x_1 a_f "
    "_ __ _x é ß Ω self numba reals no_overlap tanh sigmoid maximum sign sum min"
).split()
WEIRD_NAMES = ('e"""+str(1)+"""', "a'b", "back\\slash", "*/", "//", "${x}", "é", "None", "1", "-",
               "{0}", "%s", "a/b", "..", "x" * 300)  # fmt: skip


class Scale(torch.autograd.Function):
    """The identity, with a third of the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 0.3


class StraightThrough(Scale):
    """Rounded, with the gradient of the identity."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class Twice(torch.autograd.Function):
    """a * b, with twice the gradient of a."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor, Tensor], output: object) -> None:
        ctx.save_for_backward(*inputs)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * grad * b, grad * a


SCOPE = {
    "torch": torch, "F": torch.nn.functional, "openrnn": openrnn,
    "Scale": Scale, "StraightThrough": StraightThrough, "Twice": Twice,
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """The text of a cell, the operators in it, and whether it must be refused."""

    source: str
    uses: tuple[str, ...]
    never: bool

    def cell(self, index: int) -> Cell:
        """The cell; its lines can be found again, as messages name them."""
        name = f"<cells:{index}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        scope = dict(SCOPE)
        exec(compile(self.source, name, "exec"), scope)
        found = scope["fuzzed"]
        if not isinstance(found, Cell):
            raise TypeError("the source makes no cell")
        return found


ROWS = [(name, template) for name, templates in OPERATORS.items() for template in templates]
BAD = [(name, template) for name, templates in NEVER.items() for template in templates]


class _Writer:
    """Writes the lines of a function: each value in the pool is bounded by 1."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.pool: list[str] = []
        self.lines: list[str] = []

    def value(self) -> str:
        # late ones twice as often, so that chains form
        return self.dice.choice(self.pool + self.pool[-3:])

    def number(self) -> str:
        return repr(round(self.dice.choice((-1, 1)) * self.dice.uniform(0.1, 1.4), 2))

    def filled(self, template: str) -> str:
        dice = self.dice
        makers = {
            "pos": lambda: f"(1.5 + {self.value()})", "unit": lambda: f"(0.8 * {self.value()})",
            "big": lambda: f"(3 * {self.value()})", "gt1": lambda: f"(2.2 + {self.value()})",
            "prob": lambda: f"(0.5 + 0.4 * {self.value()})",
            "i": lambda: f"({self.value()} * 9).int()", "j": lambda: f"(9 * {self.value()}).int()",
            "count": lambda: f"(5 + 4 * {self.value()}).int()",
            "m": lambda: f"({self.value()} > {self.number()})",
            "l": lambda: f"({self.value()} < {self.value()} + 0.1)",
            "n": self.number, "k": lambda: str(dice.randint(1, 4)),
            "p": lambda: repr(round(dice.uniform(0.3, 2.5), 2)),
        }  # fmt: skip
        same: dict[str, str] = {}

        def fill(found: re.Match[str]) -> str:
            name = found[1]
            if name in "abc":  # the same value wherever a template names it
                return same.setdefault(name, self.value())
            return makers[name]()

        return re.sub(r"\{(\w+)\}", fill, template)

    def use(self, template: str) -> None:
        """One more value, made by an operator."""
        dice = self.dice
        kind, text = template[:2], template
        if kind in ("u:", "m:", "i:"):
            text = template[2:]
        said = self.filled(text)
        a, b = self.value(), self.value()
        if kind == "m:":
            said = dice.choice((
                f"torch.where({said}, {a}, 0.5 * {b})", f"({said}).to({a}.dtype) * {a}",
                f"({said}).float() * 0.5 - {a} * 0.5", f"{a}.masked_fill({said}, 0.25)",
                f"{a} * ({said})", f"torch.where({said}, {b}, -0.3)",
            ))  # fmt: skip
        elif kind == "i:":
            said = dice.choice((
                f"torch.tanh(0.1 * ({said}).to({a}.dtype))", f"torch.tanh({a} + 0.1 * ({said}))",
                f"torch.where(({said}) > 1, {a}, {b})", f"torch.tanh(({said}) / 5 * {a})",
            ))  # fmt: skip
        elif kind == "u:":
            said = f"torch.tanh(0.1 * ({said}))"
        else:
            said = dice.choice((f"torch.tanh({said})", f"0.2 * ({said})"))
        self.add(said)

    def add(self, said: str) -> None:
        name = f"v{len(self.pool)}"
        self.lines.append(f"{name} = {said}")
        self.pool.append(name)


def make(seed: int, index: int) -> Made:
    """The cell of a number: each operator in its turn, among random ones."""
    dice = random.Random(f"cells {seed} {index}")
    never = index % 25 == 24
    name, template = (BAD if never else ROWS)[
        (index // 25 if never else index - index // 25) % len(BAD if never else ROWS)
    ]
    odd = dice.random() < 0.3
    names = dice.sample(NAMES if odd else NAMES[:26], 12)
    gates, rest = names[: dice.choice((1, 1, 2, 3, 4, 5))], names[5:]
    states, params = (
        rest[: dice.choice((1, 1, 2, 3, 4))],
        rest[4 : 4 + dice.choice((0, 0, 0, 1, 2))],
    )
    writer = _Writer(dice)
    for gate in gates:
        writer.add(_side(dice, gate))
    writer.pool += [f"s.{state}" for state in states] + [
        f"(torch.tanh(p.{each}) * torch.ones_like(s.{states[0]}))" for each in params
    ]
    uses = [name]
    before = dice.choice((0, 0, 1))
    for _ in range(before):
        uses.append(_other(dice, writer))
    writer.use(template)
    held = writer.pool[-1]
    for _ in range(dice.choice((0, 0, 1, 2))):
        uses.append(_other(dice, writer))
    new = []
    for place, _ in enumerate(states):
        mixed = held if place == 0 else writer.value()
        a, b = writer.value(), writer.value()
        new.append(dice.choice((f"0.5 * {mixed} + 0.5 * {a} * {b}", f"torch.tanh({mixed} + {a})",
                                f"{mixed} * 0.9 + 0.1 * {b}")))  # fmt: skip
    title = f", name={dice.choice(WEIRD_NAMES)!r}" if dice.random() < 0.06 else ""
    with_params = f', params="{" ".join(params)}"' if params else ""
    body = "\n".join(f"    {line}" for line in writer.lines)
    source = (
        f'@openrnn.cell(gates="{" ".join(gates)}", states="{" ".join(states)}"{with_params}{title})'
        f"\ndef fuzzed(x, r, s{', p' if params else ''}):\n{body}\n    return {', '.join(new)}\n"
    )
    return Made(source, tuple(uses), never)


# of which the printers know all, so that the operator in question is not hidden by another
COMMON = ("add", "sub", "mul", "tanh", "sigmoid", "maximum", "where", "derivatives", "exp", "clamp")


def _other(dice: random.Random, writer: _Writer) -> str:
    name = dice.choice(COMMON)
    writer.use(dice.choice(OPERATORS[name]))
    return name


def _side(dice: random.Random, gate: str) -> str:
    """How the two sides of a gate come together."""
    x, r = f"x.{gate}", f"r.{gate}"
    sums = [f"{x} + {r}"] * 6 + [
        f"{x} + {r}.detach()", f"{x}.detach() + {r}", f"{x} + Scale.apply({r})",
        f"Scale.apply({x}) + {r}", f"Scale.apply({x} + {r})", f"{x} - {r}", f"0.5 * {x} + {r}",
        f"torch.add({x}, {r}, alpha=0.5)", f"{x} * torch.tanh({r})", x, r, f"{r} + {x}",
        f"torch.maximum({x}, {r})", f"({x} + {r}) + 0.1 * {x}", f"{x} + {r} * {r}",
        f"{x} + ({r} - {x}).detach()",
    ]  # fmt: skip
    return f"torch.{dice.choice(('tanh', 'sigmoid', 'tanh'))}({dice.choice(sums)})"
