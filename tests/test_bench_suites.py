"""The suites of `openrnn bench` beyond users' rows: their defaults, host modes, states, memory."""

import mmap
from dataclasses import replace

import pytest
import torch
from bench_cases import QUICK, TINY, alone, result  # noqa: F401

from openrnn import cells
from openrnn.bench import report, timer
from openrnn.bench.cases import OWN_CELL, BenchRow
from openrnn.bench.check import Judge, by_torch, outputs
from openrnn.bench.engines import PEERS, USERS, engines_of
from openrnn.bench.engines.base import Ready, leaf
from openrnn.bench.engines.graph import GraphReplay
from openrnn.bench.engines.nn import Packed, StepLoop, Torch
from openrnn.bench.engines.ours import DirectCudnn, Ours, Recomputing, plain
from openrnn.bench.engines.python import Eager
from openrnn.bench.measure import measure
from openrnn.bench.modes import HOST_MODES
from openrnn.bench.options import Options, choice_of
from openrnn.bench.ratios import lines_of
from openrnn.bench.suites import DEFAULTS, SUITES, names_of
from openrnn.bench.tables import HEADS, TITLES, errors_sheet
from openrnn.bench.task import Task
from openrnn.nn import Layer

RESIDENT_PEAK = timer._resident_peak  # before tests put another in its place
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_suite_says_what_is_run_by_default():
    fused = choice_of(Options(suite="fused"), "fused", "cuda")
    assert (fused.dtype, fused.backend) == (("bfloat16", "float16", "tf32"), "fused")
    assert fused.against == ("torch", "graph", "cudnn-graph")
    assert choice_of(Options(), "users", "cuda").against == USERS
    asked = Options(suite="fused", dtype=("tf32",), against=(), backend="auto")
    assert vars(choice_of(asked, "fused", "cuda")) == {
        "dtype": ("tf32",), "against": (), "backend": "auto",
    }  # fmt: skip
    here = choice_of(Options(suite="fused"), "fused", "cpu")
    assert (here.dtype, here.backend) == (("auto",), "auto")
    assert choice_of(Options(baseline="x"), "fused", "cuda").against == ()
    both = choice_of(replace(asked, suite="users,fused"), "users,fused", "cuda")
    assert both.dtype == ("tf32",)
    with pytest.raises(ValueError, match="suites users,fused have different defaults: name --"):
        choice_of(Options(), "users,fused", "cuda")
    assert names_of("users, cpu") == ("users", "cpu")
    for name, defaults in DEFAULTS.items():
        assert name in SUITES
        assert set(defaults.against) <= set(PEERS)
    assert set(PEERS) <= set(TITLES)
    assert set(PEERS) <= set(HEADS)


def test_the_suites_of_the_former_scripts_hold_their_rows():
    fused = {(row.cell, row.hidden, row.batch) for row in SUITES["fused"]}
    assert {("lstm", 64, 1), ("gru", 1024, 256), ("rnn_tanh", 1760, 128)} <= fused
    assert [row.steps for row in SUITES["fused"] if row.steps != 256] == [1024]
    assert {row.cell for row in SUITES["cells"]} == {
        "peephole_lstm", OWN_CELL, "coupled_lstm", "lstm",
    }  # fmt: skip
    users = {row.name: row for row in SUITES["users"]}
    assert len(SUITES["cudnn"]) == len(users)
    assert not any(row.resets for row in SUITES["cudnn"])
    assert all(row.modes == HOST_MODES for row in SUITES["host"])
    assert all(row.full and row.modes == ("forward",) for row in SUITES["precision"])
    assert {row.states for row in SUITES["precision"]} == {0.0, 1.0, 1e3, 1e6}


# the host's part of a call


def test_every_kind_of_call_computes_the_same():
    row = replace(TINY, modes=("forward", "training", *HOST_MODES))
    found = measure(row, "float32", "cpu", engines_of(("torch",), "reference"), QUICK)
    assert {(one.mode, one.engine, one.status) for one in found} == {
        (mode, engine, "ok") for mode in row.modes for engine in ("openrnn", "torch")
    }
    assert not GraphReplay("graph", Torch()).concerns(Task(row, "float32", "cpu"))


def test_calls_differ_in_what_autograd_does():
    task = Task(replace(TINY, modes=HOST_MODES), "float32", "cpu")
    x, calls = leaf(task.x), []

    def call():
        calls.append((torch.is_grad_enabled(), torch.autograd.is_multithreading_enabled()))
        return (2 * x)[..., :1].expand(-1, -1, TINY.hidden)

    ready = Ready(task, call, {"x": x})
    for mode in ("host-forward", "host-recorded", "host-training", "host-one-thread"):
        ready.run(mode)
    assert calls == [(False, True), (True, True), (True, True), (True, False)]
    calls.clear()
    first, again = ready.run("host-backward"), ready.run("host-backward")
    assert len(calls) == 1  # one forward call, whose gradients are taken twice
    assert torch.equal(first[1], again[1])
    assert ready.names("host-backward") == ["y", "dx"]
    dy = task.dy.sum(-1, keepdim=True)  # y has the square of one number of x, H times
    ready = Ready(task, lambda: (x**2)[..., :1].expand(-1, -1, TINY.hidden), {"x": x})
    _, grad = ready.run("gradient-penalty")
    wanted = torch.zeros_like(x)
    wanted[..., :1] = 8 * x[..., :1] * dy**2
    torch.testing.assert_close(grad, wanted)
    assert ready.names("gradient-penalty") == ["y", "dx"]


def test_the_hosts_part_does_not_wait_for_the_device(monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    timer.sample(lambda: told.append("call"), 2, "cuda", host=True)
    assert told == ["wait", "call", "call", "wait"]


# states and numbers of rows that are about errors


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_states_are_those_of_the_row(cell):
    row = BenchRow("states", cell, 9, 4, 3, 5, resets=0.4, states=10.0, full=True)
    task = Task(row, "float32", "cpu")
    assert not torch.equal(task.x, task.x.bfloat16().float())
    assert float(task.states[0].std()) > 3
    judge = Judge(task)
    for engine in (Ours("reference"), StepLoop()):
        ready = next(iter(engine.candidates(task)))
        for mode in row.modes:
            assert judge.verdict(outputs(ready, mode), mode).right, (engine.name, mode)
    zeros = Judge(Task(replace(row, states=0.0), "float32", "cpu"))
    assert not zeros.verdict(outputs(plain(task), "forward"), "forward").right
    part = task.part(5, 2)
    assert [state.shape for state in part.states + part.fresh] == 2 * len(task.states) * [(1, 2, 5)]


def test_first_states_without_resets():
    for more, engine in (({}, Torch()), ({"lengths": True}, Packed())):
        row = BenchRow("states", "lstm", 6, 4, 3, 5, states=2.0, **more)
        task = Task(row, "float32", "cpu")
        found = outputs(next(iter(engine.candidates(task))), "training")
        assert Judge(task).verdict(found, "training").right
    custom = Task(BenchRow("states", "mgu", 4, 2, 3, 5, states=2.0), "float32", "cpu")
    assert Eager().refuses(custom) == "this loop begins with states of 0"


@pytest.mark.parametrize("more", [{}, {"lengths": True, "layers": 2}, {"states": 2.0}], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_relu"])
def test_torch_in_float64_is_the_reference(cell, more):
    """What a GPU's results are compared with, where torch.nn has the row."""
    task = Task(BenchRow("exact", cell, 6, 4, 3, 5, **more), "float32", "cpu").exact()
    found = by_torch(task)
    for mode in ("forward", "training"):
        for have, want in zip(found.run(mode), plain(task).run(mode), strict=True):
            assert (have - want).norm() <= 1e-12 * want.norm()
    for other in ({"resets": 0.3}, {"cell": "mgu"}):
        assert by_torch(Task(replace(task.row, **other), "float32", "cpu")) is None


def test_errors_are_shown_where_rows_are_about_them(capsys):
    row = replace(TINY, full=True)
    shown = [result(row=row, error=1.25e-4), result(row=row, engine="torch", error=2e-4)]
    sheet = errors_sheet(lines_of([*shown, result("other")]))
    assert [cell.text for cell in sheet.rows[0]][-2:] == ["1.250e-04", "2.000e-04"]
    assert len(sheet.rows) == 1
    report.show(shown, {}, report.console())
    assert "relative error against float64" in capsys.readouterr().out


# engines that only some suites ask for


def test_engines_for_some_suites():
    row = BenchRow("custom", OWN_CELL, 5, 3, 4, 6)
    found = measure(row, "float32", "cpu", engines_of(("recompute", "eager"), "reference"), QUICK)
    assert {(one.engine, one.status) for one in found} == {
        ("openrnn", "ok"), ("recompute", "ok"), ("eager", "ok"),
    }  # fmt: skip
    task = Task(replace(TINY, modes=("forward",)), "float32", "cpu")
    assert not Recomputing().concerns(task)
    names = [engine.name for engine in engines_of(("cudnn-graph",), "auto")]
    assert names == ["openrnn", "openrnn-graph", "cudnn-graph"]
    assert [engine.name for engine in engines_of(("torch",), "auto")] == ["openrnn", "torch"]
    slow = Task(replace(TINY, steps=3000), "float32", "cpu")
    assert "too long" in DirectCudnn("x", ("persist_dynamic",)).refuses(slow)
    assert OWN_CELL not in vars(cells)


def test_single_steps_are_checked_as_one_call_is(monkeypatch):
    """T steps, each from the states before: ours and torch.nn's, beside y of all steps."""
    row = replace(TINY, name="steps", steps=5, layers=2, modes=("steps",))
    for states in (0.0, 1.0):
        found = measure(
            replace(row, states=states), "float32", "cpu", engines_of(("torch",), "cpu"), QUICK
        )
        assert {(one.engine, one.status) for one in found} == {
            ("openrnn", "ok"), ("torch", "ok"),
        }  # fmt: skip
    monkeypatch.setattr(Layer, "step", lambda self, x_t, _: (self(x_t[None])[0][0], None))
    wrong, _ = measure(row, "float32", "cpu", engines_of(("torch",), "cpu"), QUICK)
    assert wrong.status == "wrong"
    for options in ({"lengths": True}, {"resets": 0.1}, {"bidirectional": True}):
        found = measure(
            replace(row, **options), "float32", "cpu", engines_of(("packed",), "cpu"), QUICK
        )
        assert {(one.status, one.reason) for one in found} == {
            ("refused", "single steps: of one direction alone, without lengths and resets")
        }


def test_memory_of_a_call_on_a_cpu():
    if RESIDENT_PEAK(list) is None:
        pytest.skip("this system does not tell")
    blocks = []

    def keep():  # pages of the system's: malloc may give some that were freed before
        blocks.append(mmap.mmap(-1, 2**22))
        for page in range(0, 2**22, mmap.PAGESIZE):
            blocks[0][page] = 1

    small = RESIDENT_PEAK(keep)
    large = RESIDENT_PEAK(lambda: torch.ones(2**24).sum())
    assert small == pytest.approx(4, abs=2)
    assert large == pytest.approx(64, abs=6)
