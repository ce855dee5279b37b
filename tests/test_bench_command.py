"""`openrnn bench` from its options to its files: interruption, mistakes, other commits."""

import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import MACHINE, QUICK, TINY, alone  # noqa: F401

import openrnn_command
from openrnn import cli
from openrnn.bench import charts, interrupt, profile
from openrnn.bench.measure import measure
from openrnn.bench.record import Writer, read
from openrnn.bench.suites import SUITES
from openrnn_command import app

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tiny_suite(monkeypatch):
    rows = tuple(replace(TINY, name=f"tiny-{hidden}", hidden=hidden) for hidden in (3, 4, 5))
    monkeypatch.setitem(SUITES, "users", rows)
    return ["bench", "--device", "cpu", "--backend", "reference", "--seconds", str(QUICK)]


def test_a_run_from_its_options_to_its_files(tiny_suite, tmp_path, capsys):
    files = {name: tmp_path / name for name in ("a.jsonl", "a.md", "charts", "board")}
    options = ["--rows", "tiny-3", "--rows", "tiny-5", "--against", "torch", "--json"]
    options += [files["a.jsonl"], "--markdown", files["a.md"], "--charts", files["charts"]]
    assert cli.main([*tiny_suite, *map(str, options), "--tensorboard", str(files["board"])]) == 0
    out, err = capsys.readouterr()
    assert "geometric mean of the ratios" in out
    assert "torch.nn as called" in out
    assert "tiny-3 (3x2x4x3) float32: forward" in err
    record = read(files["a.jsonl"])
    assert record.machine["device"] == "cpu"
    assert [one.row.name for one in record.results] == ["tiny-3"] * 4 + ["tiny-5"] * 4
    assert "| tiny-5 | 3x2x4x5 | float32 | training |" in files["a.md"].read_text()
    assert [path.name for path in files["charts"].iterdir()] == ["a-users-float32-ratio.png"]
    check_board(files["board"])
    again = [*tiny_suite, "--json", str(files["a.jsonl"])]
    assert cli.main(again) == 2
    assert "is there already: go on with it by --resume" in capsys.readouterr().err
    assert cli.main([*again, "--resume", "--against", "torch", "--minutes", "9"]) == 0
    out, err = capsys.readouterr()
    assert err.count("us a step") == 2  # the two modes of the row that was not measured
    assert len(read(files["a.jsonl"]).results) == 12
    show = ["bench", "--show", str(files["a.jsonl"]), "--compare", str(files["a.jsonl"])]
    assert cli.main(show) == 0
    out = capsys.readouterr().out
    assert "0 of 6 times moved beyond noise" in out
    assert "noise: up to 5%, from run to run, or 2 standard errors of the ratio; ours alone" in out


def check_board(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"us a step/tiny-3/float32/forward/torch", "ratio/tiny-5/float32/training/torch"} <= tags


def test_ctrl_c_keeps_what_was_measured(tiny_suite, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.jsonl"

    def interrupted(row, *args):
        if row.name == "tiny-4":
            raise KeyboardInterrupt
        return measure(row, *args)

    monkeypatch.setattr("openrnn.bench.session.measure", interrupted)
    assert cli.main([*tiny_suite, "--against", "torch", "--json", str(path)]) == 130
    out, err = capsys.readouterr()
    assert "│ tiny-3" in out
    assert "tiny-5" not in out
    assert "interrupted, 2 rows left: what was measured is kept, go on with --resume" in err
    assert {one.row.name for one in read(path).results} == {"tiny-3"}


@pytest.fixture
def heeded():
    """Ctrl-C raises, as from a terminal: what runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
def test_ctrl_c_inside_a_compiler_waits_for_its_end(tiny_suite, monkeypatch, capsys):
    """There it may be lost, or what it kills may pass for a failure of the engine."""

    def interrupted(row, *args):
        signal.raise_signal(signal.SIGINT)
        return measure(row, *args) if row.name == "tiny-3" else []

    monkeypatch.setattr("openrnn.bench.session.measure", interrupted)
    assert cli.main([*tiny_suite, "--against", "torch"]) == 130
    out, err = capsys.readouterr()
    assert out == "nothing was measured\n"
    assert "interrupted, 3 rows left" in err
    assert err.count("Ctrl-C: ends after this step") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), interrupt.deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a second one does not wait
        pytest.fail("it went on")


def test_ctrl_c_anywhere_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("openrnn.bench.command.check", interrupted)
    assert cli.main(["bench"]) == 130
    assert capsys.readouterr().err.strip() == "openrnn: interrupted"
    monkeypatch.setattr(app, "run", interrupted)  # as if it came while modules are imported
    assert openrnn_command.main() == 130
    assert capsys.readouterr().err == "openrnn: interrupted\n"


def test_a_budget_leaves_rows_for_later(tiny_suite, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    assert cli.main([*tiny_suite, "--against", "none", "--minutes", "0", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "nothing was measured" in out
    assert f"go on with --resume --json {path}\n" in err.replace("\r", "\n")
    assert "0 minutes are over, 3 rows left: what was measured is kept" in err
    assert cli.main([*tiny_suite, "--minutes", "0"]) == 0
    says = "3 rows left: with --json FILE a run could be gone on with"
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--suite user", "suite must be one of users, deepbench, latency, scaling"),
        ("--device tpu", "device must be one of auto, cpu, cuda, got 'tpu'"),
        ("--device cuda", "device cuda: torch finds no CUDA device here"),
        ("--dtype bf16", "dtype must be auto or of bfloat16, float16, tf32, float32"),
        ("--dtype tf32", "dtype tf32 needs a CUDA device"),
        ("--rows lmm", "no row matches 'lmm'; there are: lm-650, lm-1150, lm-1500, and 35 others"),
        ("--against keras", "against must be of torch, graph, cudnn, cudnn-graph, packed"),
        ("--backend cudn", "backend must be auto or one of"),
        ("--seconds 0", "seconds must be positive, got 0.0"),
        ("--compare {tmp}/none", "{tmp}/none: No such file or directory"),
        ("--show {tmp}/none", "there are no results at {tmp}/none"),
        ("--page {tmp}/x.md", "--page needs files of results to show: name them with --show"),
        ("--baseline nonsense --rows sb3", "--baseline: the repository has no commit"),
        ("--baseline {tmp} --rows sb3", "--baseline {tmp} holds neither openrnn/ nor src/openrnn/"),
        ("--suite users,fused", "suites users,fused have different defaults: name --"),
        ("--workers -1", "workers must be 0 or more, got -1"),
        ("--json {tmp}", "--json {tmp} cannot be written: Is a directory"),
        ("--markdown {tmp}/file/x.md", "--markdown {tmp}/file/x.md cannot be written: "),
        ("--charts {tmp}/file", "--charts {tmp}/file cannot be written: File exists"),
        ("--tensorboard {tmp}/file/x", "--tensorboard {tmp}/file/x cannot be written: "),
        ("--show {tmp}/a.jsonl --page {tmp}", "--page {tmp} cannot be written: Is a directory"),
        ("--show {tmp}/a.jsonl --rows x --json y", "--show does not go with --rows, --json"),
        ("--show {tmp}/a.jsonl --tensorboard x", "--show does not go with --tensorboard"),
        ("--show x --page y --charts z", "--page does not go with --charts"),
        ("--show {tmp} --markdown x.md", "--markdown is of one file of results, --show names 2"),
        ("--show {tmp} --charts x", "--charts are named after their files, of which --show has"),
        ("--profile sb3 --against torch", "--profile does not go with --against"),
        ("--suite train --compare x", "--suite train does not go with --compare"),
        ("--suite train --gpus 2", "--gpus needs a CUDA device"),
        ("--gpus 2", "--gpus is an option of --suite train alone"),
        ("--resume", "--resume needs the file of results to go on with: name it with --json"),
        ("--profile nothing", "no row matches 'nothing'"),
        ("--minutes -1", "minutes must be 0 or more, got -1"),
        ("--suite train --gpus two", "--gpus must be numbers of GPUs, such as 1,2, got 'two'"),
    ],
)
def test_mistakes_in_options(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("openrnn.bench.session.Session.run", lambda *_: pytest.fail("it measured"))
    words = options.format(tmp=tmp_path).split()
    (tmp_path / "file").touch()
    for name in "a.jsonl", "b/a.jsonl":
        Writer(tmp_path / name, MACHINE)
    assert cli.main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("openrnn: ")
    assert says.format(tmp=tmp_path) in err
    assert err.count("\n") == 1


def test_what_is_missing_is_said_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(charts, "find_spec", lambda _: None)
    assert cli.main(["bench", "--charts", "x"]) == 2
    wanted = "charts need the package matplotlib: pip install matplotlib"
    assert capsys.readouterr().err == f"openrnn: {wanted}\n"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert cli.main(["bench", "--rows", "sb3", "--tensorboard", "x", "--device", "cpu"]) == 2
    assert "--tensorboard needs the package tensorboard" in capsys.readouterr().err


def test_a_row_is_profiled(tiny_suite, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(profile, "FOLDER", tmp_path)
    path = tmp_path / "a.jsonl"
    assert cli.main([*tiny_suite[:-2], "--profile", "tiny-4", "--json", str(path)]) == 0
    out = capfd.readouterr().out
    assert "tiny-4 (3x2x4x4) float32 forward, reference, 5 calls" in out
    assert "aten::linear" in out
    assert "widest gaps" in out
    found = {(one.row.name, one.mode, one.name): one for one in read(path).profiled}
    assert found["tiny-4", "forward", "aten::linear"].count > 0
    assert found["tiny-4", "training", "aten::linear"].us > 0
    for mode in TINY.modes:
        trace = json.loads((tmp_path / f"tiny-4-float32-{mode}.trace.json").read_text())
        assert trace["traceEvents"]


def test_rows_that_are_cut_are_named_and_near_names_told(capsys):
    arguments = ["bench", "--device", "cpu", "--against", "none", "--minutes", "0"]
    assert cli.main([*arguments, "--rows", "haste-64-512", "--rows", "haste-128-512"]) == 0
    err = capsys.readouterr().err
    assert "1 of 2 rows are cut to size, 1 more became like another one and are left out" in err
    assert cli.main([*arguments, "--rows", "haste-32-64"]) == 0
    assert "cut to size" not in capsys.readouterr().err
    assert cli.main([*arguments, "--suite", "deepbench", "--rows", "lstm-512-b17-t25"]) == 2
    said = capsys.readouterr().err
    assert "no row matches 'lstm-512-b17-t25'; there are: lstm-512-b1" in said
    assert re.search(r", and \d+ others; see openrnn bench --list --suite all\n$", said)
    assert cli.main([*arguments, "--rows", "zzz"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("'zzz'; none has a name like it; see openrnn bench --list --suite all\n")
    assert cli.main(["bench", "--list", "--rows", "zzz"]) == 2
    assert capsys.readouterr().err.endswith("'zzz'; none has a name like it\n")


def test_rows_are_counted_and_the_time_is_kept(tiny_suite, tmp_path, monkeypatch, capsys):
    """The budget ends a row that is not complete, and none begins that would not end in time."""
    path = tmp_path / "a.jsonl"
    begun = []

    def endless(row, *_):
        begun.append(row.name)
        while len(begun) > 1:
            interrupt.check()
        return []

    monkeypatch.setattr("openrnn.bench.session.measure", endless)
    monkeypatch.setattr("openrnn.bench.session.told", lambda _: "a line")
    again = [*tiny_suite, "--against", "none", "--minutes", "0.005", "--json", str(path)]
    assert cli.main(again) == 0
    err = capsys.readouterr().err.replace("\r", "\n")
    assert "3 rows with up to 1 engines each: about " in err
    assert "as many as fit into 0.005 minutes" in err
    assert "[1 of 3, about 0 s left] a line" in err
    assert "0.005 minutes are over, 2 rows left" in err
    interrupt.check()  # over for this run alone
    assert begun == begun[:2]
