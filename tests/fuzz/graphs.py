"""A traced cell evaluated as a graph, as the text printed for numba, and as the CUDA C++ of it."""

import ast
import ctypes
import math
import re
import subprocess
import tempfile
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrnn.codegen import cuda, numba
from openrnn.codegen.trace import Traced

Values = dict[str, Tensor]

# what primitives mean; one that is not here means what torch means by its name
MEANING: dict[str, Any] = {
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "where": torch.where,
    "logsigmoid": torch.nn.functional.logsigmoid,
    "const": lambda value: value,
}  # fmt: skip


def evaluated(graph: Any, given: Values, dtype: torch.dtype) -> Values:
    """The outputs of a graph for inputs by name."""
    values: dict[str, Any] = dict(given)
    size = next(iter(given.values())).shape

    def value(arg: Any) -> Tensor:
        return values[arg] if isinstance(arg, str) else torch.tensor(arg, dtype=dtype)

    for node in graph.nodes:
        meaning = MEANING.get(node.op) or getattr(torch, node.op)
        args = [value(arg) for arg in node.args]
        if node.op in ("and", "or", "not"):
            args = [arg != 0 for arg in args]
        if node.op == "where":
            args[0] = args[0] != 0
        values[node.name] = meaning(*args)
    return {name: value(arg).to(dtype).expand(size) for name, arg in graph.outputs.items()}


def both_sides(cell: Traced, found: Values) -> Values:
    """Gradients by the names of inputs, those of sums given to both sides."""
    for gate in cell.gates:
        if f"da_{gate}" in found:
            found[f"dx_{gate}"] = found[f"dr_{gate}"] = found.pop(f"da_{gate}")
    return found


def by_graph(cell: Traced, given: Values, cotangents: Values, dtype: torch.dtype) -> Values:
    """New states and gradients from the graphs."""
    found = evaluated(cell.step, given, dtype)
    sums = {f"a_{gate}": given[f"x_{gate}"] + given[f"r_{gate}"] for gate in cell.summed}
    again = evaluated(cell.summed_step, given | sums, dtype)
    # the same but for the rounding of a sum that is regrouped
    found |= {f"again_{name}": value for name, value in again.items()}
    kept = {name: (given | sums)[name] for name in cell.saved}
    others = {name: value for name, value in given.items() if name[0] in "sp"}
    grads = evaluated(cell.derivative, kept | others | cotangents, dtype)
    return found | both_sides(cell, grads)


# --- numba's text, as plain Python -------------------------------------------------------------

PYTHON: dict[str, Any] = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "logsigmoid": lambda x: -np.logaddexp(0.0, -x),
    "softplus": lambda x: np.logaddexp(0.0, x),
    "pow": np.power, "erf": lambda x: np.float32(math.erf(x)), "abs": np.abs,
    "erfc": lambda x: np.float32(math.erfc(x)), "atan2": np.arctan2, "atan": np.arctan,
    "asin": np.arcsin, "acos": np.arccos, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "lgamma": lambda x: np.float32(math.lgamma(x)),
    "fabs": np.abs, "math": math, "np": np, "real": np.float32, "float32": np.float32,
    "no_overlap": lambda: None, "njit": lambda **_: lambda function: function,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip


def _function(source: str, name: str) -> Any:
    """A function of generated source, without what numba needs around it."""
    tree = ast.parse(source)
    parts = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    scope: dict[str, Any] = {n: getattr(np, n) for n in dir(np) if not n.startswith("_")}
    scope |= PYTHON
    exec(compile(ast.Module(parts, []), f"<{name}>", "exec"), scope)
    return scope[name]


def by_python(cell: Traced, given: Values, cotangents: Values) -> Values:
    """New states and gradients from the text printed for numba."""
    source, summed = numba.source(cell, "float32"), numba.all_summed(cell)
    count = next(iter(given.values())).numel()

    def rows(prefix: str, names: Any) -> Any:
        found = [given[f"{prefix}_{name}"].flatten().numpy() for name in names]
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def blank(number: int) -> Any:
        return np.full(number * count, np.nan, np.float32)

    x, r = rows("x", cell.gates), rows("r", cell.gates)
    if summed:
        x = x + r
    first, *others = cell.states
    state = {
        "h_before": rows("s", [first]), "before": rows("s", others), "units": count,
        "vectors": rows("p", cell.unit_params), "stride": count,
    }  # fmt: skip
    zeros = np.zeros(len(cell.gates) * count, np.float32)
    h_after, after, saved = blank(1), blank(len(others)), blank(len(cell.gates))
    with np.errstate(all="ignore"):
        _function(source, "step_row")(
            x=x, r=r, bias=zeros, bias_r=zeros, h_after=h_after, after=after, saved=saved, **state
        )
        found = dict(zip(cell.states, [h_after, *np.split(after, max(1, len(others)))]))
        d_others = [cotangents[f"d_{name}"].flatten().numpy() for name in others]
        dr, dx, d_h, d_before = (blank(n) for n in (len(cell.gates),) * 2 + (1, len(others)))
        d_vectors = np.zeros(len(cell.unit_params) * count, np.float32)
        _function(source, "derivative_row")(
            x=x, r=saved, bias=zeros, dr=dr, dx=dx, d_h_before=d_h, d_before=d_before,
            d_vectors=d_vectors, d_h_after=cotangents[f"d_{first}"].flatten().numpy(),
            d_after=np.concatenate(d_others) if d_others else np.zeros(0, np.float32), **state,
        )  # fmt: skip
    dx = dr if summed else dx

    def split(prefix: str, names: Any, values: Any) -> None:
        found.update({f"{prefix}_{n}": values[k * count :][:count] for k, n in enumerate(names)})

    for prefix, names, values in (
        ("dx", cell.gates, dx), ("dr", cell.gates, dr), ("ds", [first], d_h),
        ("ds", others, d_before), ("dp", cell.unit_params, d_vectors),
    ):  # fmt: skip
        split(prefix, names, values)
    shape = next(iter(given.values())).shape
    return {
        name: torch.from_numpy(np.array(value[:count])).view(shape) for name, value in found.items()
    }


# --- CUDA C++, as C++ of the host -----------------------------------------------------------------

SHIM = r"""
#define ONE(name) float name(float);
#define TWO(name) float name(float, float);
extern "C" {
ONE(expf) ONE(expm1f) ONE(logf) ONE(log1pf) ONE(sqrtf) ONE(sinf) ONE(cosf) ONE(erff) ONE(tanhf)
ONE(floorf) ONE(fabsf) ONE(exp2f) ONE(ceilf) ONE(truncf) ONE(rintf) ONE(atanf) ONE(asinf)
ONE(acosf) ONE(sinhf) ONE(coshf) ONE(tanf) ONE(asinhf) ONE(acoshf) ONE(atanhf) ONE(erfcf)
ONE(log2f) ONE(log10f) ONE(lgammaf) ONE(roundf) ONE(nearbyintf) ONE(exp10f) ONE(tgammaf)
ONE(cbrtf)
TWO(powf) TWO(fminf) TWO(fmaxf) TWO(fmodf) TWO(atan2f) TWO(hypotf) TWO(copysignf) TWO(nextafterf)
TWO(remainderf)
float fmaf(float, float, float); float ldexpf(float, int);
}
typedef unsigned int uint32;
typedef long long int64;
template <class To, class From> static inline To bits_of(From from) {
    To to;
    __builtin_memcpy(&to, &from, 4);
    return to;
}
#define __int_as_float bits_of<float, int>
#define __uint_as_float bits_of<float, uint32>
#define __float_as_int bits_of<int, float>
#define __float_as_uint bits_of<uint32, float>
#define INLINE static inline __attribute__((unused))
#define isnan __builtin_isnan
#define isinf __builtin_isinf
#define isfinite __builtin_isfinite
"""
INSTRUCTIONS = {"ex2.approx": "exp2f(x)", "rcp.approx": "1.0f / x", "tanh.approx": "tanhf(x)"}


@lru_cache
def _functions() -> str:
    """`functions.cuh`, its instructions of a GPU replaced by what they compute."""
    text = (files("openrnn.kernels.cuda") / "functions.cuh").read_text(encoding="utf-8")

    def replaced(found: re.Match[str]) -> str:
        for name, said in INSTRUCTIONS.items():
            if name in found[0]:
                return f"y = {said};"
        return found[0]

    return re.sub(r"asm[^;]*?;\s*\S*?[^;]*?\);", replaced, text)


_DEFINED = re.compile(r"^#define (\w+) (\d+)$", re.MULTILINE)


def cpp_source(cell: Traced, dtype: str) -> str:
    """A library of `run`: step and derivative of many units, one by one.

    The functions and constants are those of the kernels' sources, whatever a printer renames.
    """
    forward, backward = cuda.examples(cell, dtype)
    constants = dict(_DEFINED.findall(forward)) | dict(_DEFINED.findall(backward))
    scaled = int(dict(_DEFINED.findall(forward))["SCALED"])
    wanted = "GATES STATES VECTORS ACTIVATIONS PLANES FACTORS NARROW BFLOAT".split()
    functions = [
        re.search(rf"INLINE void {name}\(.*?\n}}\n", text, re.DOTALL)
        for name, text in (("step", forward), ("factors", backward), ("derivative", backward))
    ]
    halved = [f"    r[{k}] *= 0.5f;" for k in range(len(cell.gates)) if scaled >> k & 1]
    return "\n".join([
        *(f"#define {name} {constants[name]}" for name in wanted), SHIM, _functions(),
        "namespace cell {", *(found[0] for found in functions if found), "}",
        'extern "C" void run(int n, const float* xs, const float* rs, const float* ss, '
        "const float* ps, const float* ds, float* after, float* gates, float* befores, "
        "float* vectors_out) {\nfor (int at = 0; at < n; ++at) {",
        "    float x[GATES], r[GATES], s[STATES], p[VECTORS + 1], d[STATES];",
        "    float a[STATES], kept[ACTIVATIONS + 4], factor[FACTORS + 1], g[PLANES], b[STATES], "
        "v[VECTORS + 1];",
        "    for (int k = 0; k < GATES; ++k) x[k] = xs[k * n + at], r[k] = rs[k * n + at];",
        "    for (int k = 0; k < STATES; ++k) s[k] = ss[k * n + at], d[k] = ds[k * n + at];",
        "    for (int k = 0; k < VECTORS; ++k) p[k] = ps[k * n + at];",
        *halved,
        "    cell::step(x, r, s, p, a, kept);", "    cell::factors(kept, p, factor);",
        "    cell::derivative(factor, d, g, b, v);",
        "    for (int k = 0; k < STATES; ++k) after[k * n + at] = a[k];",
        "    for (int k = 0; k < STATES; ++k) befores[k * n + at] = b[k];",
        "    for (int k = 0; k < PLANES; ++k) gates[k * n + at] = g[k];",
        "    for (int k = 0; k < VECTORS; ++k) vectors_out[k * n + at] = v[k];", "} }",
    ])  # fmt: skip


def by_cpp(cell: Traced, given: Values, cotangents: Values, dtype: str) -> Values | str:
    """New states and gradients from the C++, compiled for the host; or the compiler's words."""
    with tempfile.TemporaryDirectory() as folder:
        path, library = Path(folder, "cell.cpp"), Path(folder, "cell.so")
        path.write_text(cpp_source(cell, dtype), encoding="utf-8")
        command = ["g++", "-O0", "-w", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off",
                   str(path), "-o", str(library)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            return (lines or ["g++ fails"])[0].partition("error: ")[2]
        run = ctypes.CDLL(str(library)).run
    count, shape = next(iter(given.values())).numel(), next(iter(given.values())).shape

    def rows(prefix: str, names: Any, values: Values) -> Tensor:
        found = [values[f"{prefix}_{name}"].flatten() for name in names]
        return torch.cat(found).contiguous() if found else torch.zeros(1)

    r = {
        f"r_{gate}": given[f"r_{gate}"] + (given[f"x_{gate}"] if gate in cell.summed else 0)
        for gate in cell.gates
    }
    planes = cuda.planes(cell)
    sizes = (len(cell.states), len(planes), len(cell.states), len(cell.unit_params))
    outs = [torch.full((max(1, size) * count,), math.nan) for size in sizes]
    ins = [rows("x", cell.gates, given), rows("r", cell.gates, r), rows("s", cell.states, given),
           rows("p", cell.unit_params, given), rows("d", cell.states, cotangents)]  # fmt: skip
    run(count, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (*ins, *outs)))
    found: Values = {}
    names = [list(cell.states), list(planes), [f"ds_{s}" for s in cell.states],
             [f"dp_{p}" for p in cell.unit_params]]  # fmt: skip
    for out, words in zip(outs, names):
        found |= {n: out[k * count : (k + 1) * count].view(shape) for k, n in enumerate(words)}
    return both_sides(cell, found)
