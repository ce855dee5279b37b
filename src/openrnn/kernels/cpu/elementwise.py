"""Elementwise functions for the CPU kernels, by dtype: the float32 ones vectorise inside a loop.

They have neither branches nor calls of libm, propagate nan, are exact at infinities and within
2 ulp, but sigmoid and tanh within 2.5. The float64 ones, and sin, cos and erf, are libm's.
A loop over an array vectorises where its index counts from 0 or is unsigned; a signed index that
may be negative, as in `range(start, start + 16)`, does not.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from openrnn.kernels.cpu.vectors import compiled, intrinsic

Real = Any  # in compiled code a float32 or float64, by the function's name

_HALF, _ONE, _TWO, _ZERO = np.float32(0.5), np.float32(1), np.float32(2), np.float32(0)
_NAN, _INFINITY = np.float32(math.nan), np.float32(math.inf)

# Coefficients: of (expm1(r) - r) / r**2 for |r| <= log(2) / 2, of (log1p(f) - f) / f**2 for
# |f| <= 1/3, lowest first. The largest relative error of expm1 and of log1p was minimised by
# Lawson's reweighted least squares in float64 on 4001 Chebyshev points, each coefficient rounded to
# float32 before the later ones were fitted again: errors 1.4e-8 and 4.6e-9, where ulp / 2 is 6e-8.
_EXPM1 = tuple(map(np.float32, (0.49999997, 0.16666546, 0.041667443, 0.008366253, 0.0013869948)))
_LOG1P = tuple(
    map(
        np.float32,
        (-0.5, 0.33333215, -0.24999805, 0.20010431, -0.1668025, 0.14005622, -0.12186845,
         0.13985267, -0.12882511),
    )
)  # fmt: skip

_LOG2_OF_E, _LOG_2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
# log(2) in two parts; a whole number up to 2**15 times the first is exact
_LOG_2_HIGH = np.float32(355 / 512)
_LOG_2_LOW = np.float32(math.log(2) - 355 / 512)
# added to n, |n| < 2**22, rounds it to a whole number that stands in the lowest bits
_ROUNDS = np.float32(1.5 * 2**23)
_TO_POWER, _TO_POWER_LESS_1, _TO_POWER_PLUS_24 = (
    np.float32(1.5 * 2**23 + 127 + k) for k in (0, -1, 24)
)
_TWO_TO_MINUS_24 = np.float32(2.0**-24)
# beyond these arguments exp is 0 or infinite, expm1 is -1, tanh is 1, x + 1 is x
_EXP_MIN, _EXP_MAX, _EXPM1_MIN = np.float32(-104), np.float32(89), np.float32(-25)
_TANH_MAX, _LOG1P_MAX = np.float32(10), np.float32(2.0**30)
_SMALLEST_NORMAL, _SCALE, _LOG2_SCALE = np.float32(2.0**-126), np.float32(2.0**23), np.float32(23)


@intrinsic
def multiply_add(_: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of one dtype, fused where the machine can: the same in every loop."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        kind = "f32" if x == types.float32 else "f64"
        declared = ir.FunctionType(args[0].type, [arg.type for arg in args])
        name = f"llvm.fmuladd.{kind}"
        return builder.call(cgutils.get_or_insert_function(builder.module, declared, name), args)

    return x(x, x, x), emit


def _llvm_operation(name: str, count: int) -> Any:
    """An operation of LLVM on `count` values of one dtype, which stays it: math's give integers."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        declared = ir.FunctionType(args[0].type, [arg.type for arg in args])
        kind = "f32" if signature.args[0] == types.float32 else "f64"
        called = cgutils.get_or_insert_function(builder.module, declared, f"llvm.{name}.{kind}")
        return builder.call(called, args)

    if count == 1:

        @intrinsic
        def one(_: Any, x: Any) -> Any:
            return x(x), emit

        return one

    @intrinsic
    def two(_: Any, x: Any, y: Any) -> Any:
        return x(x, y), emit

    return two


@intrinsic
def _remainder(_: Any, x: Any, y: Any) -> Any:
    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        return builder.frem(*args)

    return x(x, y), emit


_with_sign = _llvm_operation("copysign", 2)
_floor, _ceil, _trunc, _rint = (
    _llvm_operation(name, 1) for name in ("floor", "ceil", "trunc", "rint")
)


@intrinsic
def _power_of_2(_: Any, biased: Any) -> Any:
    """2**n from n + _TO_POWER, whose lowest bits are moved to the exponent.

    From n + _TO_POWER_LESS_1 it is 2**(n - 1), from n + _TO_POWER_PLUS_24 it is 2**(n + 24).
    """

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        bits = builder.bitcast(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, bits.type(23)), ir.FloatType())

    return types.float32(types.float32), emit


@intrinsic
def _split(_: Any, x: Any) -> Any:
    """(n, m, 2**-n) with x = 2**n m, 2/3 <= m < 4/3, for a normal positive x; n is a float32."""
    least = 0x3F2AAAAB  # the bits of 2/3

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        whole, scalar = ir.IntType(32), ir.FloatType()
        bits = builder.bitcast(args[0], whole)
        exponent = builder.and_(builder.sub(bits, whole(least)), whole(-(1 << 23)))
        n = builder.fmul(builder.sitofp(exponent, scalar), scalar(2.0**-23))
        m = builder.bitcast(builder.sub(bits, exponent), scalar)
        inverse = builder.bitcast(builder.sub(whole(127 << 23), exponent), scalar)
        return context.make_tuple(builder, types.UniTuple(types.float32, 3), [n, m, inverse])

    return types.UniTuple(types.float32, 3)(types.float32), emit


@compiled
def _expm1_reduced(x: Real) -> tuple[Real, Real]:
    """(n, expm1(r)) with x = n log(2) + r, |r| <= log(2) / 2."""
    n = multiply_add(x, _LOG2_OF_E, _ROUNDS) - _ROUNDS
    r = multiply_add(n, -_LOG_2_LOW, multiply_add(n, -_LOG_2_HIGH, x))
    q = multiply_add(_EXPM1[4], r, _EXPM1[3])
    q = multiply_add(q, r, _EXPM1[2])
    q = multiply_add(q, r, _EXPM1[1])
    q = multiply_add(q, r, _EXPM1[0])
    return n, multiply_add(r * r, q, r)


@compiled
def _log1p_reduced(f: Real) -> Real:
    """log1p(f) for |f| <= 1/3."""
    q = multiply_add(_LOG1P[8], f, _LOG1P[7])
    q = multiply_add(q, f, _LOG1P[6])
    q = multiply_add(q, f, _LOG1P[5])
    q = multiply_add(q, f, _LOG1P[4])
    q = multiply_add(q, f, _LOG1P[3])
    q = multiply_add(q, f, _LOG1P[2])
    q = multiply_add(q, f, _LOG1P[1])
    q = multiply_add(q, f, _LOG1P[0])
    return multiply_add(f * f, q, f)


@compiled
def _exp_nonpositive(x: Real) -> Real:
    """exp(x) for x <= 0."""
    n, p = _expm1_reduced(_EXP_MIN if x < _EXP_MIN else x)
    scale = _power_of_2(n + _TO_POWER_PLUS_24)
    return multiply_add(scale, p, scale) * _TWO_TO_MINUS_24


@compiled
def _log1p_of_exp(x: Real) -> Real:
    """log1p(exp(x)) for x <= 0."""
    e = _exp_nonpositive(x)
    n, _, inverse = _split(e + _ONE)
    return multiply_add(n, _LOG_2, _log1p_reduced(multiply_add(inverse, e, inverse - _ONE)))


@compiled
def exp_float32(x: Real) -> Real:
    """exp(x)."""
    n, p = _expm1_reduced(_EXP_MAX if x > _EXP_MAX else _EXP_MIN if x < _EXP_MIN else x)
    scale = _power_of_2(n + (_TO_POWER_LESS_1 if x > _ZERO else _TO_POWER_PLUS_24))
    return multiply_add(scale, p, scale) * (_TWO if x > _ZERO else _TWO_TO_MINUS_24)


@compiled
def expm1_float32(x: Real) -> Real:
    """exp(x) - 1."""
    n, p = _expm1_reduced(_EXP_MAX if x > _EXP_MAX else _EXPM1_MIN if x < _EXPM1_MIN else x)
    scale = _power_of_2(n + _TO_POWER_LESS_1)
    return multiply_add(scale, p, scale - _HALF) * _TWO


@compiled
def sigmoid_float32(x: Real) -> Real:
    """1 / (1 + exp(-x))."""
    e = _exp_nonpositive(-abs(x))
    return (e if x < _ZERO else _ONE) / (e + _ONE)


@compiled
def tanh_float32(x: Real) -> Real:
    """expm1(2 x) / (expm1(2 x) + 2)."""
    magnitude = abs(x)
    n, p = _expm1_reduced(_TWO * (_TANH_MAX if magnitude > _TANH_MAX else magnitude))
    scale = _power_of_2(n + _TO_POWER)
    e = multiply_add(scale, p, scale - _ONE)
    return _with_sign(e / (e + _TWO), x)


@compiled
def _logarithm(y: Real, x: Real, pole: Real) -> Real:
    """The logarithm y of x, or what it is where x is inf, nan or not above the pole."""
    y = y if x < _INFINITY else x
    return y if x > pole else -_INFINITY if x == pole else x if math.isnan(x) else _NAN


@compiled
def log_float32(x: Real) -> Real:
    """log(x): -inf at 0, nan below."""
    n, m, _ = _split(x * _SCALE if x < _SMALLEST_NORMAL else x)
    y = multiply_add(
        n - (_LOG2_SCALE if x < _SMALLEST_NORMAL else _ZERO), _LOG_2, _log1p_reduced(m - _ONE)
    )
    return _logarithm(y, x, _ZERO)


@compiled
def log1p_float32(x: Real) -> Real:
    """log(1 + x): -inf at -1, nan below, 0 at -0."""
    n, m, inverse = _split(x + _ONE)
    f = multiply_add(inverse, x, inverse - _ONE) if x < _LOG1P_MAX else m - _ONE
    y = multiply_add(n, _LOG_2, _log1p_reduced(f))
    return _logarithm(y, x, -_ONE)


@compiled
def softplus_float32(x: Real) -> Real:
    """log(1 + exp(x))."""
    return (x if x > _ZERO else _ZERO) + _log1p_of_exp(-abs(x))


@compiled
def logsigmoid_float32(x: Real) -> Real:
    """log(sigmoid(x))."""
    return (x if x < _ZERO else _ZERO) - _log1p_of_exp(-abs(x))


@compiled
def exp_float64(x: Real) -> Real:
    """exp(x)."""
    return math.exp(x)


@compiled
def expm1_float64(x: Real) -> Real:
    """exp(x) - 1."""
    return math.expm1(x)


@compiled
def sigmoid_float64(x: Real) -> Real:
    """1 / (1 + exp(-x))."""
    e = math.exp(-abs(x))
    return (e if x < 0.0 else 1.0) / (e + 1.0)


@compiled
def tanh_float64(x: Real) -> Real:
    """tanh(x)."""
    return math.tanh(x)


@compiled
def log_float64(x: Real) -> Real:
    """log(x): -inf at 0, nan below."""
    return math.log(x)


@compiled
def log1p_float64(x: Real) -> Real:
    """log(1 + x): -inf at -1, nan below."""
    return math.log1p(x)


@compiled
def softplus_float64(x: Real) -> Real:
    """log(1 + exp(x))."""
    return (x if x > 0.0 else 0.0) + math.log1p(math.exp(-abs(x)))


@compiled
def logsigmoid_float64(x: Real) -> Real:
    """log(sigmoid(x))."""
    return (x if x < 0.0 else 0.0) - math.log1p(math.exp(-abs(x)))


@compiled
def sin(x: Real) -> Real:
    """The sin of libm."""
    return math.sin(x)


@compiled
def cos(x: Real) -> Real:
    """The cos of libm."""
    return math.cos(x)


@compiled
def erf(x: Real) -> Real:
    """The erf of libm."""
    return math.erf(x)


@compiled
def floor(x: Real) -> Real:
    """The largest whole number that is not above x."""
    return _floor(x)


@compiled
def ceil(x: Real) -> Real:
    """The smallest whole number that is not below x."""
    return _ceil(x)


@compiled
def trunc(x: Real) -> Real:
    """x without its fraction."""
    return _trunc(x)


@compiled
def round(x: Real) -> Real:
    """The nearest whole number, the even one of two."""
    return _rint(x)


@compiled
def copysign(x: Real, y: Real) -> Real:
    """x with the sign of y."""
    return _with_sign(x, y)


@compiled
def fmod(x: Real, y: Real) -> Real:
    """What is left of x after whole multiples of y, with the sign of x."""
    return _remainder(x, y)


@compiled
def maximum(x: Real, y: Real) -> Real:
    """The larger one; nan if either is."""
    return x if (x > y) | math.isnan(x) else y


@compiled
def minimum(x: Real, y: Real) -> Real:
    """The smaller one; nan if either is."""
    return x if (x < y) | math.isnan(x) else y


@compiled
def clamp(x: Real, low: Real, high: Real) -> Real:
    """x within low and high; nan where x is."""
    x = low if x < low else x
    return high if x > high else x


sin_float32 = sin_float64 = sin
cos_float32 = cos_float64 = cos
erf_float32 = erf_float64 = erf
floor_float32 = floor_float64 = floor
ceil_float32 = ceil_float64 = ceil
trunc_float32 = trunc_float64 = trunc
round_float32 = round_float64 = round
copysign_float32 = copysign_float64 = copysign
fmod_float32 = fmod_float64 = fmod
maximum_float32 = maximum_float64 = maximum
minimum_float32 = minimum_float64 = minimum
clamp_float32 = clamp_float64 = clamp
