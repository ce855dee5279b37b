"""Aten's elementwise operators in terms of `graph.PRIMITIVES`."""

import math
from collections.abc import Callable
from typing import Any

import torch

from openrnn.codegen.graph import Builder, Value

Rule = Callable[..., Any]


def _scaled(emit: Builder, value: Value, alpha: float) -> Value:
    return emit("mul", value, float(alpha))


def _add(emit: Builder, a: Value, b: Value, alpha: float = 1) -> Value:
    return emit("add", a, _scaled(emit, b, alpha))


def _sub(emit: Builder, a: Value, b: Value, alpha: float = 1) -> Value:
    return emit("sub", a, _scaled(emit, b, alpha))


def _clamp(emit: Builder, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    # chosen by comparison, so that nan stays nan
    if low is not None:
        x = emit("where", emit("lt", x, low), low, x)
    return x if high is None else emit("where", emit("gt", x, high), high, x)


def _relu(emit: Builder, x: Value) -> Value:
    return emit("where", emit("lt", x, 0.0), 0.0, x)


def _pow(emit: Builder, x: Value, exponent: Value) -> Value:
    if exponent in (2.0, 3.0):
        square = emit("mul", x, x)
        return square if exponent == 2.0 else emit("mul", square, x)
    return emit("sqrt", x) if exponent == 0.5 else emit("pow", x, exponent)


def _sigmoid_backward(emit: Builder, grad: Value, y: Value) -> Value:
    return emit("mul", grad, emit("mul", emit("sub", 1.0, y), y))


def _tanh_backward(emit: Builder, grad: Value, y: Value) -> Value:
    return emit("mul", grad, emit("sub", 1.0, emit("mul", y, y)))


def _threshold_backward(emit: Builder, grad: Value, x: Value, threshold: Value) -> Value:
    return emit("where", emit("le", x, threshold), 0.0, grad)


def _logsigmoid_backward(emit: Builder, grad: Value, x: Value, _: Value) -> Value:
    return emit("mul", grad, emit("sigmoid", emit("neg", x)))


def _logsigmoid_forward(emit: Builder, x: Value) -> tuple[Value, Value]:
    # the second output is a buffer of exp(-|x|) that only its own backward reads
    return emit("logsigmoid", x), 0.0


def _masked_fill(emit: Builder, x: Value, mask: Value, value: Value) -> Value:
    return emit("where", mask, value, x)


def _same(_: Builder, x: Value, *__: object, **___: object) -> Value:
    return x


def _filled(number: float) -> Rule:
    def rule(_: Builder, *__: object, **___: object) -> Value:
        return number

    return rule


def _full(_: Builder, __: object, value: float, **___: object) -> Value:
    return float(value)


def _scalar(_: Builder, value: float, **__: object) -> Value:
    return float(value)


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "rsub": lambda emit, a, b, alpha=1: _sub(emit, b, a, alpha),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda emit, x, high: _clamp(emit, x, None, high),
    "hardtanh": lambda emit, x, low=-1.0, high=1.0: _clamp(emit, x, low, high),
    "relu": _relu,
    "pow": _pow,
    "square": lambda emit, x: emit("mul", x, x),
    "sgn": lambda emit, x: emit("sign", x),
    "rsqrt": lambda emit, x: emit("reciprocal", emit("sqrt", x)),
    "sigmoid_backward": _sigmoid_backward,
    "tanh_backward": _tanh_backward,
    "threshold_backward": _threshold_backward,
    "log_sigmoid_forward": _logsigmoid_forward,
    "log_sigmoid_backward": _logsigmoid_backward,
    "masked_fill": _masked_fill,
    "empty_like": _filled(math.nan),
    "empty_permuted": _filled(math.nan),
    "copy": lambda emit, _, value, *__: value,
    "zeros_like": _filled(0.0),
    "new_zeros": _filled(0.0),
    "ones_like": _filled(1.0),
    "new_ones": _filled(1.0),
    "full_like": _full,
    "new_full": lambda emit, x, size, value, **_: float(value),
    "full": _full,
    "scalar_tensor": _scalar,
    "detach": _same,
    "alias": _same,
    "clone": _same,
    "lift_fresh": _same,
    "lift_fresh_copy": _same,
    "logical_and": lambda emit, a, b: emit("and", a, b),
    "logical_or": lambda emit, a, b: emit("or", a, b),
    "logical_not": lambda emit, a: emit("not", a),
    "bitwise_and": lambda emit, a, b: emit("and", a, b),
    "bitwise_or": lambda emit, a, b: emit("or", a, b),
    "bitwise_not": lambda emit, a: emit("not", a),
    "_to_copy": lambda emit, x, **_: x,
    **{
        name: lambda emit, *args, _name=name, **_: emit(_name, *args)
        for name in (
            "neg mul div abs sign exp expm1 log log1p sqrt reciprocal sin cos erf sigmoid tanh "
            "maximum minimum floor eq ne lt le gt ge where"
        ).split()
    },
}


def name_of(target: object) -> str:
    """`aten.add.Tensor` -> `add`; the in-place form `aten.add_.Tensor` counts as the plain one."""
    if not isinstance(target, torch._ops.OpOverload):
        return str(target)
    name: str = target.overloadpacket.__name__
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


def known(target: object) -> bool:
    """Whether there is a rule for an operator."""
    return name_of(target) in RULES


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Torch's own decompositions of the operators that `RULES` lacks, such as silu or gelu."""
    from torch._decomp import decomposition_table

    return {op: how for op, how in decomposition_table.items() if not known(op)}
