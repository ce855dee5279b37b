"""`openrnn bench --baseline`: other sources, in a process of their own, sampled in turn."""

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_cases import QUICK, TINY, alone  # noqa: F401
from cases import thinned

from openrnn import cli
from openrnn.bench import baseline, remote, server, timer
from openrnn.bench.command import _engines
from openrnn.bench.engines import WAYS, engines_of
from openrnn.bench.measure import measure
from openrnn.bench.modes import HOST_MODES
from openrnn.bench.options import Options, choice_of
from openrnn.bench.ratios import lines_of
from openrnn.bench.record import read, result_line, result_of
from openrnn.bench.server import Server, compile_rows, serve
from openrnn.bench.sides import DeviceLostError
from openrnn.bench.suites import SUITES
from openrnn.errors import OpenRNNError

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """Older sources: the package as it is, its own `bench` and command line gone, and slower."""
    place = tmp_path_factory.mktemp("old") / "src"
    ignored = shutil.ignore_patterns("__pycache__", "bench", "cli.py", "lm")
    shutil.copytree(ROOT / "src" / "openrnn", place / "openrnn", ignore=ignored)
    path = place / "openrnn" / "nn" / "layers.py"
    slower = "\n\nimport time\n_init = LSTM.forward\n\n\ndef _slow(*words, **more):\n"
    slower += "    time.sleep(0.02)\n    return _init(*words, **more)\n\n\nLSTM.forward = _slow\n"
    path.write_text(path.read_text() + slower)
    return place.parent


@pytest.mark.parametrize("resumed", thinned([False, True], 2))  # which starts both sides again
def test_both_are_timed_in_turn_by_todays_bench(old, tmp_path, monkeypatch, capsys, resumed):
    """As the command does it; the old sources have no bench, and are twenty milliseconds slower."""
    monkeypatch.setitem(SUITES, "users", (TINY, replace(TINY, name="other", hidden=4)))
    path = tmp_path / "a.jsonl"
    words = ["--device", "cpu", "--backend", "reference", "--seconds", str(QUICK)]
    asked = ["bench", *words, "--baseline", str(old), "--json", str(path)]
    assert cli.main([*asked, "--rows", "tiny"]) == 0
    assert "the baseline's openrnn" in capsys.readouterr().out
    record = read(path)
    assert (record.machine["baseline"], record.machine["against"]) == (str(old), "none")
    found = lines_of(record.results)
    assert [line.mode for line in found] == list(TINY.modes)
    for line in found:
        assert [one.status for one in line.results.values()] == ["ok", "ok"]
        pair = line.pair("baseline")
        assert pair.peer.us > 20_000  # as long as it sleeps, however busy the machine is
        assert pair.peer.error < 1e-6
    # the rest of the rows with the same peers, and not with others
    assert cli.main([*asked, "--resume", "--against", "torch"]) == 2
    assert "measured with against none, --resume with torch" in capsys.readouterr().err
    if resumed:
        assert cli.main([*asked, "--resume"]) == 0
        assert {one.row.name for one in read(path).results} == {"tiny", "other"}


@pytest.mark.slow
def test_every_kind_of_call_of_the_host_is_timed(old):
    row = replace(TINY, modes=HOST_MODES)
    with remote.in_turn([remote.Other("baseline", old)], "reference", "cpu") as engines:
        found = measure(row, "float32", "cpu", engines, QUICK)
    assert {(one.engine, one.mode, one.status) for one in found} == {
        (engine, mode, "ok") for engine in ("openrnn", "baseline") for mode in HOST_MODES
    }
    assert all(one.memory_mib is None for one in found)


def test_a_commit_is_unpacked_and_removed(tmp_path):
    if baseline._git("rev-parse", "HEAD").returncode:
        pytest.skip("the tests are not in a git repository")
    with baseline.sources("HEAD") as folder:
        assert (folder / "openrnn" / "__init__.py").is_file()
        assert baseline.named("HEAD") == baseline.commit_of("HEAD")[:7]
    assert not folder.exists()
    assert baseline.folder_of(ROOT) == baseline.folder_of(ROOT / "src") == ROOT / "src"
    with pytest.raises(OpenRNNError, match="holds neither openrnn/ nor src/openrnn/"):
        baseline.folder_of(tmp_path)


def test_sources_that_do_not_run(tmp_path):
    """Their error is above, and the run ends as where a GPU is lost: what there is is kept."""
    broken = tmp_path / "openrnn"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('too old')\n")
    with (
        pytest.raises(DeviceLostError, match=r"the process with the sources at .* ended"),
        remote.in_turn([remote.Other("baseline", tmp_path)], "reference", "cpu") as engines,
    ):
        measure(TINY, "float32", "cpu", engines[1:], QUICK)


def test_on_a_cpu_with_several_threads_peers_have_processes(monkeypatch):
    started = []

    @contextmanager
    def in_turn(others, *about):
        started.extend((*others, about))
        yield ["ours"]

    monkeypatch.setattr(remote, "in_turn", in_turn)
    choice = choice_of(Options(against=("torch", "onnxruntime", "no-overlap")), "users", "cpu")
    with _engines(Options(), choice, "cpu", []) as engines:
        assert [one.name for one in engines] == ["openrnn", "torch", "onnxruntime"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with _engines(Options(), choice, "cpu", []) as engines:
        assert engines == ["ours"]
    others = [remote.Other(name, peer=True) for name in ("torch", "onnxruntime")]
    assert started == [*others, ("auto", "cpu")]


@pytest.mark.slow
def test_a_peer_in_a_process_of_its_own():
    row = replace(TINY, dtype="int8", modes=("forward", "training"))
    others = [remote.Other(name, peer=True) for name in ("torch", "float32")]
    with remote.in_turn(others, "cpu", "cpu") as engines:
        found = measure(row, "int8", "cpu", engines, QUICK)
        plain = measure(row, "float32", "cpu", engines, QUICK)
    status = {(one.engine, one.mode): one.status for one in found}
    assert status == {
        ("openrnn", "forward"): "ok", ("openrnn", "training"): "refused",
        ("torch", "forward"): "ok", ("torch", "training"): "refused",
        ("float32", "forward"): "ok", ("float32", "training"): "ok",
    }  # fmt: skip
    assert {one.engine for one in plain} == {"openrnn", "torch"}


def test_the_server_answers_in_words_what_it_cannot_do():
    asked_of = Server("openrnn", "cpu", "cpu")
    row = asdict(replace(TINY, cell="gru_reset_before"))
    asked = [
        {"ask": "open", "engine": "openrnn", "row": row, "precision": "float32"},
        {"ask": "prepare", "engine": "openrnn", "mode": "forward"},
        {"ask": "open", "engine": "openrnn-graph", "row": row, "precision": "float32"},
        {"ask": "sample", "engine": "openrnn", "mode": "no mode", "count": 1},
        {"ask": "close", "engine": "openrnn"},
    ]
    answers = StringIO()
    serve(StringIO("".join(f"{json.dumps(one)}\n" for one in asked)), answers, asked_of.handle)
    opened, prepared, graph, odd, closed = map(json.loads, answers.getvalue().splitlines())
    known = result_of(opened["known"]["forward"])
    assert known.status == "refused"
    assert "multiplies by the recurrent matrix again" in known.reason
    assert result_of(result_line(known)) == known
    assert prepared["ready"] is False
    assert graph["known"] is None  # there is no graph on a CPU
    assert odd["error"].startswith("KeyError")
    assert set(closed) == {"busy"}


@pytest.mark.parametrize(
    ("device", "us", "count", "before"),
    [("cpu", 1e4, 2, 3), ("cuda", 1e4, 2, 1), ("cpu", 2e5, 1, 0)],
)
def test_a_sample_comes_after_calls_that_are_not_counted(monkeypatch, device, us, count, before):
    """On a CPU calls of 10 ms until 30 have passed; one that is long counts itself."""
    clock, counts = [0.0], []

    def sample(mode, count):
        counts.append(count)
        clock[0] += count * us / 1e6
        return us

    monkeypatch.setattr(server.time, "perf_counter", lambda: clock[0])
    found = Server("openrnn", "cpu", device)._sample(SimpleNamespace(sample=sample), "", count)
    assert found == us
    assert counts == [1] * before + [count]


def test_kernels_are_compiled_for_rows_as_they_are_called(monkeypatch):
    compiled = []

    def compile_kernels(layer, dtype, **asked):
        compiled.append((layer.hidden_size, dtype, asked))
        if layer.hidden_size == 6:
            raise OpenRNNError("it does not compile")

    monkeypatch.setattr("openrnn.compile_kernels", compile_kernels)
    rows = [
        (asdict(replace(TINY, hidden=hidden, resets=0.1, modes=modes)), "bfloat16")
        for hidden, modes in ((6, ("training",)), (7, ("forward", "training")))
    ]
    compile_rows({"rows": rows, "capability": [9, 0]})
    assert [(hidden, asked["grad"]) for hidden, _, asked in compiled] == [
        (6, True), (7, False), (7, True),
    ]  # fmt: skip
    assert all(asked["reset"] and asked["batches"] == (TINY.batch,) for *_, asked in compiled)


def test_workers_share_the_rows(monkeypatch):
    shares = []

    class Done(subprocess.Popen):
        def __init__(self, sources, **first):
            shares.append([name["name"] for name, _ in first["rows"]])
            super().__init__([sys.executable, "-c", ""])

    monkeypatch.setattr(remote, "started", Done)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    todo = [(replace(TINY, name=name), "tf32") for name in "abc"]
    remote.compile_ahead(ROOT, todo, 2)
    assert shares == [["a", "c"], ["b"]]
    remote.compile_ahead(ROOT, todo, 0)
    remote.compile_ahead(ROOT, [], 2)
    assert len(shares) == 2


@pytest.mark.slow
def test_a_constant_of_the_package_has_another_value_in_a_process():
    """In its own process alone; a constant that is not there is an error."""
    changed = remote.Other("no-overlap", settings={"openrnn.spec.SHIFT": 1.0})
    here = remote.Other("openrnn", settings={"openrnn.bench.timer.LONG": 0.5})
    with pytest.raises(DeviceLostError), remote.in_turn([changed], "reference", "cpu") as engines:
        measure(TINY, "float32", "cpu", engines[1:], QUICK)
    with remote.in_turn([here], "reference", "cpu") as engines:
        found = measure(TINY, "float32", "cpu", engines, QUICK)
    assert {one.status for one in found} == {"ok"}
    assert timer.LONG != 0.5


def test_ways_of_overlap_are_processes_on_a_gpu_alone():
    choice = choice_of(Options(suite="loops"), "loops", "cuda")
    assert choice.against == tuple(WAYS)
    assert [engine.name for engine in engines_of(choice.against, "auto")] == ["openrnn"]
    with _engines(Options(suite="loops"), choice, "cpu", []) as engines:
        assert [engine.name for engine in engines] == ["openrnn"]
    for settings in WAYS.values():
        for path in settings:
            module, _, constant = path.rpartition(".")
            assert hasattr(import_module(module), constant)
