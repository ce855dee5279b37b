"""The verdict on a cell: its function and autograd beside its trace and the texts printed of it."""

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import openrnn
from openrnn.cells import Cell
from openrnn.codegen.trace import Traced, trace
from openrnn.errors import CellError

from . import graphs, judge
from .making import Made, make
from .verdict import (
    DISCARDED,
    FAULT,
    REFUSED,
    RIGHT,
    Outcome,
    first_line,
    not_a_sentence,
    place,
    signature,
)

SHAPE = (4, 16)
ILL = 0.3  # the share of badly conditioned numbers from which a draw is discarded
Say = Callable[[str], None]
Ended = tuple[str, str, str]


def check(seed: int, layers: bool = False, backend: str = "cpu") -> Callable[[int, Say], Outcome]:
    """The draw of cells: by their traces, or with `layers` by a backend."""

    def one(index: int, say: Say) -> Outcome:
        drawn = make(seed, index)
        say(f"cell\n{drawn.source}")
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ended = _run(drawn, index, backend) if layers else _verdict(drawn, index, seed)
        odd = frozenset({"integers" if ".int()" in drawn.source else drawn.uses[0]})
        kind = "compiled" if layers else "cells"
        return Outcome(kind, index, *ended, drawn.source, odd)

    return one


def _refusal(error: Exception, drawn: Made) -> Ended:
    """A cell that is not taken: in a sentence of ours, which may name the operator."""
    said = f"{type(error).__name__}: {first_line(error)}"
    why = not_a_sentence(error)
    if isinstance(error, CellError) and why == "names insides":
        why = None
    if why:
        return FAULT, f"{why}: {said} ({place(error)})", signature(why, place(error), said)
    return REFUSED, f"{drawn.uses[0]}: {said}", ""


def _verdict(drawn: Made, index: int, seed: int) -> Ended:
    try:
        cell = drawn.cell(index)
    except Exception as error:
        return _refusal(error, drawn)
    try:
        traced = trace(cell)
    except Exception as error:
        ended = _refusal(error, drawn)
        return _fallback(cell, drawn, ended) if ended[0] == REFUSED else ended
    if drawn.never:
        return FAULT, "traced, though not elementwise or not a function", "traced what it must not"
    dice = torch.Generator().manual_seed(seed * 1_000_003 + index)
    names = [f"{side}_{gate}" for side in "xr" for gate in cell.gates]
    names += [f"s_{state}" for state in cell.states] + [f"p_{each}" for each in cell.unit_params]
    given = {name: torch.rand(SHAPE, generator=dice) * 2 - 1 for name in names}
    cotangents = {f"d_{s}": torch.rand(SHAPE, generator=dice) * 2 - 1 for s in cell.states}
    try:
        plain = truth(cell, given, cotangents, torch.float32)
        exact = truth(cell, given, cotangents, torch.float64)
    except Exception as error:  # a derivative that torch lacks
        return DISCARDED, f"{drawn.uses[0]}: torch itself: {first_line(error)}", ""
    allowed, ill = _allowed(cell, given, cotangents, plain, exact)
    if ill > ILL:
        return DISCARDED, f"{drawn.uses[0]}: {ill:.0%} of the numbers are badly conditioned", ""
    ways: dict[str, Callable[[], Any]] = {
        "trace": lambda: graphs.by_graph(traced, given, cotangents, torch.float32),
        "numba": lambda: graphs.by_python(traced, given, cotangents),
    }
    if shutil.which("g++"):
        for dtype in ("float32", "bfloat16"):
            ways[f"cuda {dtype}"] = lambda dtype=dtype: graphs.by_cpp(
                traced, given, cotangents, dtype
            )
    for way, run in ways.items():
        try:
            found = run()
        except Exception as error:
            words = f"the printed {way} fails: {type(error).__name__}: {first_line(error)}"
            return FAULT, words, signature(words)
        if isinstance(found, str):
            return FAULT, f"C++ does not compile: {found}", signature("C++", found)
        words = _differs(found, exact, allowed)
        if words:
            return FAULT, f"{way}: {words}", f"{way} differs: {_kind(words)}"
    return RIGHT, "", ""


def _kind(words: str) -> str:
    names = {word.split("_")[0] for word in words.split() if word[:2] in ("dx", "dr", "ds", "dp")}
    return "gradients" if names and " off" in words and words[0] == "d" else "values"


def truth(cell: Cell, given: graphs.Values, cotangents: graphs.Values, dtype: Any) -> judge.Found:
    """New states and gradients from the function itself and autograd."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        leaves = {n: value.to(dtype, copy=True).requires_grad_() for n, value in given.items()}

        def take(kind: str, names: tuple[str, ...]) -> tuple[Tensor, ...]:
            return tuple(leaves[f"{kind}_{name}"] for name in names)

        new = cell.step(
            take("x", cell.gates), take("r", cell.gates), take("s", cell.states),
            take("p", cell.unit_params),
        )  # fmt: skip
        total = torch.zeros((), dtype=dtype)
        for name, value in zip(cell.states, new):
            if value.requires_grad:
                total = total + (value * cotangents[f"d_{name}"].to(dtype)).sum()
        grads: Any = [None] * len(leaves)
        if total.requires_grad:
            grads = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
        found = {
            name: value.detach().expand(SHAPE).to(dtype) for name, value in zip(cell.states, new)
        }
        for name, grad in zip(leaves, grads):
            found[f"d{name}"] = torch.zeros(SHAPE, dtype=dtype) if grad is None else grad
        return found
    finally:
        torch.set_default_dtype(before)


def _allowed(
    cell: Cell, given: graphs.Values, cotangents: graphs.Values,
    plain: judge.Found, exact: judge.Found,
) -> tuple[judge.Found, float]:  # fmt: skip
    """For each number how far a fair answer may be off; and the share that is badly conditioned.

    By the error of the function itself in float32, and by what a rounding of its inputs changes.
    """
    eps = torch.finfo(torch.float32).eps
    off = {name: (plain[name].double() - want).abs() for name, want in exact.items()}
    for attempt in range(4):
        dice = torch.Generator().manual_seed(attempt)
        near = {
            name: value.double()
            + 2 * eps * (torch.rand(SHAPE, generator=dice, dtype=torch.float64) * 2 - 1)
            for name, value in given.items()
        }
        for name, value in truth(cell, near, cotangents, torch.float64).items():
            off[name] = torch.maximum(off[name], (value - exact[name]).abs())
    found, ill, total = {}, 0, 0
    for name, want in exact.items():
        off[name] = off[name].nan_to_num(nan=torch.inf)
        found[name] = 16 * off[name] + 64 * eps * want.abs().clamp(min=1)
        ill += int((off[name] > 1e-2).sum())
        total += want.numel()
        found[name] = torch.where(off[name] > 1e-2, torch.inf, found[name])
    return found, ill / total


def _differs(found: judge.Found, exact: judge.Found, allowed: judge.Found) -> str:
    wrong = []
    for name, value in found.items():
        want = exact[name.removeprefix("again_")]
        limit = allowed[name.removeprefix("again_")]
        error = (value.double() - want).abs()
        same = (value.double() == want) | (value.isnan() & want.isnan())
        # a number that is nan here and not there is wrong, wherever any number would do
        bad = ~same & ~(error <= limit) & ~limit.isinf()
        if bad.any():
            at = int(bad.flatten().nonzero()[0])
            wrong.append(f"{name} off by {error.flatten()[at]:.1e}, "
                         f"allowed {limit.flatten()[at]:.1e}")  # fmt: skip
    missing = exact.keys() - found.keys()
    wrong += [f"{name} is missing" for name in sorted(missing)]
    return "; ".join(wrong[:3])


def _layer(cell: Cell, backend: str, dtype: torch.dtype, device: str) -> openrnn.Recurrent:
    layer = openrnn.Recurrent(cell, 3, 5, backend=backend, dtype=dtype, device=device)
    dice = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        drawn = torch.rand(parameter.shape, generator=dice, dtype=torch.float64) - 0.5
        parameter.data = drawn.bfloat16().to(device, dtype)  # numbers that every dtype holds
    return layer


def _layered(
    cell: Cell, backend: str, dtype: torch.dtype, noise: float = 0.0, seed: int = 0,
    device: str = "cpu",
) -> judge.Found:  # fmt: skip
    """Outputs and gradients of a small layer of the cell."""
    layer = _layer(cell, backend, dtype, device)
    dice = torch.Generator().manual_seed(2)
    x = (torch.rand(4, 3, 3, generator=dice) * 2 - 1).bfloat16().to(device, dtype)
    shift = torch.Generator().manual_seed(seed)
    for tensor in (x, *layer.parameters()):
        wobble = torch.rand(tensor.shape, generator=shift, dtype=torch.float64) * 2 - 1
        tensor.data = (tensor.data.double() * (1 + noise * wobble.to(device))).to(dtype)
    x.requires_grad_()
    y, finals = layer(x)
    found = {"y": y, **{f"{name}_n": value for name, value in zip(cell.states, finals)}}
    total: Any = 0
    for value in found.values():
        weights = torch.linspace(-1, 1, value.numel()).bfloat16().to(device, dtype)
        total = total + (value.flatten() * weights).sum()
    leaves = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
    found |= {
        f"d{n}": torch.zeros_like(v) if g is None else g for (n, v), g in zip(leaves.items(), grads)
    }
    return {name: value.detach().cpu() for name, value in found.items()}


def _fallback(cell: Cell, drawn: Made, ended: Ended) -> Ended:
    """A cell without a kernel runs on the reference, unless it is not elementwise."""
    try:
        found = _layered(cell, "auto", torch.float32)
    except Exception as error:
        if isinstance(error, CellError):
            return ended
        if "derivative" in str(error) or "does not require grad" in str(error):
            return ended  # torch has none, and says so
        return _refusal(error, drawn)
    if drawn.uses[0] == "not_elementwise":
        return FAULT, "runs, though it is not elementwise", "runs what is not elementwise"
    if drawn.uses[0] != "random":
        for name, value in _layered(cell, "reference", torch.float32).items():
            if judge.distance(found[name], value):
                return FAULT, f"{name} is not the reference's", "auto is not the reference"
    return REFUSED, f"{drawn.uses[0]}: runs on the reference only: {ended[1]}", ""


def _run(drawn: Made, index: int, backend: str) -> Ended:
    """The cell's kernels beside the reference."""
    device = "cpu" if backend == "cpu" else "cuda"
    try:
        cell = drawn.cell(index)
        traced: Traced | None = trace(cell)
    except Exception as error:
        return _refusal(error, drawn)
    del traced
    # float32 products of a GPU are tf32's, whose mantissa is as long as float16's
    dtype = torch.float32 if device == "cpu" or index % 2 else torch.bfloat16
    eps = torch.finfo(dtype).eps if device == "cpu" or index % 2 == 0 else 2.0**-10
    try:
        plain = _layered(cell, "reference", dtype)
        exact = _layered(cell, "reference", torch.float64)
    except Exception as error:
        return DISCARDED, f"{drawn.uses[0]}: torch itself: {first_line(error)}", ""
    try:
        found = _layered(cell, backend, dtype, device=device)
    except Exception as error:
        return _refusal(error, drawn)

    def near(attempt: int) -> judge.Found:
        return _layered(cell, "reference", torch.float64, 4 * eps, attempt)

    words = judge.wrong(found, plain, exact, eps, near, terms=32.0)
    if words:
        return FAULT, f"{backend}: {words}", f"{backend} differs: {_kind(words)}"
    return RIGHT, "", ""
