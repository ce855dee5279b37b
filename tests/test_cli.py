"""The command `openrnn` as a user meets it: what it prints, how it fails, what it leaves behind."""

import io
import json
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
import torch

from openrnn import cli, dispatch
from openrnn.lm import checkpoint, claim

TINY = (
    "--hidden 12 --embed 6 --bptt 8 --batch 4 --layers 1 --device cpu --backend reference"
).split()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus")
    for place in range(30):
        (path / f"{place}.txt").write_text(f"the file number {place} says hello to you\n" * 8)
    return path


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A run of 6 steps, TensorBoard scalars included, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "a"
    arguments = ["train", *TINY, "--steps", "6", "--corpus", str(folder), "--out", str(out)]
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        assert cli.main(arguments) == 0
    return out, SimpleNamespace(stdout=stdout.getvalue(), stderr=stderr.getvalue())


def fails(capsys, *arguments):
    """The one sentence on stderr of a command that ends with 2."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("openrnn: ")
    assert err.count("\n") == 1
    return err


# train


def test_a_run_ends_with_its_score(trained):
    out, done = trained
    assert re.search(r"100%  step 6  loss \d\.\d+  \d\.\d+ bits/byte  \S+ kB/s  0:00", done.stderr)
    rows = re.findall(r"(this model|gzip -9|unigram entropy)\D+(\d+\.\d+)", done.stdout)
    assert [name for name, _ in rows] == ["this model", "gzip -9", "unigram entropy"]
    model, gzip, unigram = (float(bits) for _, bits in rows)
    assert gzip < unigram < model < 8.2
    assert f"step 6, reference backend, {out}/checkpoint.safetensors" in done.stdout
    assert "a sample" in done.stdout
    assert "Warning" not in done.stderr


def test_a_run_leaves_its_scores_for_programs(trained):
    out, done = trained
    scores = json.loads((out / "scores.json").read_text())
    assert set(scores) == {"steps", "bytes_per_s", "bits_per_byte", "backend"}
    assert (scores["steps"], scores["backend"]) == (6, "reference")
    printed = re.search(r"this model\D+(\d+\.\d+)", done.stdout)
    assert scores["bits_per_byte"] == pytest.approx(float(printed[1]), abs=1e-3)
    assert scores["bytes_per_s"] > 0


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_layers_of_torch_train_and_write(cell, folder, tmp_path, capsys):
    tiny = [word for word in TINY if word not in ("--backend", "reference")]
    arguments = [*tiny, "--cell", cell, "--model", "torch", "--corpus", str(folder)]
    out = str(tmp_path / "x")
    assert cli.main(["train", *arguments, "--steps", "3", "--out", out]) == 0
    assert "torch.nn backend on cpu" in capsys.readouterr().err
    assert json.loads((tmp_path / "x" / "scores.json").read_text())["backend"] == "torch.nn"
    assert cli.main(["train", "--resume", out, "--steps", "4", "--quiet"]) == 0
    assert len(write(capsys, out, "--length", 4).encode()) >= 4
    assert "has --model torch" in fails(capsys, "train", "--resume", out, "--model", "openrnn")


def test_scalars_reach_tensorboard(trained):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained[0] / "tensorboard"))
    events.Reload()
    wanted = {
        "loss/train", "bpb/train", "bpb/held_out", "bpb/held_out_end", "perf/bytes_per_s",
        "grad_norm", "lr", "gates/l0/f_mean", *(f"gates/l0/{gate}_saturated" for gate in "ifgo"),
    }  # fmt: skip
    assert set(events.Tags()["scalars"]) == wanted
    assert set(events.Tags()["histograms"]) == {f"gates/l0/{gate}" for gate in "ifgo"}
    last = {name: events.Scalars(name)[-1] for name in wanted}
    assert last["loss/train"].step == last["bpb/held_out_end"].step == 6
    assert 0 < last["lr"].value < 4e-3
    printed = re.search(r"this model\D+(\d+\.\d+)", trained[1].stdout)
    assert last["bpb/held_out_end"].value == pytest.approx(float(printed[1]), abs=1e-3)


def test_without_tensorboard_a_line(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    arguments = ["train", *TINY, "--steps", "1", "--quiet", "--corpus", str(folder)]
    assert cli.main([*arguments, "--out", str(tmp_path / "x")]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "no TensorBoard scalars: the package tensorboard is not installed\n"
    left = {file.name for file in (tmp_path / "x").iterdir()}
    assert left == {checkpoint.NAME, "scores.json", claim.NAME}


def test_a_run_is_not_overwritten(trained, folder, tmp_path, capsys):
    out, _ = trained
    before = checkpoint.path_in(out).read_bytes()
    says = fails(capsys, "train", *TINY, "--steps", 3, "--corpus", folder, "--out", out)
    assert f"--resume {out}" in says
    words = ("--cell", "mine.py", "--corpus", folder, "--out", out)
    assert "path.py:name" in fails(capsys, "train", *words)  # told before the folder's
    train = ["train", "--quiet", "--resume", str(out), "--steps"]
    assert cli.main([*train, "7", "--out", str(tmp_path / "b")]) == 0
    assert checkpoint.path_in(out).read_bytes() == before
    assert checkpoint.read(checkpoint.path_in(tmp_path / "b"))[1]["step"] == 7
    assert cli.main([*train, "6", "--out", str(out)]) == 0  # the budget is spent: nothing to do
    assert checkpoint.path_in(out).read_bytes() == before


def test_ctrl_c_saves_and_says_how_to_go_on(folder, tmp_path):
    out = tmp_path / "x"
    command = [sys.executable, "-m", "openrnn.cli", "train", *TINY, "--steps", "1000000"]
    command += ["--corpus", folder, "--out", out]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                if "bits/byte" in line:
                    break
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=900)
        finally:
            process.kill()
    assert process.returncode == 130
    assert err.endswith(f"stopped and saved: go on with openrnn train --resume {out}\n")
    assert "Traceback" not in err
    assert checkpoint.read(checkpoint.path_in(out))[1]["step"] > 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--corpus {tmp}/nowhere", "the corpus {tmp}/nowhere does not exist"),
        ("--corpus {tmp}/empty", "the corpus {tmp}/empty holds no text"),
        ("--hidden 0", "hidden must be at least 1, got 0"),
        ("--cell ltsm", "no cell 'ltsm'"),
        ("--backend cudn", "backend must be auto or one of"),
        ("--device cuda", "torch finds no CUDA device here"),
        ("--model keras", "model must be one of openrnn, torch, got 'keras'"),
        ("--model torch --cell mgu", "model torch has lstm, gru, rnn_tanh, rnn_relu, got 'mgu'"),
        ("--model torch --backend cpu", "model torch has no backends, got 'cpu'"),
        ("--steps 1 --minutes 1", "give one of them"),
        ("--steps x", "--steps"),
        ("--dropuot 1", "No such option"),
        ("--resume {tmp}/nowhere", "there is no checkpoint {tmp}/nowhere/"),
        ("--resume {tmp}/bad", "is not a checkpoint of openrnn train"),
        ("--out {tmp}/file/x", "cannot make the folder {tmp}/file/x"),
        ("--resume {trained} --hidden 13", "has --hidden 12, got --hidden 13"),
        ("--resume {trained} --corpus {tmp}/file", "not the one that the run"),
        ("--batch 100000", "the corpus has"),
        (
            "--hidden 300000",
            "there is not enough memory: try a smaller --batch, --bptt or --hidden",
        ),
        ("--hidden 2147483647", "there is not enough memory"),
        ("--hidden 2147483648", "hidden must be less than 2**31"),
        ("--corpus /dev/zero", "is neither a file nor a folder"),
    ],
)
def test_mistakes_in_training(arguments, says, *, folder, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / checkpoint.NAME).write_bytes(b"nonsense" * 9)
    (tmp_path / "file").write_bytes(b"some text " * 400)
    places = {"tmp": tmp_path, "trained": trained[0]}
    words = [word.format(**places) for word in arguments.split()]
    if "--resume" not in words:
        words = ["--corpus", folder, "--out", tmp_path / "out", *words]
    assert says.format(**places) in fails(capsys, "train", *words)
    assert not (tmp_path / "out" / checkpoint.NAME).exists()


def test_a_backend_that_refuses_says_why(folder, tmp_path, monkeypatch, capsys):
    reference = dispatch.BACKENDS["reference"]
    monkeypatch.setattr(type(reference), "refusals", lambda *_: ["out of order", "too slow"])
    arguments = ["train", *TINY, "--hidden", 13, "--corpus", folder, "--out", tmp_path / "x"]
    assert cli.main([*map(str, arguments), "--steps", "2", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert "no backend takes cell=lstm" in err
    assert "\n  reference: out of order; too slow\n" in err
    assert err.endswith('with backend "auto" it would run on backend cpu\n')
    assert "Traceback" not in err


# sample


def write(capsys, *arguments):
    assert cli.main(["sample", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_samples_follow_from_their_seed(trained, capsys):
    out, _ = trained
    options = [out, "--prompt", "the f", "--length", 40]
    one, again, other = (write(capsys, *options, "--seed", seed) for seed in (1, 1, 2))
    assert one == again != other
    assert one.startswith("the f")
    assert one.endswith("\n")
    likeliest = [write(capsys, *options, "--temperature", 0, "--seed", seed) for seed in (1, 2)]
    assert likeliest[0] == likeliest[1]
    assert len(write(capsys, out, "--length", 5).encode()) >= 6  # from nothing
    assert write(capsys, out, "--prompt", "grüß", "--length", 0) == "grüß\n"


def test_mistakes_in_sampling(trained, tmp_path, capsys):
    out, _ = trained
    for arguments, says in {
        (out, "--temperature", -1): "temperature must be a number, 0 or greater, got -1.0",
        (out, "--temperature", "nan"): "temperature must be",
        (out, "--length", -1): "length must be at least 0, got -1",
        (out, "--backend", "none"): "backend must be auto or one of",
        (out, "--device", "tpu"): "device must be one of auto, cpu, cuda, got 'tpu'",
        (tmp_path,): "there is no checkpoint",
        (): "Missing argument",
    }.items():
        assert says in fails(capsys, "sample", *arguments)


CELL = """
import torch, openrnn

@openrnn.cell(gates="n", states="h")
def mine(x, r, s):
    return s.h + torch.tanh(x.n + r.n)
"""


def test_a_cell_of_ones_own_is_loaded_only_from_where_the_user_says(folder, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(CELL)
    cell, out = f"{tmp_path}/mine.py:mine", str(tmp_path / "x")
    arguments = [*TINY, "--steps", "2", "--quiet", "--corpus", str(folder), "--out", out]
    assert cli.main(["train", *arguments, "--cell", cell]) == 0
    resume = ["train", "--resume", out, "--steps", "3", "--quiet"]
    assert "--cell path/to/mine.py:mine" in fails(capsys, *resume)
    assert "--cell path/to/mine.py:mine" in fails(capsys, "sample", out)
    assert cli.main([*resume, "--cell", cell]) == 0
    write(capsys, out, "--cell", cell, "--length", 3, "--backend", "reference")


# info and explain


def test_info_names_every_backend(capsys):
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert torch.__version__.startswith(rows["torch"])
    assert {"openrnn", "python", "numpy", "numba", "cuda", "cudnn", "cpu"} <= rows.keys()
    for name, backend in dispatch.BACKENDS.items():
        assert rows[f"backend {name}"] == (backend.absent() or "present")


def test_explain_shows_the_table_of_a_machine_that_is_not_here(capsys):
    words = "--cell gru --input 128 --hidden 512 --layers 2 --bidirectional --steps 60 --batch 8"
    words += " --device cuda --dtype bfloat16 --capability 9.0 --inference --lengths --reset"
    assert cli.main(["explain", *words.split()]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    if dispatch.BACKENDS["fused"].absent():
        assert rows.pop() == "on a machine that has backend fused, it would run this"
    assert "cell=gru" in head
    assert "input_size=128 hidden_size=512 num_layers=2 bidirectional=True" in head
    assert head.endswith("T=60 B=8 bfloat16 cuda lengths reset")
    names = [row[2:].split()[0] for row in rows if row[2] != " "]
    assert names == list(dispatch.BACKENDS)
    assert sum(row.startswith(">") for row in rows) == 1


def test_explain_shows_a_wavefront_that_is_asked_for(capsys):
    words = "--hidden 512 --input 512 --layers 4 --steps 128 --batch 64 --wavefront 32 "
    words += "--device cuda --dtype bfloat16 --capability 9.0"
    assert cli.main(["explain", *words.split()]) == 0
    out = capsys.readouterr().out
    assert "wavefront=32" in out
    if not dispatch.BACKENDS["fused"].absent():
        assert "forward as a wavefront: 4 layers at the same time, each 32 steps behind" in out


def test_explain_asks_a_single_backend(capsys):
    assert cli.main(["explain", "--backend", "cpu", "--device", "cuda"]) == 1
    head, row, verdict = capsys.readouterr().out.splitlines()
    assert head.endswith("float32 cuda grad training")
    assert "device cuda, needs cpu" in row
    assert verdict == "no backend takes this"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--cell foo", "no cell 'foo'"),
        ("--steps -1", "--steps must be 0 or more, got -1"),
        ("--schedule --steps 3", "--schedule needs --steps and --batch"),
        ("--capability 9.0", "--capability is of a GPU: it needs --device cuda"),
        ("--cell mine.py", "a cell of a file is asked for as path.py:name, got mine.py"),
        ("--clip -1", "cell_clip must not be negative, got -1.0"),
        ("--hidden -1", "hidden_size must not be negative, got -1"),
        ("--cell gru --clip 1", "cell_clip needs a cell that clips a state, gru has none"),
        ("--proj 9 --hidden 8", "proj_size must be 0 (none) or smaller"),
        ("--device cuda --capability 9", "capability must look like 9.0, got '9'"),
        ("--dtype int8", "dtype must be one of"),
        ("--device tpu", "device must be one of cpu, cuda, got 'tpu'"),
        ("--bias-mode both", "bias_mode must be one of"),
        ("--wavefront -1", "wavefront must be None, 0 (one layer after the other), 1 (one launch)"),
    ],
)
def test_mistakes_in_explaining(arguments, says, capsys):
    assert says in fails(capsys, "explain", *arguments.split())


def test_help_and_nothing(capsys):
    for arguments in (["--help"], ["train", "--help"]):
        assert cli.main(arguments) == 0
        assert "openrnn" in capsys.readouterr().out
    cli.main([])
    assert "explain" in capsys.readouterr().out
