"""Torch's elementwise operators: which have kernels, which run on the reference, and why."""

import math
from contextlib import suppress
from itertools import count

import numpy as np
import pytest
import torch
from cases import thinned
from test_trace import MEANING, agree

import openrnn
from openrnn.codegen import numba
from openrnn.codegen.graph import PRIMITIVES, Node
from openrnn.codegen.trace import trace
from openrnn.errors import CellError

# operators of float tensors without a kernel, by what theirs would need
NO_KERNEL = {
    "special functions": (
        "digamma erfinv i0 igamma igammac lgamma mvlgamma nextafter polygamma special_airy_ai "
        "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx "
        "special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 "
        "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
        "special_spherical_bessel_j0 special_zeta"
    ).split(),
    "polynomials": [
        f"special_{name}"
        for name in (
            "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v "
            "chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he "
            "laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t "
            "shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v "
            "shifted_chebyshev_polynomial_w"
        ).split()
    ],
    "float64, whatever they are given": ["float_power"],
    "a derivative that torch has not, or in parts of its own": (
        "heaviside logit_backward native_dropout_backward aten.remainder.Scalar_Tensor sgn "
        "silu_backward"
    ).split(),
}
WITHOUT = {name for names in NO_KERNEL.values() for name in names}
NUMBERS = {"number": 0.5, "Scalar": 0.5, "float": 0.5, "int": 2, "bool": False}
# arguments beyond those that a schema insists on
MORE = {
    "clamp.default": [("t", -0.2, 0.3), ("t", None, 0.1)], "clamp.Tensor": [("t", "t", None)],
    "clip.default": [("t", 0.4)], "clip.Tensor": [("t", None, "t")],
    "masked_fill.Scalar": [("t", "mask", 0.5)], "where.self": [("mask", "t", "t")],
    "div.Tensor_mode": [("t", "t", {"rounding_mode": mode}) for mode in ("floor", "trunc", None)],
    "div.Scalar_mode": [("t", 0.3, {"rounding_mode": mode}) for mode in ("floor", "trunc", None)],
    "add.Tensor": [("t", "t", {"alpha": 0.3})], "sub.Tensor": [("t", "t", {"alpha": -2})],
    "rsub.Scalar": [("t", 2, 3)], "gelu.default": [("t", {"approximate": "tanh"})],
    "elu.default": [("t", 0.5, 2.0, 3.0)], "softplus.default": [("t", 2.0, 0.5)],
    "logit.default": [("t", 0.3)], "hardshrink.default": [("t", 0.1)],
    "addcmul.default": [("t", "t", "t", {"value": 0.3})],
    "addcdiv.default": [("t", "t", "t", {"value": 0.3})],
    "nan_to_num.default": [("t", 1.0, 2.0, 3.0)], "leaky_relu.default": [("t", 0.3)],
    "hardtanh.default": [("t", -0.1, 0.2)], "celu.default": [("t", 0.3)],
}  # fmt: skip


# of float64 kernels: the largest number, which differs with the dtype
NARROW = {"nan_to_num"}
SHIFT = {"acosh": 1.0}  # into what a function is defined on
LOOSE = {"hardsigmoid": 1e-8}  # torch's own derivative is off: it has 1/6 in float32


def overloads():
    """Every elementwise overload that gives a new tensor, whatever of torch is imported by now."""
    every = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    for name in sorted({name.partition(".")[0] for space, _, name in every if space == "aten"}):
        packet = getattr(torch.ops.aten, name)
        if name.startswith("_") or name.endswith("_"):  # an inner one, or one that writes
            continue
        for overload in packet.overloads():
            found = getattr(packet, overload)
            writes = any(argument.is_out for argument in found._schema.arguments)
            seeded = torch.Tag.nondeterministic_seeded in found.tags
            new = not writes and overload != "grad_input"
            if torch.Tag.pointwise in found.tags and new and not seeded:
                yield name, overload, found
    yield "hardswish", "default", torch.ops.aten.hardswish.default


def needed(schema):
    """The least arguments of a schema, or None where one is no number and no tensor."""
    given = []
    for argument in schema.arguments:
        if argument.has_default_value():
            break
        word = "t" if str(argument.type) == "Tensor" else NUMBERS.get(str(argument.type))
        if word is None or argument.kwarg_only:
            return None
        given.append(word)
    return tuple(given)


def applied(target, given, tensors):
    """The operator on as many of the tensors as it takes, its result a float tensor."""
    left = iter(tensors)
    args = []
    for arg in given:
        if arg == "t":
            args.append(next(left))
        elif arg == "mask":
            args.append(tensors[0] > 0.5)
        elif not isinstance(arg, dict):
            args.append(arg)
    options = given[-1] if given and isinstance(given[-1], dict) else {}
    found = target(*args, **options)
    return found.to(tensors[0].dtype) if isinstance(found, torch.Tensor) else found


def calls():
    for name, overload, target in overloads():
        least = needed(target._schema)
        words = f"{name}.{overload}"
        for given in ([] if least is None else [least]) + MORE.get(words, []):
            try:
                tensors = [torch.full((2, 3), 0.4 + 0.1 * n) for n in range(3)]
                if not isinstance(applied(target, given, tensors), torch.Tensor):
                    continue
            except (RuntimeError, NotImplementedError, ValueError):
                continue  # not of float tensors, or not with so few arguments
            yield pytest.param(name, target, given, id=f"{words}{given}")


NUMBER = count()


@pytest.mark.parametrize(("name", "target", "given"), thinned(calls(), 9))
def test_an_operator_has_a_kernel_or_a_reason(name, target, given):
    """Step and derivative of a traced one are autograd's, in float64."""

    @openrnn.cell(gates="a b", states="h", name=f"operator_{next(NUMBER)}")
    def cell(x, r, s):
        # where most functions are defined and smooth
        low = 0.55 + SHIFT.get(name, 0.0)
        u, v = (low + 0.4 * torch.tanh(side) for side in (x.a + r.a, x.b - r.b))
        return applied(target, given, [u, v, 0.5 * (u + v)]) * s.h

    if not {name, str(target)} & WITHOUT:
        no_float64_reason = agree(cell, loose=LOOSE.get(name, 1e-12)).no_float64_reason
        assert no_float64_reason is None or name in NARROW
        return
    # another torch may have what this one lacks
    with suppress(CellError):
        agree(cell)


def test_most_operators_have_kernels():
    with_kernels = {param.values[0] for param in calls()} - WITHOUT
    assert len(with_kernels) > 100


GRID = [
    *(-3.5, -2.5, -2.0, -1.5, -1.0, -0.75, -0.5, -0.25, -0.0, 0.0, 1e-3, 0.25, 0.5, 0.75, 1.0),
    *(1.5, 2.0, 2.5, 3.5, 7.0, 1e10, -1e10, math.inf, -math.inf, math.nan),
]
BINARY = "add sub mul div pow hypot fmod copysign atan2 maximum minimum eq ne lt le gt ge".split()
ARITY = {"where": 3, **dict.fromkeys(BINARY, 2)}
FAR = {"lgamma", "pow", "sin", "cos", "tan", "erfc"}  # far from 0 libm's own differ more


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_primitive_is_printed_as(dtype):
    """Each operation of the CPU kernels on ordinary and odd numbers beside torch's, dtype kept."""
    from numba import njit, types

    names = sorted(PRIMITIVES - {"and", "or", "not"})
    lines = []
    for name in names:
        args = ("t", "a", "b") if name == "where" else ("a", "b")[: ARITY.get(name, 1)]
        lines.append(numba._line(Node(f"{name}_v", name, args)))
    body = "\n        ".join(["t = a > b", *lines])
    out = "\n        ".join(f"out[{n}, j] = {name}_v" for n, name in enumerate(names))
    ours = sorted(numba._OURS & set(names))
    space = {}
    source = (
        f"from math import {', '.join(sorted(numba._MATH & set(names)))}, inf, nan\n"
        f"from numba import {dtype} as real\n"
        + "".join(f"from openrnn.kernels.cpu.elementwise import {n}_{dtype} as {n}\n" for n in ours)
        + f"def every(first, second, out):\n    for j in range(len(first)):\n"
        f"        a, b = first[j], second[j]\n        {body}\n        {out}\n"
    )
    exec(source, space)
    # a value of another dtype would widen all that it meets
    kinds = njit(error_model="numpy")(space["every"])
    pairs = np.array([(a, b) for a in GRID for b in GRID], dtype)
    first, second = pairs[:, 0].copy(), pairs[:, 1].copy()
    found = np.zeros((len(names), len(pairs)), dtype)
    kinds(first, second, found)
    real = getattr(types, dtype)
    typed = next(iter(kinds.overloads.values())).type_annotation.typemap
    for n, name in enumerate(names):
        a, b = torch.from_numpy(first), torch.from_numpy(second)
        given = (a > b, a, b) if name == "where" else (a, b)[: ARITY.get(name, 1)]
        with np.errstate(all="ignore"):
            want = MEANING[name](*(g.double() if g.dtype != torch.bool else g for g in given))
            narrow = want.to(torch.float64).numpy().astype(dtype)
        eps = np.finfo(dtype).eps * (64 if name in FAR else 4)
        np.testing.assert_allclose(found[n], narrow, rtol=eps, atol=eps, err_msg=name)
        kind = next(known for place, known in typed.items() if place == f"{name}_v")
        assert kind in (real, types.boolean), f"{name} gives {kind}"


def test_numbers_without_a_literal(tmp_path):
    """inf and nan are printed as names that the module has."""

    @openrnn.cell(gates="a", states="h")
    def endless(x, r, s):
        return torch.where(x.a > r.a, -math.inf, s.h).clamp(-1.0, math.inf)

    traced = trace(endless)
    source = numba.source(traced, "float32")
    assert "real(-inf)" in source
    compile(source, "generated", "exec")
