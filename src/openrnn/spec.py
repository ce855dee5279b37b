"""What a network is (`Spec`) and what one call asks of it (`Problem`).

The letters, in every comment and docstring of this package:

    T steps    B batch    I input size    H hidden size    P projection size    G gates
    D directions (1 or 2)    L layers    O output size of one direction (P, or H without projection)
"""

import numbers
import operator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from openrnn.memo import memo

BIAS_MODES = ("double", "input", "recurrent", "none")
INPUT_MODES = ("linear", "skip", "gates")
ALGORITHMS = ("auto", "standard", "persist_static", "persist_dynamic", "persist_static_small_h")
FLAGS = (
    "grad", "training", "lengths", "reset", "return_states", "reset_state", "transform",
    "generator",
)  # fmt: skip
RECOMPUTE = ("none", "gates")
LARGEST = 2**31 - 1  # of any size
PRECISIONS = ("default", "ieee", "tf32", "bf16")  # from "ieee" on each permits more
_SETTING: Any = torch.backends.cudnn.rnn  # a module whose attributes torch computes


def whole(name: str, value: Any) -> int:
    """A size as an int: of any type that has such numbers, but no bool and no tensor.

    Raises:
        TypeError: it is none.
    """
    if type(value) is int:
        return value
    # numpy's bools have these names too, and numpy before 2.3 takes them as an index
    if type(value).__name__ not in ("bool", "bool_") and not isinstance(value, torch.Tensor):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise TypeError(f"{name} must be a whole number, got {_shown(value)}")


def number(name: str, value: Any) -> float:
    """A real number as a float; TypeError for what is none, bools and tensors too."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    """A value of a simple type, or the type of another."""
    simple = isinstance(value, bool | int | float | str) or value is None
    return repr(value) if simple else f"a {type(value).__name__}"


@dataclass(frozen=True)
class Spec:
    """What the network is; nothing of one call.

    Its text crosses the operators: `Spec.parse(str(spec)) == spec`.

    Args:
        cell: the key of the cell in `openrnn.cells`.
        input_size, hidden_size: I and H; one-step modules take 0, as torch's do.
        gates, states, unit_params: the cell's names; the first state is the one emitted.
        bias_mode: which bias vectors exist: "double" (both), "input", "recurrent", "none".
        wavefront: steps of a chunk of a stack whose layers run beside each other, each a chunk
            behind the one below, where a backend can; 0: layer by layer; None: the backend
            chooses; 1: one launch runs all layers, and where no such launch exists the backend
            chooses as for None.
        reverse: each layer runs from the end of a sequence to its start, in this direction alone.
        input_mode: what layer 0 makes of x: "linear", a product with its input matrix; "skip": x
            (I = H) is added to every gate, without a matrix; "gates": x (I = G*H) has what is added
            to each gate, gates in the order of the rows of a matrix, both directions the same.
        proj_size: P, or 0 for no projection.
        dropout: the probability to drop an output between layers, in training.
        cell_clip: bounds of the cell state where it is read, or None.
        precision: the least that float32 products may have: "ieee"; "tf32", on a GPU; "bf16", which
            also permits weights rounded to bfloat16, on a CPU; or "default", torch's own setting.
        algorithm: of cuDNN, by name; "auto" leaves it to the backend.
        reset_dropout_state: cuDNN's dropout starts anew from the seed of each call, instead of
            going on where the last call left it.
        recompute: "none", or "gates": backward computes gates again, to save memory.

    Attributes:
        text: the fields that differ from their defaults, as `name=value` words.
        directions: D.
        output_size: O, the width of the emitted state of one direction.
        chains: L * D, the number of recurrences, layer-major, forward before reverse.
        state_sizes: the width of each state: O for the emitted one, H for the others.
    """

    cell: str
    gates: tuple[str, ...]
    states: tuple[str, ...]
    input_size: int
    hidden_size: int
    unit_params: tuple[str, ...] = ()
    num_layers: int = 1
    bidirectional: bool = False
    bias_mode: str = "double"
    input_mode: str = "linear"
    proj_size: int = 0
    dropout: float = 0.0
    cell_clip: tuple[float, float] | None = None
    precision: str = "default"
    algorithm: str = "auto"
    reset_dropout_state: bool = False
    recompute: str = "none"
    reverse: bool = False
    wavefront: int | None = None
    # set once, because a compiler that traces a call reads them and cannot trace a cache
    text: str = field(init=False, repr=False, compare=False)
    directions: int = field(init=False, repr=False, compare=False)
    output_size: int = field(init=False, repr=False, compare=False)
    chains: int = field(init=False, repr=False, compare=False)
    state_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # a text remembers its hash; hashing all fields at each look into a cache was felt at T = 1
        return hash(self.text)

    def __post_init__(self) -> None:
        # one spelling of each value, because the text must name it: True for 1, floats for numbers
        object.__setattr__(self, "bidirectional", bool(self.bidirectional))
        object.__setattr__(self, "reset_dropout_state", bool(self.reset_dropout_state))
        object.__setattr__(self, "reverse", bool(self.reverse))
        object.__setattr__(self, "dropout", number("dropout", self.dropout))
        for name in ("input_size", "hidden_size", "num_layers", "proj_size"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
            if getattr(self, name) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST}, got {getattr(self, name)}")
        if self.cell_clip is not None:
            low, high = (number("cell_clip", bound) for bound in self.cell_clip)
            object.__setattr__(self, "cell_clip", (low, high))
        for name in ("input_size", "hidden_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.bidirectional and self.reverse:
            raise ValueError("reverse is one direction, needs bidirectional=False, got True")
        if self.num_layers <= 0:
            raise ValueError(f"num_layers must be greater than zero, got {self.num_layers}")
        if self.proj_size and not 0 < self.proj_size < self.hidden_size:
            raise ValueError(
                f"proj_size must be 0 (none) or smaller than hidden_size {self.hidden_size}, "
                f"got {self.proj_size}"
            )
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout must be a probability in [0, 1], got {self.dropout}")
        self._check_words()
        if self.input_mode == "skip" and self.input_size != self.hidden_size:
            raise ValueError(
                f"input_mode 'skip' adds x to every gate and needs input_size == hidden_size, "
                f"got {self.input_size} and {self.hidden_size}"
            )
        rows = len(self.gates) * self.hidden_size
        if self.input_mode == "gates" and self.input_size != rows:
            raise ValueError(
                f"input_mode 'gates' takes x for each gate and needs input_size == gates * "
                f"hidden_size, {rows} here, got {self.input_size}"
            )
        if self.cell_clip is not None and not self.cell_clip[0] <= self.cell_clip[1]:
            raise ValueError(f"cell_clip needs low <= high, neither nan, got {self.cell_clip}")
        object.__setattr__(self, "directions", 2 if self.bidirectional else 1)
        object.__setattr__(self, "output_size", self.proj_size or self.hidden_size)
        object.__setattr__(self, "chains", self.num_layers * self.directions)
        widths = (self.output_size,) + (self.hidden_size,) * (len(self.states) - 1)
        object.__setattr__(self, "state_sizes", widths)
        object.__setattr__(self, "text", self._text())

    def _check_words(self) -> None:
        if self.wavefront is not None:
            object.__setattr__(self, "wavefront", whole("wavefront", self.wavefront))
            if not 0 <= self.wavefront <= LARGEST:
                raise ValueError(
                    "wavefront must be None, 0 (one layer after the other), 1 (one launch) or the "
                    f"steps of a chunk, at most {LARGEST}, got {self.wavefront}"
                )
        for name, valid in (
            ("bias_mode", BIAS_MODES),
            ("input_mode", INPUT_MODES),
            ("precision", PRECISIONS),
            ("algorithm", ALGORITHMS),
            ("recompute", RECOMPUTE),
        ):
            if getattr(self, name) not in valid:
                given = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(valid)}, got {given!r}")

    @property
    def empty(self) -> bool:
        """Whether it has no inputs or no units."""
        return not self.input_size or not self.hidden_size

    def drops(self, training: bool) -> bool:
        """Whether a call in this mode draws dropout masks."""
        # a plain bool, where a compiler has made the numbers symbolic
        return True if training and self.dropout > 0 and self.num_layers > 1 else False  # noqa: SIM210

    @property
    def input_bias(self) -> bool:
        return self.bias_mode in ("double", "input")

    @property
    def recurrent_bias(self) -> bool:
        return self.bias_mode in ("double", "recurrent")

    def layer_input(self, layer: int) -> int:
        """The width of what layer `layer` reads: I, then D * O."""
        return self.input_size if layer == 0 else self.directions * self.output_size

    def _text(self) -> str:
        words = []
        for given in fields(self):
            if not given.init:
                continue
            value = getattr(self, given.name)
            if value != given.default:
                if isinstance(value, tuple):
                    value = ",".join(map(str, value))
                words.append(f"{given.name}={value}")
        return " ".join(words)

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _parse, (self.text,)  # what is read from a file is checked as any other

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """The spec whose text this is."""
        return _parse(text)

    def with_(self, **changes: object) -> "Spec":
        return replace(self, **changes)  # type: ignore[arg-type]  # dataclass fields by name


@memo(4096)
def _parse(text: str) -> Spec:
    words = dict(word.split("=", 1) for word in text.split())
    values: dict[str, object] = {}
    for name, word in words.items():
        if name in ("gates", "states", "unit_params"):
            values[name] = tuple(word.split(","))
        elif name == "cell_clip":
            low, high = word.split(",")
            values[name] = (float(low), float(high))
        elif name == "dropout":
            values[name] = float(word)
        elif name in ("bidirectional", "reset_dropout_state", "reverse"):
            values[name] = word == "True"
        elif name in ("cell", "bias_mode", "input_mode", "precision", "algorithm", "recompute"):
            values[name] = word
        else:
            values[name] = int(word)
    return Spec(**values)  # type: ignore[arg-type]  # the words of one spec's own text


torch.serialization.add_safe_globals([_parse])  # torch.load(weights_only=True) may call it


def clip_bounds(clip: Any) -> tuple[float, float] | None:
    """A `cell_clip` as users give it, one symmetric bound or a pair, as a pair or None."""
    if clip is None:
        return None
    symmetric = isinstance(clip, numbers.Real) and not isinstance(clip, bool)
    if symmetric and clip < 0:
        raise ValueError(f"cell_clip must not be negative, got {clip}")
    ends = (-float(clip), float(clip)) if symmetric else clip
    pair = isinstance(ends, tuple | list) and len(ends) == 2
    if not pair or not all(isinstance(end, numbers.Real) for end in ends):
        raise ValueError(f"cell_clip must be a number or a pair (low, high), got {clip!r}")
    return float(ends[0]), float(ends[1])


def precision_of(spec: Spec, dtype: torch.dtype, device: str) -> str:
    """What float32 products may be computed in: "ieee", "tf32", or "bf16" on a CPU.

    By the spec, or else on a GPU by torch's setting for recurrent networks as it is now.
    """
    asked = spec.precision
    if asked == "default" and dtype == torch.float32 and device == "cuda":
        asked = _SETTING.fp32_precision
    if asked == "bf16" and dtype == torch.float32 and device == "cpu":
        return asked
    return "ieee" if asked == "ieee" else "tf32"


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch.", such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Problem:
    """What one call asks of a network: everything by which a backend may refuse.

    Args:
        device: the device's type, "cpu" or "cuda"; capability: its compute capability, on CUDA;
            processors: how many multiprocessors it has, where known.
        grad: the call keeps what backward needs.
        training: the mode of the module. It decides on dropout between layers alone, see `drops`;
            gradients follow `grad`.
        transform: `torch.func` or forward mode asks for what only the reference has.
        steps: T, where known; reset_state: resets begin from states that are given. They are set
            for `explain` alone: what a call does follows from its own (`ScheduleKey`).
        batch: B, where known; it decides at most which of two backends is faster.
        generator: dropout masks are to follow a generator that the caller gave.
        precision: of float32 products, "ieee", "tf32" or "bf16"; by default as `precision_of` says
            when the problem is made. "int8": gate matrices are int8, which the cpu backend reads.
        opaque: why no address may be taken of one of its tensors, in words; or empty.
    """

    spec: Spec
    dtype: torch.dtype
    device: str
    capability: tuple[int, int] | None = None
    grad: bool = False
    training: bool = False
    lengths: bool = False
    reset: bool = False
    return_states: bool = False
    transform: bool = False
    steps: int | None = None
    batch: int | None = None
    generator: bool = False
    precision: str = ""
    processors: int | None = None
    opaque: str = ""
    reset_state: bool = False

    def __post_init__(self) -> None:
        if not self.precision:
            found = precision_of(self.spec, self.dtype, self.device)
            object.__setattr__(self, "precision", found)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # of seventeen fields: each look-up asks for it, and a problem that is traced never does
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        # texts have another hash in another process
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def dtype_name(self) -> str:
        """The name of its dtype without "torch."."""
        return dtype_name(self.dtype)

    @property
    def drops(self) -> bool:
        """Whether this call draws dropout masks."""
        return self.spec.drops(self.training)

    def __str__(self) -> str:
        flags = [name for name in FLAGS if getattr(self, name)]
        dtype = self.dtype_name
        sizes = [
            f"{letter}={value}"
            for letter, value in (("T", self.steps), ("B", self.batch))
            if value is not None
        ]
        return " ".join([str(self.spec), *sizes, dtype, self.device, *flags])
