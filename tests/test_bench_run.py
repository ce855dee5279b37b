"""`openrnn bench` at work: engines checked and timed, interruption, options, the published page."""

import itertools
import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from bench_cases import QUICK, TINY, Fake, alone, backward_times, fails, slow  # noqa: F401
from cases import thinned
from torch.nn.functional import linear

from openrnn import cells, cli
from openrnn.bench import charts, check, command, page, profile, sides, timer, training
from openrnn.bench.cases import BenchRow, sized
from openrnn.bench.check import Judge, _relative, bounded, outputs
from openrnn.bench.engines import engines_of, ours
from openrnn.bench.engines.base import Ready
from openrnn.bench.engines.foreign import FlashRNN, TorchRL
from openrnn.bench.engines.graph import GraphReplay
from openrnn.bench.engines.nn import Torch
from openrnn.bench.engines.onnxruntime import OnnxRuntime
from openrnn.bench.engines.ours import Ours, Unquantized
from openrnn.bench.engines.python import Compiled, Eager
from openrnn.bench.measure import measure
from openrnn.bench.record import files_of, read
from openrnn.bench.suites import SUITES, rows_of
from openrnn.bench.task import Task
from openrnn.errors import NoBackendError, OpenRNNError
from openrnn.native import graphs

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]


def by_engine(found, mode):
    return {one.engine: one for one in found if one.mode == mode}


# checked, then timed


def test_a_slow_engine_is_slow_and_a_wrong_one_is_not_timed():
    engines = [
        Fake("openrnn"),
        Fake("slow", slow),
        Fake("wrong", lambda y: 1.001 * y),
        Fake("nan", lambda y: y * torch.nan),
        Fake("short", lambda y: y[:-1]),
        Fake("backward", backward_times(1.01)),
        Fake("nan backward", backward_times(torch.nan)),
        Fake("fails", fails),
        Fake("refuses", refusal="it is Sunday"),
    ]
    found = measure(TINY, "float32", "cpu", engines, QUICK)
    forward, training = by_engine(found, "forward"), by_engine(found, "training")
    assert list(forward) == list(training) == [engine.name for engine in engines]
    assert forward["slow"].us > 20_000  # as long as it sleeps, however busy the machine is
    assert forward["slow"].low <= forward["slow"].us <= forward["slow"].high
    assert forward["slow"].repeats >= 3
    for one in (forward["wrong"], training["wrong"], training["nan"], forward["short"]):
        assert (one.status, one.us) == ("wrong", None), one
    assert forward["wrong"].reason == "y off by 1.0e-03 of its norm"
    assert forward["backward"].status == "ok"
    assert training["backward"].status == "wrong"
    assert training["backward"].reason.startswith("d")
    assert training["nan backward"].status == "wrong"
    assert training["fails"].status == "failed"
    assert training["fails"].reason == "RuntimeError: the kernel fell over"
    assert (training["refuses"].status, training["refuses"].reason) == ("refused", "it is Sunday")
    assert forward["openrnn"].checked == (3, 2)
    assert forward["openrnn"].error < 1e-6


def test_a_graph_that_cannot_be_captured_whole_is_shown_as_failed():
    """The check captures few steps; what fails at all of them must not end the run."""

    class Late(Fake):
        graphed = True

        def candidates(self, task):
            calls = itertools.count()
            inner = next(iter(super().candidates(task)))
            yield Ready(task, lambda: fails(None) if next(calls) else inner.call(), inner.leaves)

    row = replace(TINY, modes=("forward",))
    found = by_engine(
        measure(row, "float32", "cpu", [Fake("openrnn"), Late("late")], QUICK), "forward"
    )
    assert found["openrnn"].status == "ok"
    assert (found["late"].status, found["late"].us) == ("failed", None)
    assert found["late"].reason == "RuntimeError: the kernel fell over"


def test_a_way_that_fails_at_full_size_leaves_the_others(monkeypatch):
    monkeypatch.setattr(check, "STEPS", 3)

    class Two(Fake):
        def candidates(self, task):
            for name, most in (("short", 3), ("any", 100)):
                inner = next(iter(super().candidates(task)))
                call = (lambda: fails(None)) if task.row.steps > most else inner.call
                yield Ready(task, call, inner.leaves, lambda _, name=name: name)

    found = measure(replace(TINY, steps=7), "float32", "cpu", [Two("two")], QUICK)
    assert {(one.status, one.chosen, one.checked) for one in found} == {("ok", "any", (3, 2))}


def test_an_engine_that_fails_while_it_is_timed_leaves_the_others():
    class Late(Fake):
        def candidates(self, task):
            (inner,) = super().candidates(task)
            calls = itertools.count()

            def call():
                return fails(None) if next(calls) > 3 else inner.call()

            yield Ready(task, call, inner.leaves)

    row = replace(TINY, modes=("forward",))
    found = measure(row, "float32", "cpu", [Fake("openrnn"), Late("late")], QUICK)
    ours, late = found
    assert (ours.status, late.status, late.us) == ("ok", "failed", None)
    assert ours.us is not None
    assert late.reason == "RuntimeError: the kernel fell over"


@pytest.mark.parametrize("what", ["Task", "bounded", "Judge"])
def test_a_row_that_has_no_memory_is_one_that_failed(monkeypatch, what):
    def without(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sides, what, without)
    found = measure(TINY, "float32", "cpu", [Fake("openrnn")], QUICK)
    said = {(one.mode, one.status, one.reason) for one in found}
    assert said == {(mode, "failed", "out of GPU memory") for mode in TINY.modes}


def test_what_is_timed_is_what_was_compared(monkeypatch):
    """A part of a long row has the same ways of cuDNN as the row."""
    made = lambda _task, _backend, algorithm: types.SimpleNamespace(name=algorithm)  # noqa: E731
    monkeypatch.setattr(ours, "_ready", made)
    for steps in (300, ours.LONG + 1):
        task = Task(replace(TINY, steps=steps), "float32", "cpu")
        whole, part = (
            [ready.name for ready in ours.DirectCudnn().candidates(some)]
            for some in (task, task.part(256, 2))
        )
        assert whole == part
        assert ("persist_dynamic" in whole) == (steps <= ours.LONG)


def test_a_graph_gets_its_lengths_on_the_device():
    asked = []
    inner = types.SimpleNamespace(title="x", candidates=lambda task: asked.append(task) or [])
    task = types.SimpleNamespace(lengths=torch.tensor([3, 1]), device="meta")
    assert list(GraphReplay("graph", inner).candidates(task)) == []
    assert asked[0].lengths.device.type == "meta"
    assert task.lengths.device.type == "cpu"


ROWS = [
    (TINY, ["torch"]),
    (BenchRow("gru", "gru", 4, 3, 2, 6, 2, bidirectional=True), ["torch"]),
    (BenchRow("relu", "rnn_relu", 4, 3, 2, 6), ["torch"]),
    (BenchRow("lengths", "lstm", 6, 4, 3, 5, bidirectional=True, lengths=True), ["packed"]),
    (BenchRow("resets", "lstm", 9, 4, 3, 5, 2, resets=0.4), ["loop"]),
    (BenchRow("resets-gru", "gru", 9, 4, 3, 5, resets=0.4), ["loop"]),
    (BenchRow("custom", "peephole_lstm", 5, 3, 4, 6, 2), ["eager"]),
    (BenchRow("mgu", "mgu", 5, 3, 4, 6), ["eager"]),
]


@pytest.mark.parametrize(("row", "peers"), ROWS, ids=lambda value: getattr(value, "name", ""))
def test_every_peer_computes_the_row(row, peers):
    engines = engines_of(("torch", "packed", "loop", "eager"), "reference")
    found = measure(row, "float32", "cpu", engines, QUICK)
    for mode in row.modes:
        ran = {one.engine for one in found if one.mode == mode and one.status == "ok"}
        assert ran == {"openrnn", *peers}
    assert {one.chosen for one in found if one.engine == "openrnn"} == {"reference"}
    assert not [one for one in found if one.status in ("wrong", "failed")]


@pytest.mark.parametrize(
    "row", thinned([BenchRow("gru", "gru", 4, 3, 2, 6, 2, bidirectional=True), TINY], 2)
)
def test_onnx_runtime_computes_the_row_and_no_gradients(row, monkeypatch):
    engine = OnnxRuntime()
    if engine.refuses(Task(row, "float32", "cpu")):
        pytest.skip(engine.refuses(Task(row, "float32", "cpu")))
    module = import_module(OnnxRuntime.__module__)
    session, sessions = module._session, []

    def once(task):
        sessions.extend([] if sessions else [session(task)])
        return sessions[0]

    monkeypatch.setattr(module, "_session", once)  # an export takes seconds
    found = by_engine(measure(row, "float32", "cpu", [Ours("cpu"), engine], QUICK), "forward")
    assert {one.status for one in found.values()} == {"ok"}
    ready = next(engine.candidates(Task(row, "float32", "cpu")))
    with pytest.raises(NoBackendError, match="no gradients"):
        ready.run("training")
    assert "lengths" in engine.refuses(Task(replace(row, lengths=True), "float32", "cpu"))
    assert "float64" in engine.refuses(Task(row, "float64", "cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert "spin" in engine.refuses(Task(row, "float32", "cpu"))
    assert OnnxRuntime(apart=True).refuses(Task(row, "float32", "cpu")) is None


@pytest.mark.parametrize("cell", ["lstm", "gru", "mgu"])
def test_int8_weights_are_compared_with_torchs_and_with_none(cell):
    row = BenchRow(cell, cell, 4, 3, 8, 16, dtype="int8", modes=("forward", "training"))
    engines = engines_of(("torch", "float32"), "cpu")
    found = measure(row, "int8", "cpu", engines, QUICK)
    forward, training = by_engine(found, "forward"), by_engine(found, "training")
    timed = {"openrnn", "float32", "torch"} - ({"torch"} if cell == "mgu" else set())
    assert {name for name, one in forward.items() if one.status == "ok"} == timed
    assert {name for name, one in training.items() if one.status == "ok"} == {"float32"}
    assert forward["float32"].error < 1e-5 < forward["openrnn"].error
    assert not Unquantized().concerns(Task(row, "float32", "cpu"))


def test_bfloat16_weights_are_compared_with_float32():
    row = BenchRow("gru", "gru", 20, 3, 8, 16, dtype="bf16-weights", modes=("forward",), full=True)
    found = measure(row, "bf16-weights", "cpu", engines_of(("torch", "float32"), "cpu"), QUICK)
    forward = by_engine(found, "forward")
    assert {name for name, one in forward.items() if one.status == "ok"} == {
        "openrnn", "float32", "torch",
    }  # fmt: skip
    assert max(forward["float32"].error, forward["torch"].error) < 1e-5
    assert 1e-4 < forward["openrnn"].error < 1e-2


@pytest.mark.slow
def test_a_step_is_compiled():
    row = BenchRow("custom", "coupled_lstm", 2, 2, 3, 4, modes=("forward",))
    task = Task(row, "float32", "cpu")
    engine = Compiled()
    assert engine.refuses(Task(replace(row, steps=4000, batch=1), "float32", "cpu"))
    if engine.refuses(task):
        pytest.skip(engine.refuses(task))
    found = outputs(next(engine.candidates(task)), "forward")
    assert Judge(task).verdict(found, "forward").right


def test_the_comparison_is_bounded():
    task = bounded(
        Task(BenchRow("long", "lstm", 3000, 40, 2, 512, modes=("forward",)), "float32", "cpu")
    )
    assert (task.row.steps, task.row.batch) == (204, 40)
    assert task.x.shape == (204, 40, 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_row_is_compared_at_the_batch_that_is_timed(device, monkeypatch):
    """Tiles follow from the batch: at another one another kernel would be checked."""
    monkeypatch.setattr(Task, "part", lambda _, *sizes: sizes)
    for row in sized(rows_of("all"), device):
        task = object.__new__(Task)
        task.row, task.device = row, device
        steps, batch = bounded(task)
        assert batch == row.batch
        assert steps >= min(row.steps, 16), row.name


def test_a_gradient_that_is_zero_has_no_relative_error():
    row = BenchRow("one", "gru", 1, 2, 3, 4)  # h_0 is 0: so is the gradient of the recurrent matrix
    found = measure(row, "float32", "cpu", [Ours("reference"), Torch()], QUICK)
    assert {one.status for one in found} == {"ok"}
    assert _relative(torch.full((4,), 1e-9), torch.zeros(4)) == pytest.approx(2e-9)
    assert _relative(torch.tensor([1.0, torch.nan]), torch.ones(2)) == float("inf")


def test_who_refuses_says_why():
    resets = Task(replace(TINY, resets=0.1), "float32", "cpu")
    assert "torch.nn has no resets" in Torch().refuses(resets)
    assert "PackedSequence only" in Torch().refuses(
        Task(replace(TINY, lengths=True), "float32", "cpu")
    )
    assert not Torch().concerns(Task(replace(TINY, cell="mgu"), "float32", "cpu"))
    twice = Task(replace(TINY, cell="gru_reset_before"), "float32", "cpu")
    assert "multiplies twice a step" in Eager().refuses(twice)
    for one in measure(replace(TINY, resets=0.1), "float32", "cpu", [Ours("fused")], QUICK):
        assert (one.status, one.us) == ("refused", None)
        assert one.reason.startswith("fused: ")


# packages of others, which are not here: stand-ins with their documented layouts


def test_flashrnn_is_called_in_its_layout(monkeypatch):
    def flashrnn(x, r, b, function, backend, dtype):  # (B, T, G, 1, H), (G, 1, H, H), (G, 1, H)
        steps, batch, hidden = x.shape[1], x.shape[0], x.shape[-1]
        h = c = x.new_zeros(batch, hidden)
        kept = []
        for t in range(steps):
            i, f, z, o = (
                x[:, t, gate, 0] + linear(h, r[gate, 0]) + b[gate, 0] for gate in range(4)
            )
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
            h = torch.sigmoid(o) * torch.tanh(c)
            kept.append(torch.stack([h, c]))
        return torch.stack(kept, 2)[:, :, :, None], None  # (2, B, T, 1, H)

    stand_in = types.SimpleNamespace(flashrnn=flashrnn)
    monkeypatch.setitem(sys.modules, "flashrnn", types.ModuleType("flashrnn"))
    monkeypatch.setitem(sys.modules, "flashrnn.flashrnn", stand_in)
    check_stand_in(FlashRNN(), TINY)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_torchrl_is_called_in_its_layout(cell, monkeypatch):
    layer = torch.nn.LSTM if cell == "lstm" else torch.nn.GRU

    def run(x, *rest, input_precision):  # (B, T, I), states (B, T, H), weights, starts (B, T)
        *states, w_ih, w_hh, b_ih, b_hh, starts, _ = rest
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = dict(zip(names, (w_ih, w_hh, b_ih, b_hh)))
        net = layer(x.shape[-1], w_hh.shape[1], batch_first=True, device="meta")
        now, outputs = [state[:, 0][None] for state in states], []
        for t in range(x.shape[1]):
            keep = ~starts[:, t][None, :, None]
            now = [state * keep for state in now]
            given = tuple(now) if cell == "lstm" else now[0]
            y, after = torch.func.functional_call(net, weights, (x[:, t : t + 1], given))
            now = list(after) if cell == "lstm" else [after]
            outputs.append(y)
        return torch.cat(outputs, 1), None

    stand_in = types.SimpleNamespace(lstm_triton=run, gru_triton=run)
    monkeypatch.setitem(sys.modules, TorchRL.kernels, stand_in)
    for package in ("torchrl", "torchrl.modules", "torchrl.modules.tensordict_module"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    check_stand_in(TorchRL(), BenchRow("resets", cell, 7, 3, 4, 5, resets=0.3))


def check_stand_in(engine, row):
    task = Task(row, "float32", "cpu")
    judge = Judge(task)
    ready = next(engine.candidates(task))
    for mode in row.modes:
        assert judge.verdict(outputs(ready, mode), mode).right, mode


# the timer


def test_calls_are_timed_in_turn():
    order = []
    calls = {
        name: lambda count, name=name: timer.sample(lambda: order.append(name), count, "cpu")
        for name in "ab"
    }
    found = timer._samples(calls, {"a": 2, "b": 1}, QUICK)
    assert "".join(order).startswith("aabaabaab")
    assert len(found["a"]) == len(found["b"]) >= 3


@pytest.mark.parametrize(("us", "warm_up", "calls"), [(50.0, 6, 20), (1000.0, 6, 2), (1e5, 1, 1)])
def test_calls_warm_up_until_a_graph_may_run(us, warm_up, calls):
    asked = []
    assert timer._inner(lambda count: asked.append(count) or us) == calls
    assert asked == [1] * warm_up
    # two calls until a layer has prepared one, whose runs are captured then
    assert timer.WARM_UP > 2 + graphs.CAPTURED_RUN


def test_a_disturbed_run_is_repeated(monkeypatch):
    shares = iter([0.0, 1.0, 1.0, 1.5, 1.5, 1.5])  # core-seconds of others, before and after
    monkeypatch.setattr(timer, "foreign", lambda _: next(shares))
    monkeypatch.setattr(
        timer, "time", types.SimpleNamespace(perf_counter=iter(range(100)).__next__)
    )
    monkeypatch.setattr(timer, "_samples", lambda *_: {"a": [1.0, 2.0, 3.0]})
    monkeypatch.setattr(timer, "_inner", lambda *_: 1)
    (found,) = timer.interleaved({"a": float}, "cpu", QUICK).values()
    assert (found.us, found.others) == (2.0, 0.0)
    assert not list(shares)


foreign = timer.foreign  # which a fixture replaces in each test


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_others_count_on_the_cores_of_this_process_alone(monkeypatch):
    """As of a run with `taskset`; ticks of a core are those of user, nice and system."""
    stat = "cpu 60 60 60 9 9\ncpu1 10 20 30 9 9\ncpu2 1 2 3 9 9\ncpu12 4 5 6 9 9\nintr 7\n"
    monkeypatch.setattr(timer.Path, "read_text", lambda _: stat)
    monkeypatch.setattr(timer, "_own_cores", lambda: {2, 12})
    monkeypatch.setattr(timer.time, "process_time", lambda: 0.0)
    ticks = os.sysconf("SC_CLK_TCK")
    assert foreign() == pytest.approx(21 / ticks)
    assert foreign(lambda: 5 / ticks) == pytest.approx(16 / ticks)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_its_cores_are_those_of_all_threads(monkeypatch):
    """OpenMP may bind each thread to a core of its own, the one that asks among them."""
    sets = {1: {3}, 2: {5, 7}}

    def affinity(thread):
        if thread not in sets:
            raise ProcessLookupError  # it has ended since it was listed
        return sets[thread]

    monkeypatch.setattr(timer.Path, "iterdir", lambda _: map(Path, ("1", "2", "99")))
    monkeypatch.setattr(timer.os, "sched_getaffinity", affinity)
    timer._own_cores.cache_clear()
    assert timer._own_cores() == {3, 5, 7}
    sets[1] = {4}  # one set for all readings
    assert timer._own_cores() == {3, 5, 7}
    timer._own_cores.cache_clear()


def test_gaps_are_where_nothing_ran():
    spans = [profile.TimeSpan(*values) for values in (
        ("a", 0.0, 10.0), ("inside", 2.0, 3.0), ("b", 12.0, 20.0), ("c", 19.0, 21.0),
        ("d", 24.0, 25.0),
    )]  # fmt: skip
    assert profile.gaps(spans) == [(2.0, "a", "b"), (3.0, "c", "d")]
    text = profile.summary(spans, "cuda")
    assert text == f"{25 / profile.CALLS:.1f} us a call, of which {5 / profile.CALLS:.1f} us idle"


# the real job and the page


def test_a_job_is_read_from_its_scores(monkeypatch, tmp_path):
    real, budgets = subprocess.run, []

    def run(words, **options):
        if "--out" not in words:
            return real(words, **options)
        budgets.append(words[-2:])
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir()
        scores = {"steps": 9, "bytes_per_s": 5.0, "bits_per_byte": 2.0, "backend": "torch.nn"}
        (folder / "scores.json").write_text(json.dumps(scores))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(training.subprocess, "run", run)
    path = tmp_path / "train.jsonl"
    arguments = ["bench", "--suite", "train", "--device", "cpu", "--json", str(path)]
    assert cli.main([*arguments, "--minutes", "0.1"]) == 0
    assert budgets == 2 * [["--steps", "2"], ["--minutes", "0.1"]]
    found = read(path).trained
    assert [(one.model, one.bytes_per_s, one.steps) for one in found] == [
        ("openrnn", 5.0, 9), ("torch", 5.0, 9),
    ]  # fmt: skip
    monkeypatch.setattr(
        training.subprocess, "run",
        lambda words, **_: subprocess.CompletedProcess(words, 2, "", "openrnn: no GPU\n"),
    )  # fmt: skip
    with pytest.raises(OpenRNNError, match="with torch's layers failed: openrnn: no GPU"):
        training.train(training.JOBS["cpu"][0], "torch", "cpu", 0, 0.1)


def test_the_page_is_what_its_files_say():
    """`docs/benchmarks.md` is never typed; page.COMMAND renews it."""
    files = files_of([ROOT / "benchmarks" / "results"])
    records = [(path, read(path)) for path in files]
    place = ROOT / "docs" / "benchmarks.md"
    assert place.read_text(encoding="utf-8") == page.text(records, place), page.COMMAND
    for path, record in records:
        for name in charts.names(record.results, path.stem):
            assert (path.parent / name).is_file(), page.COMMAND


def test_the_cells_of_the_custom_suite_ship():
    assert {row.cell for row in SUITES["custom"]} <= set(vars(cells))
    assert command.SUITE_NAMES[-2:] == ("train", "all")
