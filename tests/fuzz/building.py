"""A plan's tensors and modules: as drawn, or plain, ours or torch's."""

import inspect
import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import openrnn
from openrnn import cells, ops
from openrnn.params import module_slots

from .plans import CUSTOM, FORMS, LAYERS, MODULES, Plan
from .tensors import lengths_kinds, reset_kinds, twisted
from .verdict import Unfit

# arguments that torch.nn does not have
BEYOND = ("bias_mode", "backend", "cell_clip", "input_mode", "recompute", "precision", "algorithm")
NARROW = (torch.float16, torch.bfloat16)


@dataclass
class Given:
    """The tensors of a call by name, as drawn or plain; `params` are those of the module."""

    inputs: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def around(plan: Plan) -> Iterator[None]:
    """The mode that the call is made in."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        if plan.ambient.startswith("autocast"):
            kind = torch.bfloat16 if plan.ambient.endswith("bf16") else torch.float16
            stack.enter_context(torch.autocast(plan.device, kind))
        elif plan.ambient == "anomaly":
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        elif plan.ambient.startswith("default_float"):
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(getattr(torch, plan.ambient.removeprefix("default_")))
        elif plan.ambient == "function_mode":
            stack.enter_context(_Functions())
        elif plan.ambient == "dispatch_mode":
            stack.enter_context(_Dispatch())
        elif plan.ambient == "save_on_cpu":
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        yield


def _formed(plan: Plan, options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Sizes and options with the one argument that has another form."""
    name, _, form = plan.argument.partition("=")
    values = {"input": plan.input, "hidden": plan.hidden, **options}
    if name:
        value = values.get(name, 0 if name in ("proj_size", "dropout") else 1)
        if not isinstance(value, (int, float)):
            value = 1
        values[name] = FORMS[form](value)
    return values.pop("input"), values.pop("hidden"), values


def made(plan: Plan, backend: str, dtype: torch.dtype) -> Any:
    """The module of ours, or the spec of an explicit operator."""
    options = dict(plan.options)
    if plan.face.startswith("ops"):
        if plan.argument.partition("=")[0] in ("batch_first", "backend", "bias", "dtype"):
            raise Unfit("a spec has no such argument")
        both, reverse = options.pop("bidirectional"), options.pop("reverse", False)
        options["direction"] = (
            "bidirectional" if both else "reverse" if reverse else "unidirectional"
        )
        input_size, hidden, options = _formed(plan, options)
        options["num_proj"] = options.pop("proj_size", 0)
        if "bidirectional" in options:
            options["direction"] = options.pop("bidirectional")
        return ops.spec(plan.face.removeprefix("ops_"), input_size, hidden, **options)
    options |= {"device": plan.device, "dtype": dtype, "backend": backend}
    if plan.argument:
        return _odd_module(plan, *_formed(plan, options))
    if plan.fresh and plan.face in LAYERS:
        old = cells.lookup(plan.key)
        again = openrnn.cell(gates=old.gates, states=old.states, name=old.name)
        return openrnn.Recurrent(again(old.function), plan.input, plan.hidden, **options)
    if plan.face in CUSTOM:
        cell = cells.lookup(plan.face)
        return openrnn.Recurrent(cell, plan.input, plan.hidden, **options)
    name = plan.face.removesuffix("_relu")
    if name != plan.face:
        options["nonlinearity"] = "relu"
    return getattr(openrnn, name)(plan.input, plan.hidden, **options)


def _odd_module(plan: Plan, input_size: Any, hidden: Any, options: dict[str, Any]) -> Any:
    if plan.face in CUSTOM:
        return openrnn.Recurrent(cells.lookup(plan.face), input_size, hidden, **options)
    name = plan.face.removesuffix("_relu")
    if name != plan.face:
        options["nonlinearity"] = "relu"
    known = inspect.signature(getattr(openrnn, name)).parameters
    if plan.argument.partition("=")[0] not in {*known, "input", "hidden"}:
        raise Unfit(f"{name} has no such argument")
    return getattr(openrnn, name)(input_size, hidden, **options)


def twin(plan: Plan, dtype: torch.dtype) -> nn.Module | None:
    """torch.nn's module, where it has one for such a call."""
    options = dict(plan.options)
    mode = options.pop("bias_mode", None)
    if mode in ("input", "recurrent") or plan.face not in (*LAYERS, *MODULES):
        return None
    if mode == "none":
        options["bias"] = False
    beyond = {"input_mode", "cell_clip", "reverse"} & options.keys()
    if beyond or plan.lengths or plan.reset or plan.return_states or plan.drops:
        return None
    if plan.way in ("step", "twice", "batched_grads", "ensemble", "vmap", "jvp", "dual"):
        return None
    options.pop("recompute", None)
    name = plan.face.removesuffix("_relu")
    if name != plan.face:
        options["nonlinearity"] = "relu"
    options |= {"device": plan.device, "dtype": dtype}
    if plan.argument.partition("=")[0] in BEYOND:
        return None
    try:
        input_size, hidden, options = _formed(plan, options)
        return getattr(nn, name)(input_size, hidden, **options)
    except Exception:  # what torch.nn does not take
        return None


def spec_of(plan: Plan) -> Any:
    """What the network of a plan is."""
    found = made(replace(plan, fresh=False, argument=""), "reference", torch.float32)
    return found if plan.face.startswith("ops") else found._spec


def drawn(plan: Plan) -> tuple[Given, Given]:
    """The tensors as drawn, and the plain ones of the same values (None where there are none).

    Raises:
        Unfit: torch makes no such tensors.
    """
    spec = spec_of(plan)
    dice, coins = torch.Generator().manual_seed(plan.seed), random.Random(plan.seed)

    def uniform(*shape: int, bound: float = 1.0) -> Tensor:
        return ((torch.rand(shape, generator=dice, dtype=torch.float64) * 2 - 1) * bound).to(
            plan.device, plan.dtype
        )

    slots = module_slots(spec)
    odd, true = Given(), Given()
    twists = dict(plan.twists)

    def put(name: str, value: Tensor, where: str, twist: str | None) -> None:
        pair = twisted(twist, value) if twist else (value, value.clone())
        getattr(odd, where)[name], getattr(true, where)[name] = pair

    steps = () if plan.face in MODULES else (plan.steps,)
    batch = () if (plan.rank == 2 and steps) or plan.rank == 1 else (plan.batch,)
    shape = (*steps, *batch, plan.input)
    if plan.batch_first and len(shape) == 3:
        shape = (plan.batch, plan.steps, plan.input)
    if plan.way == "step":
        shape = (*batch, plan.input)
    put("x", uniform(*shape, bound=2.0), "inputs", twists.get("x"))
    if plan.face.startswith("ops"):
        count = sum(math.prod(slot.shape) for slot in slots)
        twist = next((kind for what, kind in plan.twists if what.startswith("param")), None)
        put("params", uniform(count, bound=1 / math.sqrt(plan.hidden)), "inputs", twist)
    else:
        for place, slot in enumerate(slots):
            name = slot.name.removesuffix("_l0") if plan.face in MODULES else slot.name
            bound = 1.5 / math.sqrt(slot.shape[1]) if len(slot.shape) == 2 else 1.0
            put(
                name,
                uniform(*slot.shape, bound=bound),
                "params",
                _of_param(plan, place, len(slots)),
            )
    for kind, wanted in (("state", plan.states), ("reset_state", plan.reset_state)):
        for place, width in enumerate(spec.state_sizes if wanted else ()):
            front = () if plan.face in MODULES else (spec.chains,)
            value = uniform(*front, *batch, width, bound=1.5)
            put(f"{kind}{place}", value, "inputs", twists.get(f"{kind}{place}", twists.get(kind)))
    _masks(plan, coins, dice, batch, odd, true)
    _needs(plan, coins, odd, true)
    return odd, true


def _of_param(plan: Plan, place: int, count: int) -> str | None:
    for what, kind in plan.twists:
        if what.startswith("param") and int(what.removeprefix("param")) % count == place:
            return kind
    return None


def _masks(
    plan: Plan, coins: random.Random, dice: torch.Generator, batch: tuple[int, ...],
    odd: Given, true: Given,
) -> None:  # fmt: skip
    there = (plan.device, plan.device, "cpu")
    if plan.lengths:
        good = torch.randint(0, plan.steps + 1, (plan.batch,), generator=dice).to(
            coins.choice(there)
        )
        plan.lengths, *pair = lengths_kinds(coins, good, plan.steps)
        _no_wrapper(plan, plan.lengths)
        odd.inputs["lengths"], true.inputs["lengths"] = pair
    if plan.reset:
        shape = batch if plan.way == "step" else (plan.steps, *batch)
        if plan.batch_first and len(shape) == 2:
            shape = shape[::-1]
        good = (torch.rand(shape or (1,), generator=dice) < 0.3).to(coins.choice(there))
        plan.reset, *pair = reset_kinds(coins, good if shape else good[0])
        _no_wrapper(plan, plan.reset)
        odd.inputs["reset"], true.inputs["reset"] = pair


def _no_wrapper(plan: Plan, kind: str) -> None:
    modes = ("inference", "jvp", "dual", "vmap", "ensemble", "func_grad")
    if plan.way in modes and kind in ("wrapper", "functional", "dtensor", "fake"):
        raise Unfit("torch takes no wrapper made outside of this mode or transform")


def _needs(plan: Plan, coins: random.Random, odd: Given, true: Given) -> None:
    """Which tensors require a gradient, of both alike; those that cannot are left out."""
    names = []
    for where in ("inputs", "params"):
        for name, value in getattr(odd, where).items():
            other = getattr(true, where)[name]
            floats = isinstance(value, Tensor) and value.dtype.is_floating_point
            floats = floats and isinstance(other, Tensor) and name not in ("lengths", "reset")
            wanted = {
                "all": True, "x": name == "x", "params": where == "params", "none": False,
                "some": coins.random() < 0.5,
            }[plan.needs]  # fmt: skip
            if floats and wanted and not value.is_inference():
                names.append(name)
    odd.needs = true.needs = frozenset(names)


def required(given: Given) -> list[Tensor]:
    """The leaves, in the order of names, made to require a gradient."""
    every = {**given.inputs, **given.params}
    try:
        return [every[name].requires_grad_() for name in sorted(given.needs)]
    except RuntimeError as error:
        raise Unfit(f"no leaf: {error}") from error


def cast(given: Given, dtype: torch.dtype, wide: torch.dtype, noise: float, seed: int) -> Given:
    """Plain tensors of `dtype` as `wide`, with a relative noise."""
    dice = torch.Generator().manual_seed(seed)

    def widened(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype != dtype:
            return value.clone()
        shifts = torch.rand(value.shape, generator=dice, dtype=torch.float64) * 2 - 1
        made = value.detach().double() * (1 + noise * shifts).to(value.device)
        return made.to(wide)

    return Given(
        {name: widened(value) for name, value in given.inputs.items()},
        {name: widened(value) for name, value in given.params.items()}, given.needs,
    )  # fmt: skip


def packed(plan: Plan, x: Tensor) -> PackedSequence:
    """Packed sequences of x (T, B, I) or (B, T, I), good ones or damaged by hand."""
    coins = random.Random(plan.seed + 2)
    lengths = torch.tensor([coins.randint(1, plan.steps) for _ in range(plan.batch)])
    first, rows = plan.batch_first, x.dim() == 3
    if not rows or min(x.shape) == 0:
        raise Unfit("nothing to pack")
    try:
        good = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
    except (RuntimeError, ValueError) as error:
        raise Unfit("torch packs no such x") from error
    data, sizes, order, back = good
    kind = plan.packed
    if kind == "order_out_of_range" and x.is_cuda:
        raise Unfit("torch.nn, too, leaves such an index to an assertion of the device")
    falling = sizes.sort(descending=True).values
    odd = {
        "sum_short": (data, sizes[:-1] if sizes.numel() > 1 else sizes + 1, order, back),
        "sum_long": (data, sizes + 1, order, back),
        "rising": (data, falling.flip(0), None, None),
        "zero": (data, torch.cat([sizes, sizes.new_zeros(1)]), order, back),
        "negative": (data, torch.cat([sizes, -sizes[:1]]), order, back),
        "float_sizes": (data, sizes.float(), order, back),
        "no_sizes": (data, sizes[:0], order, back),
        "two_dim_sizes": (data, sizes[:, None], order, back),
        "int32_sizes": (data, sizes.int(), order, back),
        "data_1d": (data[:, 0], sizes, order, back),
        "data_3d": (data[:, None], sizes, order, back),
        "wrong_order": (data, sizes, torch.zeros_like(order), torch.zeros_like(back)),
        "order_out_of_range": (data, sizes, order + 100, back + 100),
        "order_short": (data, sizes, order[:-1], back[:-1]),
        "data_odd": (data.t().contiguous().t(), sizes, order, back),
        "unsorted": (data, sizes, None, None),
    }
    return PackedSequence(*odd[kind]) if kind in odd else good
