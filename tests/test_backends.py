"""Every backend against float64: every cell, every feature, outputs and all gradients."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import (
    BACKENDS,
    CELLS,
    CLIP,
    CORNERS,
    DTYPES,
    ON_CPU,
    Case,
    Inputs,
    Oracle,
    ask,
    cases,
    check,
    examples,
    require,
    takes,
    with_cell,
)
from hypothesis import HealthCheck, given, settings
from torch import Tensor, sigmoid, tanh
from torch.nn import functional as F

import openrnn
from openrnn import cells, dispatch, reference

# the reference in its own dtype is the measure; what it is measured by is in test_reference.py
# a new size is a new kernel for `fused`
SHARE = {"reference": 0.3, "fused": 0.4}
# On a CPU each cell, dtype and clip is compiled, 15 s or more: these cells have few random cases
# there, none of float64 or with a clip. `test_the_rest` asks for some of that once, but not of
# coupled_lstm and mgu, whose operations lstm and gru have.
ALIKE = ("coupled_lstm", "mgu", "peephole_lstm", "rnn_relu")


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_worse_than_the_reference(backend, cell):
    """The error against float64 is at most twice that of the reference run in the same dtype."""
    require(backend)
    few = backend == "cpu" and cell in ALIKE
    share = SHARE.get(backend, 0.2 if few else 1.0)
    dtypes = DTYPES[:-1] if few else DTYPES

    @settings(examples(share), suppress_health_check=[HealthCheck.too_slow])
    @given(cases(CELLS[cell], dtypes, clip=not few))
    def holds(case):
        check(case, backend)

    holds()


@pytest.mark.parametrize(("cell", "clip"), [("peephole_lstm", CLIP), ("rnn_relu", None)], ids=str)
def test_the_rest(cell, clip):
    """float64 of the cells with vectors and with a corner, which random cases leave out."""
    require("cpu")
    case = with_cell(CORNERS["everything_float64"], CELLS[cell])
    check(replace(case, spec=case.spec.with_(cell_clip=clip)), "cpu")


def corners():
    """On a CPU, where loops are the same for both cells, a landing has each corner once.

    Of the reference, by whose own rounding it is judged, it has every third of them.
    """
    for number, corner in enumerate(CORNERS):
        for place, cell in enumerate(("lstm", "gru")):
            for backend in BACKENDS:
                name, marks = backend, []
                if not isinstance(backend, str):
                    (name,), marks = backend.values, [*backend.marks]
                variant = name in ON_CPU and (number + place) % 2
                if name == "reference":
                    variant = variant or number % 3 > 0
                if corner == "many_steps":  # takes seconds
                    variant = cell == "gru" or name == "reference"
                if variant:
                    marks.append(pytest.mark.slow)
                yield pytest.param(name, corner, cell, marks=marks)


@pytest.mark.parametrize(("backend", "corner", "cell"), [*corners()])
def test_corners(backend, corner, cell):
    require(backend)
    check(with_cell(CORNERS[corner], CELLS[cell]), backend)


def check_clip(backend, clip, dtype):
    require(backend)
    spec = cells.lstm.spec(3, 5, cell_clip=clip)
    case = Case(spec, dtype, steps=6, states=True, return_states=True, seed=3)
    check(case, backend)
    if not takes(backend, case.problem):
        return
    stored = ask(case, Inputs.of(case), backend)["all_c"]
    assert clip[1] == 100 or stored.abs().max() > 0.5, "c is stored unclipped"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_clip(backend, dtype):
    """Bounds that bite on both sides."""
    check_clip(backend, CLIP, dtype)


@pytest.mark.parametrize(
    ("clip", "dtype"),
    [((0.0, 0.0), torch.float32), ((0.0, 0.0), torch.bfloat16), ((-100.0, 100.0), torch.float64),
     ((-100.0, 100.0), torch.float16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "cpu"])
def test_clip_at_the_edges(backend, clip, dtype):
    """Bounds that leave one value, that never bite; on a CPU the same code with other numbers."""
    check_clip(backend, clip, dtype)


@openrnn.cell(gates="a b", states="h u v", params="p q")
def awkward(x, r, s, p):
    """Reads x and r apart and summed, has a state that feeds nothing else, needs many rules."""
    a = F.silu(x.a + r.a) - 0.5 * x.a * r.a
    u = torch.where(x.b > r.b, F.softplus(s.u), F.gelu(s.u)) * p.p
    v = (s.v.clamp(-0.5, 0.5) + 0.1 * (1 + a * a).sqrt()) / (1 + s.u.pow(2) + torch.exp(-p.q * p.q))
    return tanh(a + u) * sigmoid(v + r.b) + 0.25 * s.h, u, v


@openrnn.cell(gates="a", states="h k")
def idle(x, r, s):
    """A state that never changes, and a gate of which only one side is read."""
    return tanh(r.a + s.k), s.k


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled by a number."""

    @staticmethod
    def forward(value, by):
        return value.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.by, None


class Clipped(torch.autograd.Function):
    """The identity, whose gradient is clipped; its context in forward, as functions once were."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        (value,) = ctx.saved_tensors
        return torch.where(value < 1.0, grad.clamp(-0.05, 0.08), 0.0)


@openrnn.cell(gates="a b c", states="h k")
def sided(x, r, s):
    """Of each gate the sum alone is read, and its two sides have other gradients."""
    a, b = tanh(x.a + r.a.detach()), sigmoid(x.b.detach() + r.b)
    k = a * b + s.k.detach()
    return tanh(Scaled.apply(x.c, 0.25) + r.c) * b + 0.5 * k, 0.5 * k


@openrnn.cell(gates="a b", states="after before", params="vectors int")
def functions(x, r, s, p):
    """Functions that no cell of ours has; names that generated source has for itself."""
    a = Clipped.apply(0.5 * (x.a + r.a)) + torch.atan2(s.before, 2.0 + p.vectors * p.vectors)
    b = 1.5 + torch.tanh(x.b - r.b)
    smooth = torch.asinh(a) + torch.sinh(0.1 * a) + torch.atan(b) + torch.hypot(a, b)
    smooth = smooth + torch.log2(b) + torch.log10(b) + torch.erfc(a) + torch.tan(0.1 * b)
    stepped = F.hardswish(a) + F.softshrink(b, 0.1) + F.hardsigmoid(a) + torch.copysign(b, p.int)
    # where their jumps are, no two float32 answers need agree: so only of what is exact
    whole = torch.round(8.0 * torch.sign(p.int)) + torch.remainder(torch.sign(p.vectors), 3.0)
    whole = whole + torch.div(7.0 * torch.sign(p.int), 2.0, rounding_mode="floor")
    mask = (p.int > 0) ^ (p.vectors > 0)
    before = torch.tanh(0.2 * smooth + 0.1 * stepped + 0.01 * whole) + 0.1 * mask.float()
    return torch.tanh(before * 0.5 + 0.25 * s.after), before


OWN = {
    "everything": {},
    "some gradients": {"needs": "some", "seed": 1},
    "two steps": {"reset": None, "steps": 2},
}


def cells_of_ones_own():
    """On a CPU, where the loops around them are the same, a landing has most cells once."""
    for backend in BACKENDS:
        for cell in (awkward, idle, sided, functions):
            for name in OWN:
                variant = backend in ON_CPU and name != "everything"
                if backend == "cpu" and cell is awkward:  # with the most states and vectors
                    variant = False
                marks = [pytest.mark.slow] if variant else []
                if not isinstance(backend, str):
                    marks += backend.marks
                word = backend if isinstance(backend, str) else backend.values[0]
                yield pytest.param(word, cell, name, marks=marks, id=f"{word}-{cell.name}-{name}")


@pytest.mark.parametrize(("backend", "cell", "name"), [*cells_of_ones_own()])
def test_a_cell_of_ones_own(backend, cell, name):
    require(backend)
    check(replace(with_cell(CORNERS["everything"], cell), **OWN[name]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_gradient_alone(backend):
    """Asking for one gradient gives that of asking for all, bit for bit."""
    require(backend)
    case = replace(CORNERS["everything"], batch=3, steps=3)
    inputs = Inputs.of(case)
    everything = ask(case, inputs, backend)
    for name in inputs.leaves:
        inputs.required = frozenset({name})
        alone = ask(case, inputs, backend)
        assert {key for key in alone if key[1:] in inputs.leaves and key[0] == "d"} == {f"d{name}"}
        assert torch.equal(alone[f"d{name}"], everything[f"d{name}"]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_do_not_change_what_is_right(backend):
    """Tiles of the batch on several threads: no row is lost or done twice."""
    require(backend)
    case = replace(CORNERS["many_rows"], states=True, steps=4)
    inputs, threads = Inputs.of(case), torch.get_num_threads()
    oracle = Oracle.of(case, inputs, backend)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            oracle.judge(ask(case, inputs, backend))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", dispatch.BACKENDS)
def test_takes_what_its_row_says(backend):
    """No refusal but those in cases.REFUSALS, which `takes` compares in both directions."""
    problem = CORNERS["everything"].problem
    for cell in cells.lstm, cells.gru, cells.gru_reset_before:
        for change in ({}, {"transform": True}, {"device": "xpu"}, {"dtype": torch.float64}):
            takes(backend, replace(problem, spec=cell.spec(3, 4), **change))


# and the judge itself, on planted faults


@pytest.fixture(scope="module")
def judged():
    """The oracle of a call, and a function that makes the reference's own answer."""
    case = CORNERS["everything"]
    inputs = Inputs.of(case)
    return Oracle.of(case, inputs), partial(ask, case, inputs, "reference")


@pytest.mark.parametrize(
    "fault", ["y", "h_n", "all_c", "dx", "dweight_hh_l0", "dbias_ih_l1", "dc_0", "dreset_h_0"]
)
def test_a_small_fault_is_seen(judged, fault):
    """One element off by a hundred-thousandth of its tensor's largest is too much in float32."""
    oracle, found = judged[0], judged[1]()
    oracle.judge(found)
    last = (-1,) * found[fault].dim()
    found[fault][last] += 1e-5 * max(1.0, found[fault].abs().max().item())
    with pytest.raises(AssertionError, match=f"{fault}: error"):
        oracle.judge(found)


def test_a_leak_of_padding_is_seen(monkeypatch):
    case, where = CORNERS["lengths_without_states"], torch.where

    def leaky(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return a if isinstance(b, int) else where(mask, a, b)

    monkeypatch.setattr(reference.torch, "where", leaky)
    with pytest.raises(AssertionError, match="nan leaks"):
        check(case, "reference")


def test_an_unexpected_refusal_is_seen(monkeypatch):
    backend = dispatch.BACKENDS["reference"]
    monkeypatch.setattr(backend, "can", replace(backend.can, lengths=False))
    with pytest.raises(AssertionError, match="reference refuses: does not do lengths"):
        check(CORNERS["all_lengths_zero"], "reference")
