"""A part of the fuzzer in every landing, and the fuzzer itself on planted faults."""

from pathlib import Path

import forks
import pytest
import torch
from cases import thinned
from fuzz import calling, graphs, judge, making, operators, tensors, verdict, workers
from fuzz.verdict import Outcome

from openrnn.codegen.trace import trace

ROOT = Path(__file__).parents[1]


def fuzz(*arguments):
    program = "import runpy; runpy.run_module('tests.fuzz', run_name='__main__', alter_sys=True)"
    return forks.python(program, "--small", "--jobs", "1", *arguments, cwd=ROOT)


@pytest.mark.parametrize(("calls", "cells"), thinned([(30, 5), (400, 60)], 2))
def test_calls_and_cells_end_well(calls, cells):
    calling.warm(small=True)  # by this process's forks: the program would start a Python for each
    done = fuzz("--calls", str(calls), "--cells", str(cells), "--compiled", "0")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"calls: {calls} draws" in done.stdout
    assert f"cells: {cells} draws" in done.stdout


def test_every_pointwise_operator_has_a_template():
    assert not operators.missing()


@pytest.mark.parametrize("kind", tensors.SAME)
def test_a_tensor_keeps_its_values(kind):
    """Odd tensors are judged by the plain ones beside them."""
    value = torch.arange(24.0).view(2, 3, 4)
    given, plain = tensors.twisted(kind, value)
    assert plain.shape == value.shape
    assert plain.is_contiguous()
    if kind not in ("expanded", "expanded_last", "windows", "zero_tensor"):
        assert torch.equal(plain, value)
    if kind not in ("functional", "wrapper", "wrapper_spread"):
        assert torch.equal(given + 0.0, plain)


# and on planted faults


def told(ends):
    """What the workers say of draws that end as `ends` tells, by number."""

    def draw(index, say):
        say(f"draw\ntwists=x{index}=odd")
        return ends[index]() or Outcome("planted", index, verdict.RIGHT)

    found = workers.run("planted", draw, list(range(len(ends))), jobs=1)
    return {one.index: (one.verdict, one.words) for one in found}


def crash():
    import ctypes

    ctypes.string_at(0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_draw_that_dies_is_a_fault_and_the_others_go_on():
    def broken():
        raise KeyError("the fuzzer's own")

    found = told([lambda: None, crash, lambda: None, broken, lambda: None])
    assert [found[index][0] for index in range(5)] == ["right", "fault", "right", "fault", "right"]
    assert "SIGSEGV" in found[1][1]
    assert "the fuzzer's own" in found[3][1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_draw_that_hangs_is_a_fault(monkeypatch):
    monkeypatch.setattr(workers, "CPU_SECONDS", 0.2)

    def hang():
        while True:
            pass

    assert told([hang, lambda: None])[0] == ("fault", "hang (computes)")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("x must have 2 columns, got 3"), "not raised by us"),
        (KeyError("x"), "KeyError is not for users"),
    ],
)
def test_not_a_sentence(error, why):
    with pytest.raises(type(error)) as raised:
        raise error
    assert verdict.not_a_sentence(raised.value) == why


def test_a_sentence_of_ours():
    import openrnn

    with pytest.raises(RuntimeError) as raised:
        openrnn.LSTM(3, 4)(torch.zeros(2, 2, 7))
    assert verdict.not_a_sentence(raised.value) is None


def test_what_differs_is_seen():
    exact = {"y": torch.ones(3, dtype=torch.float64)}
    plain = {"y": torch.ones(3)}

    def near(attempt):
        return exact

    eps = torch.finfo(torch.float32).eps
    assert not judge.wrong({"y": torch.ones(3) * (1 + eps)}, plain, exact, eps, near)
    assert "off by" in judge.wrong({"y": torch.ones(3) * 1.001}, plain, exact, eps, near)
    assert "off by" in judge.wrong({"y": torch.full((3,), torch.nan)}, plain, exact, eps, near)
    assert "shape" in judge.wrong({"y": torch.ones(1)}, plain, exact, eps, near)


def test_a_wrong_graph_is_seen():
    """The trace and both printed texts of another cell are not this one."""
    from fuzz import celling

    made = [
        making.Made(
            '@openrnn.cell(gates="f", states="h")\ndef fuzzed(x, r, s):\n'
            f"    return torch.tanh(x.f + {factor} * r.f) * s.h,\n", ("add",), False,
        ).cell(place)
        for place, factor in enumerate(("1.0", "1.1"))
    ]  # fmt: skip
    dice = torch.Generator().manual_seed(0)
    given = {n: torch.rand(celling.SHAPE, generator=dice) for n in ("x_f", "r_f", "s_h")}
    cotangents = {"d_h": torch.rand(celling.SHAPE, generator=dice)}
    plain = celling.truth(made[0], given, cotangents, torch.float32)
    exact = celling.truth(made[0], given, cotangents, torch.float64)
    allowed, _ = celling._allowed(made[0], given, cotangents, plain, exact)
    for cell, right in zip(made, (True, False)):
        traced = trace(cell)
        ways = [
            graphs.by_graph(traced, given, cotangents, torch.float32),
            graphs.by_python(traced, given, cotangents),
        ]
        for found in ways:
            assert (celling._differs(found, exact, allowed) == "") == right
