"""What a call is, drawn at random: a layer, its options, its tensors, what is odd about them."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from openrnn import cells
from openrnn.spec import BIAS_MODES

from .tensors import CHANGED, SAME, STRANGE, VALUED, WRAPPED

# the cells that calls use: few, as each costs a compilation for each dtype
LAYERS = ("LSTM", "GRU", "RNN", "RNN_relu")
MODULES = ("LSTMCell", "GRUCell", "RNNCell", "RNNCell_relu")
CUSTOM = ("peephole_lstm", "gru_reset_before")
KEYS = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh", "RNN_relu": "rnn_relu"}
CLIP = (-0.4, 0.25)
GATES = {key: len(cell.gates) for key, cell in cells._CELLS.items()}

WAYS = (  # how a call is made and differentiated
    ["grad"] * 40 + ["no_grad"] * 8 + ["inference"] * 6
    + ["twice", "batched_grads", "checkpoint", "func_grad", "vmap", "ensemble", "jvp", "dual"] * 2
    + ["step"] * 6 + ["packed"] * 6
)  # fmt: skip
AMBIENT = ("autocast_bf16", "autocast_fp16", "anomaly", "default_float64", "default_float16",
           "function_mode", "dispatch_mode", "fake_mode", "save_on_cpu")  # fmt: skip
PLAIN_WAYS = ("grad", "no_grad", "inference", "step")


# arguments of constructors in other forms: of the same value, or of none that makes sense
FORMS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.int64,
    "numpy_array": np.array,
    "tensor": torch.tensor,
    "float": float,
    "fraction": lambda value: value + 0.5,
    "negative": lambda value: -value - 1,
    "bool": lambda value: bool(value) if value in (0, 1) else float(value),
    "text": str,
    "none": lambda value: None,
    "list": lambda value: [value],
}
SIZES = ("input", "hidden", "num_layers", "proj_size")
WORDS = ("bias_mode", "backend", "cell_clip", "input_mode", "recompute", "precision", "algorithm")
FLAGS = ("dropout", "bias", "bidirectional", "batch_first")


@dataclass
class Plan:
    """One call. `twists` are (what, kind) of its tensors, `ambient` the modes that are on."""

    face: str
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 5
    batch: int = 3
    input: int = 3
    hidden: int = 4
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: str = "auto"
    way: str = "grad"
    rank: int = 3
    states: bool = False
    lengths: str = ""
    reset: str = ""
    reset_state: bool = False
    return_states: bool = False
    padding_value: float = 0.0
    training: bool = True
    needs: str = "all"
    twists: tuple[tuple[str, str], ...] = ()
    by: str = "functional_call"  # or "data": how odd parameters come in
    ambient: str = ""
    threads: int = 1
    fresh: bool = False  # a cell that this process has not traced
    packed: str = "good"
    argument: str = ""  # one of the constructor, and its form: hidden=tensor

    @property
    def batch_first(self) -> bool:
        return bool(self.options.get("batch_first"))

    @property
    def drops(self) -> bool:
        return bool(self.options.get("dropout")) and self.training

    @property
    def key(self) -> str:
        """The key of the cell."""
        name = self.face.removesuffix("_relu").removesuffix("Cell")
        return KEYS.get(f"{name}_relu" if self.face.endswith("_relu") else name, self.face)

    def __str__(self) -> str:
        words = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default and not (each.name == "options" and not value):
                if each.name == "twists":
                    value = ",".join(f"{what}={kind}" for what, kind in value)
                words.append(f"{each.name}={value}")
        return " ".join(words)

    @property
    def odd(self) -> frozenset[str]:
        """What is odd about it, in words: groups of faults go by them."""
        words = {f"{what.rstrip('0123456789')}={kind}" for what, kind in self.twists}
        words |= {f"lengths={self.lengths}"} - {"lengths=", "lengths=int64"}
        words |= {f"reset={self.reset}"} - {"reset=", "reset=bool", "reset=float"}
        words |= {
            self.argument,
            self.ambient,
            self.way if self.way != "packed" else f"packed={self.packed}",
        }
        return frozenset(words - {"", "grad", "packed=good", "no_grad", "inference"})


def odd_of(text: str) -> frozenset[str]:
    """The same from the text of a plan whose process has died."""
    words = set()
    for word in text.split():
        name, _, value = word.partition("=")
        if name == "twists":
            words |= {re.sub(r"\d+=", "=", each) for each in value.split(",")}
        elif name in ("lengths", "reset"):
            words.add(word)
        elif name == "argument" or name in ("ambient", "way"):
            words.add(value)
        elif name == "packed":
            words.add(word)
    return frozenset(words - {"lengths=int64", "reset=bool", "reset=float", "no_grad", "inference"})


def draw(seed: int, index: int, device: str, small: bool) -> Plan:
    """The plan of a number: the same wherever it is drawn."""
    dice = random.Random(f"calls {seed} {index} {device} {small}")
    if small:
        face = dice.choice(
            ("LSTM", "LSTM", "GRU", "GRU", "LSTMCell", "GRUCell", "ops_lstm", "ops_gru")
        )
    else:
        faces = (*LAYERS, *LAYERS, *MODULES, *CUSTOM, "ops_lstm", "ops_gru", "ops_rnn_tanh")
        face = dice.choice(faces)
    plan = Plan(face, dice.randrange(2**31), device=device)
    plan.steps = dice.choice((1, 2, 3, 5, 7, 13, 29) if dice.random() < 0.95 else (0,))
    plan.batch = dice.choice((1, 2, 3, 5, 7, 17) if dice.random() < 0.95 else (0, 64))
    plan.input, plan.hidden = (dice.choice((1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 33)) for _ in "IH")
    if dice.random() < 0.03:
        plan.input, plan.hidden = dice.choice(((64, 130), (1, 200), (100, 1)))
    plan.dtype = _dtype(dice, plan, small)
    _options(dice, plan, small)
    plan.way = dice.choice(WAYS)
    _asked(dice, plan)
    if dice.random() < 0.12:
        plan.ambient = dice.choice(AMBIENT)
    if plan.way in ("vmap", "ensemble"):
        plan.training = False  # randomness under vmap has rules of its own
        plan.ambient = plan.ambient.removeprefix("autocast_bf16").removeprefix("autocast_fp16")
    if plan.ambient == "fake_mode" and plan.way not in ("grad", "no_grad"):
        plan.ambient = ""
    if dice.random() < 0.04:
        plan.argument = _argument(dice)
    plan.threads = 2 if dice.random() < 0.05 else 1
    plan.fresh = not small and dice.random() < 0.01
    _twists(dice, plan)
    return plan


def _argument(dice: random.Random) -> str:
    """An argument in a form of the same value, or in one that means nothing."""
    name = dice.choice((*SIZES, *SIZES, *WORDS, *FLAGS))
    forms = [*FORMS]
    if name in WORDS:
        forms = ["text", "list"]
    if name in FLAGS:
        forms = ["numpy", "tensor", "float", "bool"]
    return f"{name}={dice.choice(forms)}"


def _dtype(dice: random.Random, plan: Plan, small: bool) -> torch.dtype:
    narrow = (torch.float16, torch.bfloat16)
    if dice.random() < 0.25:
        return dice.choice(narrow)
    # one more compilation a cell: float64 is a matter of few
    wide = plan.key in ("ops_lstm", "lstm") and not small
    return torch.float64 if wide and dice.random() < 0.25 else torch.float32


def _options(dice: random.Random, plan: Plan, small: bool) -> None:
    options = plan.options
    backends = {"cpu": ("cpu", "reference"), "cuda": ("fused", "cudnn", "reference")}
    if dice.random() < 0.3:
        plan.backend = dice.choice(backends[plan.device])
    if plan.face in MODULES:
        options.update({"bias": False} if dice.random() < 0.3 else {})
        return
    layers = dice.choice((1, 1, 1, 2, 3))
    options["num_layers"] = layers
    way = dice.random()
    options["bidirectional"] = way < 0.3
    if way > 0.85:
        options["reverse"] = True
    if layers > 1 and dice.random() < 0.4:
        options["dropout"] = dice.choice((0.3, 0.5, 1.0))
        if plan.device == "cuda":  # cuDNN's masks are its own
            plan.backend = dice.choice(("fused", "reference"))
    biases: list[dict[str, Any]] = [{"bias_mode": mode} for mode in BIAS_MODES] + [{}] * 12
    if not plan.face.startswith("ops"):
        options["batch_first"] = dice.random() < 0.4
        biases += [{"bias": False}] * 4
    options |= dice.choice(biases)
    mode = dice.random()
    if mode < 0.15:
        options["input_mode"] = "skip" if mode < 0.1 else "gates"
        plan.input = plan.hidden * (1 if mode < 0.1 else GATES[plan.key.removeprefix("ops_")])
    if plan.key in ("lstm", "ops_lstm", "peephole_lstm") and plan.hidden > 1:
        if dice.random() < 0.2:
            options["proj_size"] = dice.randrange(1, plan.hidden)
        clips = plan.key != "peephole_lstm" and plan.dtype != torch.float64 and not small
        if clips and dice.random() < 0.1:
            options["cell_clip"] = CLIP
    if dice.random() < 0.05:
        options["recompute"] = "gates"
    while plan.steps * layers > 30:
        plan.steps //= 2


def _asked(dice: random.Random, plan: Plan) -> None:
    """What the call is given beside x."""
    plan.states = dice.random() < 0.45
    plan.training = dice.random() < 0.7
    plan.needs = dice.choice(("all", "all", "some", "x", "params", "none"))
    if plan.face in MODULES:
        plan.rank = dice.choice((2, 2, 2, 1))
        if plan.way in ("step", "packed"):
            plan.way = "grad"
        return
    if plan.face.startswith("ops"):
        plan.way = "grad" if dice.random() < 0.8 else "no_grad"
    else:
        plan.rank = 2 if dice.random() < 0.15 else 3
    if plan.way == "step":
        plan.options["bidirectional"] = dice.random() < 0.03
        plan.options.pop("reverse", None)
        plan.steps = 1
    if plan.way == "packed":
        plan.rank = 3
        plan.packed = dice.choice(PACKED)
        plan.steps, plan.batch = max(1, plan.steps), max(1, plan.batch)
        return
    if dice.random() < 0.3 and plan.way != "step":
        plan.lengths = "given"
        if dice.random() < 0.2 and not plan.face.startswith("ops"):
            plan.padding_value = -1.5
    if dice.random() < 0.3:
        plan.reset = "given"
        plan.reset_state = dice.random() < 0.4
    plan.return_states = dice.random() < 0.2 and plan.way != "step"


PACKED = (
    ["good"] * 8
    + ["unsorted", "sum_short", "sum_long", "rising", "zero", "negative", "float_sizes", "no_sizes",
       "two_dim_sizes", "int32_sizes", "data_1d", "data_3d", "wrong_order", "order_out_of_range",
       "order_short", "data_odd"]
)  # fmt: skip


def _twists(dice: random.Random, plan: Plan) -> None:
    """Nothing odd in half of the calls, mostly one thing in the others."""
    count = dice.choice((0, 0, 0, 1, 1, 1, 2))
    if plan.ambient == "fake_mode" or plan.argument:
        count = 0
    targets = ["x"] * 5 + ["param"] * 4
    targets += ["state"] * 4 * plan.states + ["reset_state"] * 3 * plan.reset_state
    targets += ["cotangent"] * (plan.way == "grad")
    if plan.way in ("jvp", "dual"):  # torch's own forward mode takes no lazy or expanded x
        targets = [what for what in targets if what == "param"]
        count = min(count, 1)
    odd = plan.way in PLAIN_WAYS and not plan.ambient
    kinds = [*SAME] * 4 + [*VALUED]
    if odd:
        kinds += [*STRANGE] * 2 + [*CHANGED] * 2
    if not odd or plan.way == "inference":  # what modes make of wrappers is torch's affair
        kinds = [kind for kind in kinds if kind not in WRAPPED | {"dtensor", "masked"}]
    found = []
    for target in dict.fromkeys(dice.sample(targets, count)):
        places = {"param": 8, "state": 2}.get(target)
        what = f"{target}{dice.randrange(places)}" if places else target
        kind = dice.choice(kinds)
        if what == "cotangent":
            kind = dice.choice([*SAME])
        module = what.startswith("param") and not plan.face.startswith("ops")
        if module and kind in ("none", "number", "text", "numpy", "list", "tuple", "duck"):
            kind = "negative_bit"  # torch's modules hold tensors alone
        if plan.dtype in (torch.float16, torch.bfloat16) and kind in ("huge", "infinite", "nan"):
            kind = "saturating"
        zeros = what.startswith("param") or (what == "x" and not plan.states)
        if zeros and kind in ("nan", "infinite"):
            kind = "saturating"  # the product of zeros with it may be left out (docs/semantics.md)
        found.append((what, kind))
    plan.twists = tuple(found)
    plan.by = dice.choice(("functional_call", "data"))
    strange = WRAPPED | (STRANGE.keys() - {"resized_storage"})
    if any(what.startswith("param") and kind in strange for what, kind in found):
        plan.by = "functional_call"  # torch's own operators crash on such a parameter's data
        plan.way = "no_grad" if plan.way == "step" else plan.way
    elif plan.way == "step":
        plan.by = "data"
