"""Aten's elementwise operators in terms of `graph.PRIMITIVES`.

A rule names every argument that it understands: an operator with any other is refused.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from openrnn.codegen.graph import Builder, Value
from openrnn.memo import memo

Rule = Callable[..., Any]


class Unknown(ValueError):
    """An argument that a rule does not understand; its text completes "no kernel knows"."""


def _add(emit: Builder, a: Value, b: Value, *, alpha: Value = 1.0) -> Value:
    return emit("add", a, emit("mul", b, alpha))


def _sub(emit: Builder, a: Value, b: Value, *, alpha: Value = 1.0) -> Value:
    return emit("sub", a, emit("mul", b, alpha))


def _div(emit: Builder, a: Value, b: Value, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return emit("div", a, b)
    if rounding_mode == "trunc":
        return emit("trunc", emit("div", a, b))
    if rounding_mode != "floor":
        raise Unknown(f"rounding_mode {rounding_mode!r}")
    # as torch: the quotient of what fmod leaves is whole but for its own rounding
    rest = emit("fmod", a, b)
    whole = emit("div", emit("sub", a, rest), b)
    whole = emit("where", _crosses(emit, rest, b), emit("sub", whole, 1.0), whole)
    floor = emit("floor", whole)
    floor = emit(
        "where", emit("gt", emit("sub", whole, floor), 0.5), emit("add", floor, 1.0), floor
    )
    return emit("where", emit("eq", b, 0.0), emit("div", a, b), floor)


def _floor_divide(emit: Builder, a: Value, b: Value) -> Value:
    return _div(emit, a, b, rounding_mode="floor")


def _remainder(emit: Builder, a: Value, b: Value) -> Value:
    rest = emit("fmod", a, b)
    return emit("where", _crosses(emit, rest, b), emit("add", rest, b), rest)


def _crosses(emit: Builder, rest: Value, divisor: Value) -> Value:
    """Whether what fmod leaves has another sign than the divisor."""
    signs = emit("ne", emit("lt", rest, 0.0), emit("lt", divisor, 0.0))
    return emit("and", emit("ne", rest, 0.0), signs)


def _round(emit: Builder, x: Value, *, decimals: Value = 0.0) -> Value:
    if decimals != 0.0:
        raise Unknown("decimals")
    return emit("round", x)


def _clamp(emit: Builder, x: Value, min: Value | None = None, max: Value | None = None) -> Value:
    # a number is chosen by comparison, so that nan stays nan; a tensor may be nan itself
    if min is not None:
        known = isinstance(min, float) and not math.isnan(min)
        x = emit("where", emit("lt", x, min), min, x) if known else emit("maximum", x, min)
    if max is not None:
        known = isinstance(max, float) and not math.isnan(max)
        x = emit("where", emit("gt", x, max), max, x) if known else emit("minimum", x, max)
    return x


def _clamp_min(emit: Builder, x: Value, min: Value) -> Value:
    return _clamp(emit, x, min, None)


def _clamp_max(emit: Builder, x: Value, max: Value) -> Value:
    return _clamp(emit, x, None, max)


def _hardtanh(emit: Builder, x: Value, min_val: Value = -1.0, max_val: Value = 1.0) -> Value:
    return _clamp(emit, x, min_val, max_val)


def _relu(emit: Builder, x: Value) -> Value:
    return emit("where", emit("lt", x, 0.0), 0.0, x)


def _pow(emit: Builder, x: Value, exponent: Value) -> Value:
    if exponent in (2.0, 3.0):
        square = emit("mul", x, x)
        return square if exponent == 2.0 else emit("mul", square, x)
    return emit("sqrt", x) if exponent == 0.5 else emit("pow", x, exponent)


def _fmax(emit: Builder, a: Value, b: Value) -> Value:
    return _unless_nan(emit, a, b, emit("maximum", a, b))


def _fmin(emit: Builder, a: Value, b: Value) -> Value:
    return _unless_nan(emit, a, b, emit("minimum", a, b))


def _unless_nan(emit: Builder, a: Value, b: Value, chosen: Value) -> Value:
    chosen = emit("where", emit("ne", b, b), a, chosen)
    return emit("where", emit("ne", a, a), b, chosen)


def _logit(emit: Builder, x: Value, eps: Value | None = None) -> Value:
    if eps is not None:
        if not isinstance(eps, float):
            raise Unknown("eps")
        x = _clamp(emit, x, eps, 1.0 - eps)
    return emit("log", emit("div", x, emit("sub", 1.0, x)))


def _logit_backward(emit: Builder, grad: Value, x: Value, eps: Value | None = None) -> Value:
    low, high, beyond = (0.0, 1.0, math.nan) if eps is None else (eps, _sub(emit, 1.0, eps), 0.0)
    # nan is neither below nor above, and its gradient nan: torch's decomposition has 0
    outside = emit("or", emit("lt", x, low), emit("gt", x, high))
    inside = emit("div", grad, emit("mul", x, emit("sub", 1.0, x)))
    return emit("where", outside, beyond, inside)


def _shrink(emit: Builder, x: Value, lambd: Value, else_: Value) -> Value:
    inside = emit("and", emit("ge", x, emit("neg", lambd)), emit("le", x, lambd))
    return emit("where", inside, 0.0, else_)


def _hardshrink(emit: Builder, x: Value, lambd: Value = 0.5) -> Value:
    return _shrink(emit, x, lambd, x)


def _shrink_backward(emit: Builder, grad: Value, x: Value, lambd: Value) -> Value:
    return _shrink(emit, x, lambd, grad)


def _heaviside(emit: Builder, x: Value, at_zero: Value) -> Value:
    return emit("where", emit("eq", x, 0.0), at_zero, emit("gt", x, 0.0))


def _angle(emit: Builder, x: Value) -> Value:
    known = emit("where", emit("lt", x, 0.0), math.pi, 0.0)
    return emit("where", emit("ne", x, x), x, known)


def _xor(emit: Builder, a: Value, b: Value) -> Value:
    return emit("ne", emit.truth(a), emit.truth(b))


def _sigmoid_backward(emit: Builder, grad: Value, y: Value) -> Value:
    return emit("mul", grad, emit("mul", emit("sub", 1.0, y), y))


def _tanh_backward(emit: Builder, grad: Value, y: Value) -> Value:
    return emit("mul", grad, emit("sub", 1.0, emit("mul", y, y)))


def _threshold(emit: Builder, x: Value, threshold: Value, value: Value) -> Value:
    return emit("where", emit("le", x, threshold), value, x)


def _threshold_backward(emit: Builder, grad: Value, x: Value, threshold: Value) -> Value:
    return emit("where", emit("le", x, threshold), 0.0, grad)


def _logsigmoid_backward(emit: Builder, grad: Value, x: Value, buffer: Value) -> Value:
    return emit("mul", grad, emit("sigmoid", emit("neg", x)))


def _logsigmoid_forward(emit: Builder, x: Value) -> tuple[Value, Value]:
    # the second output is a buffer of exp(-|x|) that only its own backward reads
    return emit("logsigmoid", x), 0.0


def _masked_fill(emit: Builder, x: Value, mask: Value, value: Value) -> Value:
    return emit("where", mask, value, x)


def _same(emit: Builder, x: Value) -> Value:
    return x


def _reshaped(emit: Builder, x: Value, size: object, *, implicit: object = False) -> Value:
    return x


def _clone(emit: Builder, x: Value, *, memory_format: object = None) -> Value:
    return x


def _to_copy(
    emit: Builder,
    x: Value,
    *,
    dtype: object = None,  # what comes of it, and where, the reader checks
    layout: object = None,
    device: object = None,
    pin_memory: object = None,
    non_blocking: object = False,
    memory_format: object = None,
) -> Value:
    return x


def _copy(emit: Builder, x: Value, source: Value, non_blocking: object = False) -> Value:
    return source


def _made(value: Value, **options: object) -> Value:
    """A new tensor's value: its dtype and device the reader checks, its layout is no matter."""
    unknown = options.keys() - {"dtype", "layout", "device", "pin_memory", "memory_format"}
    if unknown:
        raise Unknown(", ".join(sorted(unknown)))
    return value


def _like(number: float) -> Rule:
    """The rule of `zeros_like`, of `zeros`, which takes a size, and of `new_zeros`, of both."""

    def rule(emit: Builder, x: object, size: object = None, **options: object) -> Value:
        return _made(number, **options)

    return rule


def _full(emit: Builder, x: object, value: Value, **options: object) -> Value:
    return _made(value, **options)


def _new_full(emit: Builder, x: object, size: object, value: Value, **options: object) -> Value:
    return _made(value, **options)


def _scalar(emit: Builder, value: Value, **options: object) -> Value:
    return _made(value, **options)


def _unary(name: str) -> Rule:
    return lambda emit, x: emit(name, x)


def _binary(name: str) -> Rule:
    return lambda emit, a, b: emit(name, a, b)


_UNARY = (
    "neg abs sign exp expm1 log log1p log2 log10 sqrt reciprocal sin cos tan asin acos atan sinh "
    "cosh asinh acosh atanh erf erfc lgamma sigmoid tanh floor ceil trunc"
).split()
_BINARY = "mul maximum minimum fmod atan2 hypot copysign eq ne lt le gt ge".split()

RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "rsub": lambda emit, a, b, alpha=1.0: _sub(emit, b, a, alpha=alpha),
    "div": _div,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "round": _round,
    "clamp": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "hardtanh": _hardtanh,
    "relu": _relu,
    "pow": _pow,
    "fmax": _fmax,
    "fmin": _fmin,
    "exp2": lambda emit, x: emit("pow", 2.0, x),
    "square": lambda emit, x: emit("mul", x, x),
    "sgn": lambda emit, x: emit("sign", x),
    "rsqrt": lambda emit, x: emit("reciprocal", emit("sqrt", x)),
    "isnan": lambda emit, x: emit("ne", x, x),
    "isinf": lambda emit, x: emit("eq", emit("abs", x), math.inf),
    "isfinite": lambda emit, x: emit("lt", emit("abs", x), math.inf),
    "signbit": lambda emit, x: emit("lt", emit("copysign", 1.0, x), 0.0),
    "logit": _logit,
    "logit_backward": _logit_backward,
    "angle": _angle,
    "heaviside": _heaviside,
    "hardshrink": _hardshrink,
    "hardshrink_backward": _shrink_backward,
    "softshrink_backward": _shrink_backward,
    "sigmoid_backward": _sigmoid_backward,
    "tanh_backward": _tanh_backward,
    "threshold": _threshold,
    "threshold_backward": _threshold_backward,
    "log_sigmoid_forward": _logsigmoid_forward,
    "log_sigmoid_backward": _logsigmoid_backward,
    "masked_fill": _masked_fill,
    "where": lambda emit, mask, a, b: emit("where", mask, a, b),
    "empty_like": _like(math.nan),
    "empty_permuted": _like(math.nan),
    "copy": _copy,
    "fill": lambda emit, x, value: value,
    "zero": lambda emit, x: 0.0,
    "zeros": _like(0.0),
    "zeros_like": _like(0.0),
    "new_zeros": _like(0.0),
    "ones": _like(1.0),
    "ones_like": _like(1.0),
    "new_ones": _like(1.0),
    "full": _full,
    "full_like": _full,
    "new_full": _new_full,
    "scalar_tensor": _scalar,
    "detach": _same,
    "alias": _same,
    "lift_fresh": _same,
    "lift_fresh_copy": _same,
    "conj_physical": _same,
    "view": _reshaped,
    "expand": _reshaped,
    "clone": _clone,
    "_to_copy": _to_copy,
    # of truth values: whole numbers have no kernel, as the reader says
    "logical_and": _binary("and"),
    "logical_or": _binary("or"),
    "logical_xor": _xor,
    "logical_not": _unary("not"),
    "bitwise_and": _binary("and"),
    "bitwise_or": _binary("or"),
    "bitwise_xor": _xor,
    "bitwise_not": _unary("not"),
    **{name: _unary(name) for name in _UNARY},
    **{name: _binary(name) for name in _BINARY},
}

# what two names of one tensor come from: a change in place of one is seen through the other
VIEWS = frozenset(("detach", "alias", "view", "expand"))
# those that are elementwise where the shape stays, as in v.view_as(v)
RESHAPES = frozenset(("view", "expand"))


def name_of(target: object) -> str:
    """`aten.add.Tensor` -> `add`; the in-place form `aten.add_.Tensor` counts as the plain one."""
    if not isinstance(target, torch._ops.OpOverload):
        return str(target)
    name: str = target.overloadpacket.__name__
    return name[:-1] if in_place(target) else name


def in_place(target: object) -> bool:
    """Whether an operator writes into its first argument, as `add_`."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target.overloadpacket.__name__
    return name.endswith("_") and not name.startswith("_")


def known(target: object) -> bool:
    """Whether there is a rule for an operator."""
    return name_of(target) in RULES


# elementwise operators that torch has not tagged as such
_UNTAGGED = frozenset(("hardswish", "special_i0"))


def elementwise(target: Any) -> bool:
    """Whether each element that an operator gives depends on one of each input alone."""
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    tagged = torch.Tag.pointwise in target.tags
    return tagged or known(target) or name_of(target) in _UNTAGGED


def apply(emit: Builder, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator of `RULES` gives.

    Raises:
        Unknown: its rule does not understand an argument.
    """
    rule = RULES[name]
    try:
        _signature(rule).bind(emit, *args, **kwargs)
    except TypeError as error:
        raise Unknown(f"its arguments ({error})") from error
    return rule(emit, *args, **kwargs)


@memo(1024)
def _signature(rule: Rule) -> inspect.Signature:
    return inspect.signature(rule)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Torch's own decompositions of the operators that `RULES` lacks, such as silu or gelu."""
    from torch._decomp import decomposition_table

    return {op: how for op, how in decomposition_table.items() if not known(op)}
