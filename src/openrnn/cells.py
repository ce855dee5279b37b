"""The cells that ship, and the decorator that makes one: a cell is a short elementwise function.

`x`, `r` and `s` carry the input-side pre-activations, the recurrent-side pre-activations (each with
its bias) and the previous states, by name, each (…, H). `p` carries the trainable per-unit vectors
of a cell that has some, each (H,). `clip` bounds a state where it is read: the identity, unless the
layer has `cell_clip`. The first state is the one that the recurrent matrix multiplies and that is
emitted.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, sigmoid, tanh

from openrnn import digest, fresh
from openrnn.errors import CellError, shown
from openrnn.frozen import frozen
from openrnn.memo import memo
from openrnn.names import Names, NotCalledError, words_of
from openrnn.spec import Spec

__all__ = [
    "Cell", "cell", "coupled_lstm", "gru", "gru_reset_before", "lookup", "lstm", "mgu",
    "peephole_lstm", "rnn_relu", "rnn_tanh", "slstm",
]  # fmt: skip

Clip = Callable[[Tensor], Tensor]

# the names of the other parameters, which a per-unit vector must not take from them
RESERVED = ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")


def _identity(c: Tensor) -> Tensor:
    return c


@dataclass(frozen=True, eq=False)
class Cell:
    """An elementwise recurrent cell; make one with `openrnn.cell`.

    Calling it runs one step on plain tensors: `cell(x, r, s, p, clip)` -> tuple of new states,
    where x, r, s and p are mappings or objects with the names of gates, states and parameters.
    """

    name: str
    gates: tuple[str, ...]
    states: tuple[str, ...]
    unit_params: tuple[str, ...]
    function: Callable[..., object]
    key: str
    takes_clip: bool = False
    dependent_product: bool = False

    def __call__(
        self, x: object, r: object, s: object, p: object = None, clip: Clip = _identity
    ) -> tuple[Tensor, ...]:
        extra: dict[str, object] = {}
        if self.unit_params:
            extra["p"] = p
        if self.takes_clip:
            extra["clip"] = clip
        function = self.__dict__.get("_frozen")
        new = function(x, r, s, **extra) if function else self._first(x, r, s, extra)
        if isinstance(new, Tensor):
            new = (new,)
        if not isinstance(new, tuple) or len(new) != len(self.states):
            count = len(new) if isinstance(new, tuple) else f"a {type(new).__name__}"
            wanted = f"{len(self.states)} state{'s' * (len(self.states) > 1)}"
            raise CellError(
                f"cell '{self.name}' must return {wanted} ({', '.join(self.states)}), got {count}"
            )
        return new

    def _first(self, x: object, r: object, s: object, extra: dict[str, object]) -> object:
        """The first call that ends well: captured values stay as they are at it, on every way."""
        if torch.compiler.is_compiling():  # which cannot trace how a function is copied
            return self.function(x, r, s, **extra)
        function = frozen(self.function)
        new = function(x, r, s, **extra)
        self.__dict__.setdefault("_frozen", function)
        return new

    def step(
        self, x: tuple[Tensor, ...], r: object, s: tuple[Tensor, ...], p: tuple[Tensor, ...] = (),
        clip: Clip = _identity,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """A step from plain tuples, in the order of `gates`, `states` and `unit_params`."""
        given = (
            Names(self.gates, x),
            Names(self.gates, r) if isinstance(r, tuple) else r,
            Names(self.states, s),
            Names(self.unit_params, p),
        )
        try:
            return self(*given, clip)
        except (AttributeError, NotCalledError) as error:
            for letter, names in zip("xrsp", given):
                if isinstance(names, Names) and error.obj is names:
                    raise CellError(self._misread(letter, names, error)) from error
            raise

    def _misread(self, letter: str, names: Names, error: Exception) -> str:
        """What a cell did wrong with x, r, s or p."""
        has = ", ".join(vars(names)) or "nothing"
        if isinstance(error, AttributeError):
            return f"cell '{self.name}' reads {letter}.{error.name}, {letter} has {has}"
        how = str(error).format(letter)
        return f"cell '{self.name}' {how}, which only has attributes: {has}"

    def spec(self, input_size: int, hidden_size: int, **options: object) -> Spec:
        """The spec of a network of this cell."""
        return Spec(
            self.key, self.gates, self.states, input_size, hidden_size,
            unit_params=self.unit_params, **options,  # type: ignore[arg-type]  # checked by Spec
        )  # fmt: skip

    def __deepcopy__(self, memo: object) -> "Cell":
        return self

    def __reduce__(self) -> tuple[Callable[..., "Cell"], tuple[Any, ...]]:
        module, qualname = self._import_path
        if module == __name__:  # its code may change, its equations do not
            return lookup, (self.key,)
        return _find, (self.key, module, qualname, self.fingerprint())

    @property
    def _import_path(self) -> tuple[str, str]:
        return digest.module_of(self.function), self.function.__qualname__

    @property
    def _names(self) -> tuple[tuple[str, ...], ...]:
        return self.gates, self.states, self.unit_params

    def fingerprint(self) -> digest.Digest:
        """What tells this cell from another of the same place: names, code and captured values."""
        try:
            return digest.of(self.function, self._names)
        except TypeError as error:
            raise CellError(f"cell '{self.name}' cannot be pickled: {error}") from error


_CELLS: dict[str, Cell] = {}


def cell(
    gates: str | Sequence[str],
    states: str | Sequence[str] = "h",
    params: str | Sequence[str] = "",
    *,
    name: str | None = None,
) -> Callable[[Callable[..., object]], Cell]:
    """Makes a cell of an elementwise function `(x, r, s)`, with `p` and `clip` where it wants them.

    Args:
        gates: the names of the gates, in the order of the rows of `weight_ih` and `weight_hh`: one
            string with spaces between, or a list.
        states: the names of the states, the emitted one first.
        params: the names of trainable vectors of one number a unit, such as peepholes.
        name: by default the function's.

    Raises:
        CellError: names are no identifiers, taken or there twice, or the function takes other
            arguments.

    Example:
        >>> import torch, openrnn
        >>> @openrnn.cell(gates="f n", states="h")
        ... def minimal(x, r, s):
        ...     f = torch.sigmoid(x.f + r.f)
        ...     return (1 - f) * s.h + f * torch.tanh(x.n + r.n)
        >>> y, (h_n,) = openrnn.Recurrent(minimal, 3, 5)(torch.randn(7, 2, 3))
        >>> tuple(y.shape)
        (7, 2, 5)
    """
    if callable(gates):
        raise CellError("openrnn.cell needs the names of the gates: @openrnn.cell(gates='f n')")
    words = {
        kind: words_of(kind, given)
        for kind, given in (("gates", gates), ("states", states), ("params", params))
    }
    taken = [name for name in words["params"] if name in RESERVED]
    if taken:
        raise CellError(f"params must not take the name of another parameter, got {taken[0]!r}")
    if not words["gates"] or not words["states"]:
        raise CellError("a cell needs at least one gate and one state")

    def register(function: Callable[..., object]) -> Cell:
        title = name or getattr(function, "__name__", None)
        # a spec's text is words
        if not isinstance(title, str) or title.split() != [title] or not title.isprintable():
            raise CellError(f"the name of a cell must be one word, got {title!r}")
        arguments = list(inspect.signature(function).parameters)
        wanted = ["x", "r", "s"] + (["p"] if words["params"] else [])
        if arguments not in (wanted, [*wanted, "clip"]):
            raise CellError(
                f"cell '{title}' must take ({', '.join(wanted)}), with `clip` last if it clips a "
                f"state, got ({', '.join(arguments)})"
            )
        return _register(title, words, function, takes_clip="clip" in arguments)

    return register


def _register(
    name: str, words: dict[str, list[str]], function: Callable[..., object], **flags: bool
) -> Cell:
    # a second cell of the same name, as in a notebook run twice, gets a key of its own
    key, twins = name, 1
    while key in _CELLS:
        twins += 1
        key = f"{name}@{twins}"
    made = Cell(
        name, tuple(words["gates"]), tuple(words["states"]), tuple(words.get("params", ())),
        function, key, **flags,
    )  # fmt: skip
    if function.__module__ == __name__:  # it captures nothing that changes
        made.__dict__["_frozen"] = function
    _CELLS[key] = made
    return made


def _find(key: str, module: str, qualname: str, wanted: digest.Digest) -> Cell:
    """The cell that a pickle names: that of this place, code and captured values."""
    if module == __name__:  # of an earlier version
        return lookup(key)
    found = _match(key, (module, qualname), wanted)
    if found is None:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise CellError(f"cell '{key}' is {module}.{qualname}: {error}") from error
        found = _match(key, (module, qualname), wanted)
    if found is None:
        raise CellError(
            f"no cell here has the code and captured values of the pickled '{key}': define it as "
            f"{module}.{qualname} did before loading"
        )
    return found


def _match(key: str, path: tuple[str, str], wanted: digest.Digest) -> Cell | None:
    first = [_CELLS[key]] if key in _CELLS else []
    for known in (*first, *reversed(_CELLS.values())):  # else the latest, as its name means it
        if known._import_path == path and digest.fits(wanted, known.function, known._names):
            return known
    return None


def lookup(key: str) -> Cell:
    """The cell of this key.

    Raises:
        CellError: no such cell is defined in this process.
    """
    if key not in _CELLS:
        raise CellError(f"no cell '{key}' is defined here; there are {', '.join(sorted(_CELLS))}")
    return _CELLS[key]


torch.serialization.add_safe_globals([lookup])  # torch.load(weights_only=True) may call it


def check(spec: Spec) -> None:
    """Raises ValueError where the cell cannot do what the spec asks, TypeError for no spec."""
    if not isinstance(spec, Spec):
        raise TypeError(f"spec must be a Spec, as openrnn.ops.spec makes, got {shown(spec)}")
    known = lookup(spec.cell)
    if spec.cell_clip is not None and not known.takes_clip:
        raise ValueError(f"cell_clip needs a cell that clips a state, {known.name} has none")
    if spec.proj_size and _reads_emitted(known):
        raise ValueError(
            f"a projection needs a cell that does not read its emitted state, such as an LSTM; "
            f"{known.name} does"
        )


@memo(256)
def _reads_emitted(known: Cell) -> bool:
    """Whether the cell uses its emitted state elementwise: a projection would narrow it."""
    return known.dependent_product or fresh.run(_needs_emitted, known)


def _needs_emitted(known: Cell) -> bool:
    one = torch.zeros(1, dtype=torch.float32, device="cpu")
    gates, others, vectors = (
        Names(names, [one] * len(names))
        for names in (known.gates, known.states[1:], known.unit_params)
    )
    try:
        known(gates, gates, others, vectors)
    except AttributeError:
        return True
    return False


def clip_of(spec: Spec) -> Clip:
    """What bounds a state where it is read; its gradient is 1 on the closed interval."""
    if spec.cell_clip is None:
        return _identity
    low, high = spec.cell_clip
    return partial(torch.clamp, min=low, max=high)


@cell(gates="h", states="h")
def rnn_tanh(x, r, s):
    """h = tanh(W x + R h + b)"""
    return tanh(x.h + r.h)


@cell(gates="h", states="h")
def rnn_relu(x, r, s):
    """h = relu(W x + R h + b)"""
    return torch.relu(x.h + r.h)


@cell(gates="i f g o", states="h c")
def lstm(x, r, s, clip):
    """Long short-term memory without peepholes (Hochreiter 1997, Gers 2000), as torch has it."""
    c = sigmoid(x.f + r.f) * clip(s.c) + sigmoid(x.i + r.i) * tanh(x.g + r.g)
    return sigmoid(x.o + r.o) * tanh(clip(c)), c


@cell(gates="r z n", states="h")
def gru(x, r, s):
    """Gated recurrent unit, reset gate after the product (Cho 2014, v1), as torch has it."""
    reset = sigmoid(x.r + r.r)
    z = sigmoid(x.z + r.z)
    n = tanh(x.n + reset * r.n)
    return (1 - z) * n + z * s.h


@cell(gates="i f g o", states="h c", params="p_i p_f p_o")
def peephole_lstm(x, r, s, p, clip):
    """LSTM whose gates also see the cell state (Gers 2002); the output gate sees the new one."""
    before = clip(s.c)
    i = sigmoid(x.i + r.i + p.p_i * before)
    f = sigmoid(x.f + r.f + p.p_f * before)
    c = f * before + i * tanh(x.g + r.g)
    after = clip(c)
    return sigmoid(x.o + r.o + p.p_o * after) * tanh(after), c


@cell(gates="f g o", states="h c")
def coupled_lstm(x, r, s, clip):
    """LSTM with the input gate coupled to the forget gate, i = 1 - f (Greff 2017)."""
    f = sigmoid(x.f + r.f)
    c = f * clip(s.c) + (1 - f) * tanh(x.g + r.g)
    return sigmoid(x.o + r.o) * tanh(clip(c)), c


@cell(gates="i f z o", states="h c n m")
def slstm(x, r, s):
    """sLSTM: exponential gates, normaliser n and stabiliser m (Beck 2024, arXiv 2405.04517).

    All states start at 0; while n is 0 nothing is stored yet and m follows the input gate alone.
    """
    empty = s.n == 0
    log_f = torch.nn.functional.logsigmoid(x.f + r.f) + s.m
    log_i = x.i + r.i
    m = torch.where(empty, log_i, torch.maximum(log_f, log_i))
    i = torch.exp(log_i - m)
    # the exponent, too, is chosen: exp of a large one, though not taken, makes the gradient nan
    decay = torch.exp(torch.where(empty, torch.zeros_like(m), log_f - m))
    f = torch.where(empty, torch.zeros_like(m), decay)
    c = f * s.c + i * tanh(x.z + r.z)
    n = torch.maximum(f * s.n + i, torch.ones_like(m))
    return sigmoid(x.o + r.o) * c / n, c, n, m


@cell(gates="f n", states="h")
def mgu(x, r, s):
    """Minimal gated unit with one product a step (Heck and Salem 2017, reset after it)."""
    f = sigmoid(x.f + r.f)
    return (1 - f) * s.h + f * tanh(x.n + f * r.n)


def _gru_reset_before(x, r, s):
    """Gated recurrent unit with the reset gate before the product (Cho 2014, v3).

    n = tanh(W_n x + R_n (reset * h) + b): `r` is the product itself, `r(gate, h)`, because the
    second one waits for the first: two dependent products a step.
    """
    reset = sigmoid(x.r + r("r", s.h))
    z = sigmoid(x.z + r("z", s.h))
    n = tanh(x.n + r("n", reset * s.h))
    return (1 - z) * n + z * s.h


gru_reset_before = _register(
    "gru_reset_before",
    {"gates": ["r", "z", "n"], "states": ["h"]},
    _gru_reset_before,
    dependent_product=True,
)
