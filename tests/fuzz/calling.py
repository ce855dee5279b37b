"""The verdict on a call: ours as drawn, beside the reference on plain tensors and torch.nn."""

import gc
import re
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import openrnn
from openrnn.errors import NoBackendError

from . import judge
from .building import NARROW, Given, around, cast, drawn, twin
from .calls import Answer, evaluate, plains, ran
from .plans import MODULES, Plan, draw
from .tensors import CHANGED, SAME, VALUED, WRAPPED, plain
from .verdict import (
    DISCARDED,
    FAULT,
    FOREIGN,
    REFUSED,
    RIGHT,
    Outcome,
    Unfit,
    first_line,
    not_a_sentence,
    place,
    signature,
)  # fmt: skip

# layouts and dtypes that docs/semantics.md leaves to torch.nn
NOT_DENSE = {"sparse", "sparse_csr", "mkldnn", "quantized", "nested", "nested_jagged", "masked"}
NOT_DENSE |= {"dtensor", "resized_storage", "meta"}
DTYPES = {"float64", "float32", "float16", "bfloat16", "float8", "complex64", "bool", "int8"}
DTYPES |= {"int64", "uint16"}
# what torch says of tensors of inference mode, in words that are for users; and what tensors of
# some classes say themselves where they meet others in an operator of torch
TORCHS = re.compile(
    r"Inference tensors cannot be saved for backward|aten\S+ got mixed torch.Tensor and DTensor"
    r"|Please convert all Tensors to FakeTensors first.*Found in aten"
    r"|Multiple dispatch failed for 'torch._ops.aten"
)

Say = Callable[[str], None]
Tried = tuple[Answer | None, BaseException | None]


def _try(plan: Plan, call: Callable[[], Answer]) -> Tried:
    try:
        with around(plan):
            return call(), None
    except Unfit:
        raise
    except Exception as error:
        if plan.way == "checkpoint":  # its generator pops torch's hooks only when it is freed
            traceback.clear_frames(error.__traceback__)
        return None, error


def check(seed: int, device: str, small: bool) -> Callable[[int, Say], Outcome]:
    """The draw of calls: a function of a number, which also says what it is about to do."""

    def one(index: int, say: Say) -> Outcome:
        plan = draw(seed, index, device, small)
        say(f"drawing\n{plan}")
        torch.set_num_threads(plan.threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                verdict, words, group = _verdict(plan, say)
            except Unfit as error:
                verdict, words, group = DISCARDED, str(error), ""
            if verdict == RIGHT and index % 50 == 0:
                words = _canary()
                verdict, group = (
                    (FAULT, "a call changed what later calls give") if words else (RIGHT, "")
                )
        return Outcome("calls", index, verdict, words, group, str(plan), plan.odd)

    return one


def _verdict(plan: Plan, say: Say) -> tuple[str, str, str]:
    odd, true = drawn(plan)
    before = {name: plain(value) for name, value in {**odd.inputs, **odd.params}.items()}
    say(f"ours\n{plan}")
    dtype = plan.dtype
    answer, error = _try(plan, lambda: ran(plan, plan.backend, dtype, odd, odd=True))
    found = None if answer is None else plains(answer)
    if answer is not None:
        for name, value in {**odd.inputs, **odd.params}.items():
            after = plain(value)
            if after is not None and judge.distance(after, before[name]):
                return FAULT, f"changed {name} in place", signature("changed its input")
    readable = (
        all(
            value is not None or {**odd.inputs, **odd.params}[name] is None
            for name, value in {**true.inputs, **true.params}.items()
        )
        and plan.ambient != "fake_mode"
    )
    plain_answer, refusal = None, None
    if readable:
        say(f"reference\n{plan}")
        plain_answer, refusal = _try(plan, lambda: ran(plan, "reference", dtype, true, odd=False))
    if error is not None:
        return _refused(plan, odd, error, refusal, say)
    if found is None:
        return RIGHT, "an answer without numbers", ""
    if not readable:
        if 0 in (plan.steps, plan.batch):
            return RIGHT, "nothing had to be read", ""
        return FAULT, "answers what nobody can read", signature("answers")
    if plain_answer is None:
        words = f"answers where the reference refuses the same plain tensors: {first_line(refusal)}"
        return FAULT, words, signature("answers", first_line(refusal))
    words = _compared(plan, true, found, plains(plain_answer) or {})
    if words:
        return FAULT, words, signature("differs", words.split(" off by")[0])
    words = _twin(plan, odd, found, say) or _leak(plan, odd) or _again(plan, odd, found)
    return (FAULT, words, signature(words)) if words else (RIGHT, "", "")


def _refused(
    plan: Plan, odd: Given, error: BaseException, refusal: BaseException | None, say: Say
) -> tuple[str, str, str]:
    """An error: a sentence of ours, for an input that torch.nn does not take either."""
    said = f"{type(error).__name__}: {first_line(error)}"
    why = not_a_sentence(error)
    if plan.ambient == "save_on_cpu" and why == "not raised by us":
        raise Unfit("torch's hooks")
    if plan.ambient == "anomaly" and "returned nan values" in said:
        raise Unfit("anomaly mode, which says so of nan gradients")
    if plan.way == "batched_grads" and (plan.ambient or _wrapped(plan)):
        raise Unfit("torch has no batching rule for what its own modes and wrappers ask")
    torchs, torch_error = _torch(plan, odd, say)
    if why == "not raised by us" and first_line(error) == first_line(torch_error):
        why = None if not FOREIGN.search(first_line(error)) else why  # torch's own sentence
    if TORCHS.match(first_line(error)):
        return REFUSED, said, ""
    if "Creating a new Tensor subclass" in said:
        raise Unfit("two subclasses that torch cannot mix")
    if why is not None:
        where = place(error)
        return FAULT, f"{why}: {said} ({where})", signature(why, where, said, "")
    named = plan.backend in ("cpu", "fused", "cudnn") and isinstance(error, NoBackendError)
    if torchs is not None and not named and plan.backend != "cpu" and not _ours_to_refuse(plan):
        words = f"refuses what torch.nn takes: {said}"
        return FAULT, words, signature("refuses what torch.nn takes", said)
    harmless = not plan.argument and all(
        kind in SAME.keys() - WRAPPED or kind in VALUED for _, kind in plan.twists
    )
    good = plan.lengths in ("", "int64") and plan.reset in ("", "bool") and plan.packed == "good"
    if harmless and good and not named and not plan.ambient and refusal is None:
        return FAULT, f"refuses a right call: {said}", signature("refuses a right call", said)
    return REFUSED, said, ""


def _ours_to_refuse(plan: Plan) -> bool:
    """Whether we may refuse what torch.nn takes: layouts that are not dense, types that are mixed.

    And parameters whose shapes somebody changed, and packed sequences made by hand: torch.nn
    broadcasts them, or reads them as they come.
    """
    for what, kind in plan.twists:
        if kind in NOT_DENSE or kind in DTYPES or (what.startswith("param") and kind in CHANGED):
            return True
        if plan.face in MODULES and (what, kind) == ("x", "flat"):
            return True  # beside a state with a batch
    if plan.argument.partition("=")[2] in (
        "bool",
        "tensor",
        "none",
        "list",
        "numpy_array",
        "float",
    ):
        return True  # of sizes and flags: one kind of number
    return plan.way == "packed" and plan.packed != "good"


def _wrapped(plan: Plan) -> bool:
    """Whether a tensor of the call is of a class with a dispatch of its own."""
    return any(kind in WRAPPED for kind in (*(k for _, k in plan.twists), plan.lengths, plan.reset))


def _torch(plan: Plan, odd: Given, say: Say) -> Tried:
    """torch.nn's answer to the same, or its error; neither where it has no such call."""
    module = twin(plan, plan.dtype)
    if module is None or plan.ambient == "fake_mode":
        return None, None
    module.train(plan.training)
    say(f"torch.nn\n{plan}")
    return _try(plan, lambda: evaluate(plan, module, odd, ours=False, odd=True))


def _compared(plan: Plan, true: Given, found: judge.Found, reference: judge.Found) -> str:
    """What is wrong with an answer beside the reference's, in the same dtype and in float64."""
    eps = torch.finfo(plan.dtype).eps
    if plan.ambient.startswith("autocast") and plan.dtype != torch.float64:
        eps = max(eps, 2.0**-8 if plan.ambient.endswith("bf16") else 2.0**-10)
    if plan.device == "cuda" and plan.dtype == torch.float32:
        eps = max(eps, 2.0**-10)  # tf32
    quiet = Plan(**{**vars(plan), "ambient": ""})

    def near(attempt: int, noise: float = eps) -> judge.Found:
        wide = cast(true, plan.dtype, torch.float64, noise, attempt)
        answer = ran(quiet, "reference", torch.float64, wide, odd=False)
        return plains(answer) or {}

    narrow = plan.dtype != torch.float64 or eps != torch.finfo(torch.float64).eps
    exact = None
    if narrow:
        try:
            exact = near(0, 0.0)
        except Exception:  # mixed dtypes that only the drawn one takes
            exact = None
    if exact is not None and exact.keys() != found.keys():
        exact = None
    return judge.wrong(found, reference, exact, eps, near)


def _twin(plan: Plan, odd: Given, found: judge.Found, say: Say) -> str:
    """Where torch.nn gives something else for plain tensors; reference and ours may both be off."""
    if plan.twists or plan.ambient or plan.dtype in NARROW or plan.device != "cpu":
        return ""
    answer, _ = _torch(plan, odd, say)
    numbers = answer and plains(answer)
    if not numbers:
        return ""
    if plan.way == "packed" and plan.packed != "good":
        return ""
    if numbers.keys() != found.keys():
        return f"gives {' '.join(found)}, torch.nn {' '.join(numbers)}"
    for name, value in numbers.items():
        off = judge.distance(value, found[name])
        if off > 2000 * torch.finfo(plan.dtype).eps * max(1.0, judge.size(value)):
            return f"{name} is not torch.nn's, off by {off:.0e}"
    return ""


def _leak(plan: Plan, odd: Given) -> str:
    """Whether something still holds a call's tensors once nobody else does."""
    if plan.twists or plan.seed % 4 or plan.way != "grad" or plan.ambient:
        return ""
    values = {name: v.detach().clone() if isinstance(v, Tensor) else v
              for name, v in odd.inputs.items()}  # fmt: skip
    mine = Given(values, odd.params, frozenset())
    watched = [weakref.ref(v) for v in values.values() if isinstance(v, Tensor)]
    answer = ran(plan, plan.backend, plan.dtype, mine, odd=True)
    watched += [weakref.ref(value) for _, value in answer if isinstance(value, Tensor)]
    del values, mine, answer
    for _ in range(20):  # a thread of torch's engine lets go of a backward a little later
        if all(one() is None for one in watched):
            return ""
        gc.collect()
        time.sleep(0.05)
    return "leak: a call's tensors live on"


def _again(plan: Plan, odd: Given, found: judge.Found) -> str:
    """Whether the same call gives other bits."""
    if plan.seed % 5 or plan.way not in ("grad", "no_grad"):
        return ""
    with around(plan):
        numbers = plains(ran(plan, plan.backend, plan.dtype, odd, odd=True)) or {}
    for name, value in numbers.items():
        if judge.distance(value, found[name]):
            return f"another {name} when asked again"
    return ""


_first: list[Tensor] = []


def _canary() -> str:
    """Whether a fixed call still gives what it gave first in this process, and modes are clean."""
    modes: dict[str, Any] = {
        "default dtype": torch.get_default_dtype() == torch.float32,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": not torch.is_inference_mode_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack() == 0,
        "anomaly mode": not torch.is_anomaly_enabled(),
        "autocast": not torch.is_autocast_enabled("cpu"),
    }
    for name, clean in modes.items():
        if not clean:
            return f"{name} is left changed"
    torch.set_num_threads(1)
    dice = torch.Generator().manual_seed(0)
    layer = openrnn.LSTM(3, 4, num_layers=2)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=dice) * 0.5
    x = torch.randn(5, 2, 3, generator=dice).requires_grad_()
    y = layer(x)[0]
    found = [y.detach(), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])]
    if openrnn.ops.params_size(openrnn.ops.spec("lstm", 3, 4, num_layers=2)) != 304:
        return "the size of a spec's parameters has changed"
    if not _first:
        _first.extend(found)
    for old, new in zip(_first, found):
        if not torch.equal(old, new):
            return "a plain call gives other numbers than before"
    return ""


def warm(small: bool) -> None:
    """Compiles the cells of calls into the cache."""
    from openrnn import cells

    from .plans import CLIP

    keys = ["lstm", "gru"] if small else ["lstm", "gru", "rnn_tanh", "rnn_relu", "peephole_lstm"]
    torch.set_num_threads(1)
    ways: list[tuple[str, torch.dtype, Any]] = [(key, torch.float32, None) for key in keys]
    if not small:
        ways += [("lstm", torch.float64, None), ("lstm", torch.float32, CLIP)]
    for key, dtype, clip in ways:
        layer = openrnn.Recurrent(cells.lookup(key), 3, 4, cell_clip=clip, dtype=dtype)
        for steps, batch in ((2, 2), (20, 5)):  # packed products are compiled by themselves
            y = layer(torch.randn(steps, batch, 3, dtype=dtype, requires_grad=True))[0]
            y.sum().backward()
