"""The language model: data, checkpoints, resuming bit for bit, several processes."""

import copy
import errno
import itertools
import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

import openrnn
from openrnn.errors import CellError, CheckpointError, CorpusError, OpenRNNError
from openrnn.lm import checkpoint, corpus, evaluate
from openrnn.lm.build import build
from openrnn.lm.config import Config
from openrnn.lm.contents import Record
from openrnn.lm.model import as_tuple, find
from openrnn.lm.report import Several
from openrnn.lm.run import TrainingRun
from openrnn.lm.sample import sample
from openrnn.lm.schedule import rate
from openrnn.lm.streams import Position, Reader, Streams
from openrnn.lm.train import train
from openrnn.lm.workers import Workers
from openrnn.watch.gates import preactivations

ALONE = Workers(torch.device("cpu"))
QUIET = Several([])
TINY = {
    "hidden": 12, "embed": 6, "bptt": 8, "batch": 4, "steps": 20, "device": "cpu",
    "backend": "reference",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def fill(folder, files=40):
    """Files of a few hundred bytes each, all different."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(files):
        lines = [
            f"def f{place}_{line}(x):\n    return x + {line}\n" for line in range(place % 7 + 3)
        ]
        (folder / f"file{place}.py").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def texts(folder):
    return corpus.read(str(folder))


def files_of(part):
    ends = [*part.starts.tolist()[1:], len(part.data)]
    return [bytes(part.data[a:b].tolist()) for a, b in zip(part.starts.tolist(), ends)]


# data


def test_a_folder_is_split_by_file(folder, texts):
    train_files, held_files = files_of(texts.train), files_of(texts.held_out)
    expected = sorted(path.read_bytes() for path in folder.iterdir())
    assert sorted(train_files + held_files) == expected
    assert 0 < len(held_files) < len(train_files)
    assert corpus.read(str(folder)).fingerprint == texts.fingerprint


def test_a_new_file_moves_no_other(tmp_path):
    before = corpus.read(str(fill(tmp_path)))
    (tmp_path / "another.py").write_text("pass\n")
    after = corpus.read(str(tmp_path))
    for old, new in ((before.train, after.train), (before.held_out, after.held_out)):
        assert set(files_of(old)) <= set(files_of(new))
    assert before.fingerprint != after.fingerprint


def test_what_of_a_folder_is_text(tmp_path):
    fill(tmp_path, 30)
    wanted = sorted(path.read_bytes() for path in tmp_path.iterdir())
    for name, data in {
        ".hidden": b"a", "sub/.git/config": b"b", "__pycache__/x.py": b"c", "image": b"\x89PNG\0",
        "empty": b"",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "dangling").symlink_to("nowhere")
    found = corpus.read(str(tmp_path))
    assert sorted(files_of(found.train) + files_of(found.held_out)) == wanted


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    data = bytes(range(256)) * 4
    (tmp_path / "one").write_bytes(data)
    found = corpus.read(str(tmp_path / "one"))
    assert found.files == 1
    assert files_of(found.train) + files_of(found.held_out) == [data[:973], data[973:]]


def test_the_default_corpus_is_the_standard_library():
    found = corpus.read(None)
    every = len(found.train.data) + len(found.held_out.data)
    assert every > 5_000_000
    assert 0.02 < len(found.held_out.data) / every < 0.2
    assert any(b"class OrderedDict(dict):" in file for file in files_of(found.train))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "holds no text"),
        (lambda path: path.touch(), "is empty"),
    ],
)
def test_a_corpus_that_is_none(tmp_path, make, says):
    make(tmp_path / "x")
    with pytest.raises(CorpusError, match=says):
        corpus.read(str(tmp_path / "x"))


def test_a_corpus_that_is_too_small(tmp_path):
    (tmp_path / "x").write_bytes(b"abc" * 20)
    with pytest.raises(CorpusError, match=r"57 bytes to train on.* needs at least 144"):
        TrainingRun(Config(**{**TINY, "batch": 16}), corpus.read(str(tmp_path / "x")), ALONE)


def test_shuffling_keeps_the_files(texts):
    once, again, other = (texts.train.shuffled(seed) for seed in (1, 1, 2))
    assert sorted(files_of(once)) == sorted(files_of(texts.train))
    assert files_of(once) == files_of(again) != files_of(other)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 7))
def test_streams_are_the_data(sizes, batch, bptt):
    """Each stream is a segment of the data, reset where files begin and where it begins."""
    starts = torch.tensor([sum(sizes[:place]) for place in range(len(sizes))])
    part = corpus.Part(torch.randint(256, (sum(sizes),), dtype=torch.uint8), starts)
    length = sum(sizes) // batch
    if length < 2:
        with pytest.raises(CorpusError):
            Streams(part, batch)
        return
    streams = Streams(part, batch)
    chunks = [streams.chunk(begin, bptt) for begin in range(0, length - 1, bptt)]
    x, target, reset = (torch.cat(parts) for parts in zip(*chunks))
    for row in range(batch):
        segment = part.data[row * length : (row + 1) * length].long()
        assert x[:, row].equal(segment[:-1])
        assert target[:, row].equal(segment[1:])
        begins = [0, *(start - row * length for start in starts.tolist())]
        assert reset[:, row].nonzero().flatten().tolist() == sorted(
            {begin for begin in begins if 0 <= begin < length - 1}
        )


def test_ranks_share_the_streams_of_one_process(texts):
    options = {"bptt": 8, "batch": 6, "seed": 3}
    one = Reader(texts.train, **options)
    ranks = [Reader(texts.train, **options, rank=rank, world=3) for rank in range(3)]
    for _ in range(one.chunks + 2):  # into the second pass
        parts = [rank.next() for rank in ranks]
        for whole, *shares in zip(one.next(), *parts):
            assert torch.cat(shares, dim=1).equal(whole)
    assert one.position == Position(1, 2)
    with pytest.raises(ValueError, match="multiple of the 4 processes, got 6"):
        Reader(texts.train, **options, world=4)


def test_a_reader_goes_on_from_a_position(texts):
    options = {"bptt": 8, "batch": 6, "seed": 3}
    first, second = Reader(texts.train, **options), Reader(texts.train, **options)
    passes = [[first.next() for _ in range(first.chunks)] for _ in range(2)]
    assert not passes[0][0].x.equal(passes[1][0].x)
    for _ in range(5):
        first.next()
    assert first.position == Position(2, 5)
    second.position = first.position
    assert all(a.equal(b) for a, b in zip(first.next(), second.next()))


# the model


def test_the_score_is_that_of_one_long_call(texts):
    """State is carried over chunks and dropped at files: chunks of 8 or one, it is the same."""
    run = TrainingRun(Config(**TINY, dtype="float64"), texts, ALONE)
    data = texts.held_out
    streams = Streams(data, TINY["batch"])
    whole = streams.chunk(0, streams.length)
    with torch.no_grad():
        logits, _ = run.model(whole.x, None, whole.reset)
        nats = cross_entropy(logits.flatten(0, 1), whole.target.flatten())
    got = evaluate.nats(run, data)
    assert got == pytest.approx(nats.item(), rel=1e-12)
    assert got != pytest.approx(math.log(256), abs=1e-6)


def test_training_carries_the_state_on(texts):
    run = TrainingRun(Config(**TINY), texts, ALONE)
    run.learn()
    before, model, state = run.reader.position, copy.deepcopy(run.model), run.state
    run.learn()
    run.reader.position = before
    chunk = run.reader.next()
    _, expected = model(chunk.x, state, chunk.reset)
    torch.testing.assert_close(run.state, expected, rtol=0, atol=0)
    assert all(part.abs().max() > 0 and not part.requires_grad for part in run.state)


def test_it_learns(tmp_path):
    (tmp_path / "x").write_bytes(b"hello world, " * 300)
    config = Config(**{**TINY, "steps": 90, "hidden": 24, "lr": 0.05, "layers": 1})
    run = TrainingRun(config, corpus.read(str(tmp_path / "x")), ALONE)
    assert evaluate.score(run).model > 7
    train(run, tmp_path / "c", QUIET)
    scores = evaluate.score(run)
    assert scores.model < 0.5 < scores.baselines["unigram entropy"]
    text = "".join(sample(run.model, b"hello ", 20, 0.0, 0))
    assert text == "hello world, hello world, "


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_both_models_are_one_function(cell):
    """The layers of torch.nn and ours have the same parameters, outputs and states."""
    options = {"cell": cell, "hidden": 6, "embed": 5, "layers": 2, "steps": 1}
    theirs, ours = (
        build(Config(**options, **more)).double()
        for more in ({"model": "torch"}, {"backend": "reference"})
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randint(256, (7, 3))
    logits, state = theirs(x)
    wanted, wanted_state = ours(x, None, torch.zeros(7, 3, dtype=torch.bool))
    torch.testing.assert_close(logits, wanted)
    torch.testing.assert_close(state, wanted_state)
    one, other = theirs.stepper(3), ours.stepper(3)
    for x_t, row in zip(x, logits):
        torch.testing.assert_close(one(x_t), row)
        torch.testing.assert_close(other(x_t), row)
    torch.testing.assert_close(one(x[0]), other(x[0]))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_gates_are_those_of_the_steps(cell):
    """From the pre-activations of all steps, the cell gives the states that the layer gives."""
    torch.manual_seed(0)
    layer = build(Config(cell=cell, hidden=6, embed=5, layers=2, steps=1, dropout=0.5)).rnn.double()
    x = torch.randn(7, 3, 5, dtype=torch.float64)
    found = list(preactivations(layer, x))
    assert layer.training
    names = layer.cell.gates
    assert [(gate.layer, gate.name) for gate in found] == [
        (at, gate) for at in (0, 1) for gate in names
    ]
    y, _ = layer.eval()(x)
    top = {gate.name: gate.values.view(7, 3, 6) for gate in found if gate.layer == 1}
    if cell == "lstm":
        c = torch.zeros(3, 6, dtype=torch.float64)
        for t in range(7):
            i, f, g, o = (top[gate][t] for gate in "ifgo")
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            torch.testing.assert_close(o.sigmoid() * c.tanh(), y[t])
    else:
        z = top["z"].sigmoid()
        before = torch.cat([torch.zeros_like(y[:1]), y[:-1]])
        n = (y - z * before) / (1 - z)  # what the cell's n must have been
        assert (n.abs() < 1).all()


def test_the_rate_rises_then_falls_to_nothing():
    rates = [rate(step / 1000) for step in range(1001)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[0] == 0
    assert rates[peak] > 0.99
    assert rates[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu", "mgu", "slstm"])
def test_a_step_is_a_call_of_one_byte(monkeypatch, cell):
    model = build(Config(cell=cell, **TINY, dtype="float64"))
    x = torch.randint(256, (5, 3))
    logits, finals = model(x)
    stepper = model.rnn.stepper(3)
    monkeypatch.setattr(model.rnn, "stepper", lambda batch: stepper)
    step = model.stepper(3)
    for x_t, row in zip(x, logits):
        torch.testing.assert_close(step(x_t), row)
    torch.testing.assert_close(as_tuple(stepper.state), finals)


CELL = """
import torch, openrnn

@openrnn.cell(gates="f n", states="h")
def mine(x, r, s):
    f = torch.sigmoid(x.f + r.f)
    return (1 - f) * s.h + f * torch.tanh(x.n + r.n)
"""


def test_a_cell_of_ones_own(tmp_path):
    (tmp_path / "cells.py").write_text(CELL)
    assert find(f"{tmp_path}/cells.py:mine").gates == ("f", "n")
    model = build(Config(cell=f"{tmp_path}/cells.py:mine", **TINY))
    assert isinstance(model.rnn, openrnn.Recurrent)
    (tmp_path / "broken.py").write_text("1 / 0")
    for cell, says in {
        "nowhere.py:mine": "does not exist",
        f"{tmp_path}/cells.py:other": "no cell named 'other'",
        f"{tmp_path}/broken.py:x": "ZeroDivisionError",
        "ltsm": "no cell 'ltsm'",
    }.items():
        with pytest.raises(CellError, match=says):
            build(Config(cell=cell, **TINY))


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden": 0}, {"bptt": -1}, {"lr": math.nan}, {"lr": 0.0}, {"dropout": 1.5},
        {"dtype": "int8"}, {"device": "tpu"}, {"backend": "cudn"}, {"seed": -1}, {"steps": 0},
        {"steps": None}, {"minutes": 1.0}, {"steps": None, "minutes": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)) if len(wrong) == 1 else "minutes"):
        Config(**{**TINY, **wrong})


# checkpoints


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    path = tmp_path_factory.mktemp("sealed") / checkpoint.NAME
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3, dtype=torch.uint8)}
    checkpoint.write(path, tensors, {"step": 7, "words": "ü"})
    return path, tensors


def test_a_checkpoint_comes_back(sealed):
    path, tensors = sealed
    found, record = checkpoint.read(path)
    assert record == {"step": 7, "words": "ü"}
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensors[name]) for name in tensors)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@given(st.data())
def test_any_damage_is_seen(sealed, tmp_path_factory, data):
    """One bit, or the end, of a checkpoint: never loaded, always one sentence."""
    whole = sealed[0].read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    flipped = bytes([whole[place] ^ (1 << data.draw(st.integers(0, 7)))])
    bad = whole[:place] if cut else whole[:place] + flipped + whole[place + 1 :]
    path = tmp_path_factory.mktemp("bad") / checkpoint.NAME
    path.write_bytes(bad)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path)
    assert "\n" not in str(caught.value)


def test_foreign_files(tmp_path, sealed):
    path = tmp_path / checkpoint.NAME
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.read(path)
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of openrnn train"):
        checkpoint.read(path)
    save_file({"a": torch.ones(2)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="not a checkpoint of openrnn train"):
        checkpoint.read(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="not a checkpoint of openrnn train"):
        checkpoint.read(path)
    path.write_bytes(sealed[0].read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    with pytest.raises(CheckpointError, match="version '2' of its format, this openrnn reads 1"):
        checkpoint.read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.read(path)


def full_disk(monkeypatch):
    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


def small_files(monkeypatch):
    """The system itself refuses in the middle of the writing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("renamed a file that is not whole"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("obstacle", [full_disk, small_files])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, obstacle):
    path = tmp_path / checkpoint.NAME
    checkpoint.write(path, {"a": torch.ones(2)}, {"step": 1})
    undo = obstacle(monkeypatch)
    try:
        with pytest.raises(
            CheckpointError, match=r"(No space|too large).*the one before is intact"
        ):
            checkpoint.write(path, {"a": torch.zeros(10_000)}, {"step": 2})
    finally:
        if undo:
            undo()
    found, record = checkpoint.read(path)
    assert record == {"step": 1}
    assert found["a"].equal(torch.ones(2))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


# resuming


def start(texts, **changes):
    return TrainingRun(Config(**{**TINY, **changes}), texts, ALONE)


def interrupt(monkeypatch, at):
    """Ctrl-C in the middle of step number `at`."""
    learn = TrainingRun.learn

    def interrupted(run):
        if run.step + 1 == at:
            signal.raise_signal(signal.SIGINT)
        return learn(run)

    monkeypatch.setattr(TrainingRun, "learn", interrupted)


def assert_same(path, other):
    (tensors, record), (others, other_record) = checkpoint.read(path), checkpoint.read(other)
    assert tensors.keys() == others.keys()
    different = [name for name in tensors if not tensors[name].equal(others[name])]
    assert not different
    for each in (record, other_record):
        del each["elapsed"]
    assert record == other_record


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.3},
        {"cell": "gru", "dropout": 0.3, "dtype": "bfloat16"},
        {"cell": "slstm", "layers": 1, "dtype": "float64", "batch": 18, "bptt": 25},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, monkeypatch, texts, changes):
    """20 steps, and 10, Ctrl-C, a new process in effect, 10 more: every tensor equal."""
    once, parts = tmp_path / "once", tmp_path / "parts"
    assert train(start(texts, **changes), once, QUIET) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, 10)
        assert train(start(texts, **changes), parts, QUIET) == signal.SIGINT
    tensors, record = checkpoint.read(parts)
    assert record["step"] == 10
    torch.manual_seed(12345)
    torch.rand(7)
    record = Record.parse(record)
    second = TrainingRun(record.config, texts, ALONE)
    second.restore(tensors, record)
    assert train(second, parts, QUIET) == 0
    assert_same(once, parts)
    if changes.get("bptt") == 25:  # and this went over the end of a pass
        assert checkpoint.read(once)[1]["epoch"] > 0


def test_the_same_seed_is_the_same_run(tmp_path, texts):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(start(texts, dropout=0.3, seed=seed, steps=4), tmp_path / name, QUIET)
    assert_same(tmp_path / "a", tmp_path / "b")
    weights = [checkpoint.read(tmp_path / name)[0]["model/output.weight"] for name in "ac"]
    assert not weights[0].equal(weights[1])


def test_a_budget_in_minutes_resumes_where_it_was(tmp_path, monkeypatch, texts):
    """A clock that is read once before the first step and once a step, a minute on each time."""
    monkeypatch.setattr("openrnn.lm.train.SAVE", math.inf)
    monkeypatch.setattr("openrnn.lm.train.GLANCES", 0)
    clock = itertools.count(1000.0, 60.0)
    monkeypatch.setattr("openrnn.lm.train.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        train(start(texts, steps=None, minutes=10.0), tmp_path / "x", QUIET)
    tensors, record = checkpoint.read(tmp_path / "x")
    assert (record["step"], record["elapsed"]) == (5, 360)
    run = TrainingRun(Config.parse(record["config"]), texts, ALONE)
    run.restore(tensors, Record.parse(record))
    assert train(run, tmp_path / "x", QUIET) == 0
    record = checkpoint.read(tmp_path / "x")[1]
    assert (record["step"], record["elapsed"]) == (8, 600)
    assert run.learn().lr < 1e-6 * run.config.lr


def test_a_run_resumes_its_own_only(tmp_path, texts):
    run = start(texts, steps=2)
    train(run, tmp_path / "x", QUIET)
    tensors, record = checkpoint.read(tmp_path / "x")
    wrong = [
        ({**record, "corpus": "0"}, tensors, "the corpus is not the one"),
        ({**record, "world": 2}, tensors, "has 2 processes, got 1"),
        ({"corpus": texts.fingerprint}, tensors, "its record has no elapsed"),
        (record, {k: v for k, v in tensors.items() if "exp_avg" not in k}, "it lacks the tensor"),
        (record, {**tensors, "model/output.bias": torch.ones(3)}, "must have shape"),
    ]
    for other, parts, says in wrong:
        with pytest.raises(CheckpointError, match=says) as caught:
            start(texts, steps=2).restore(parts, Record.parse(other))
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="has --hidden 12, got --hidden 13"):
        run.config.resumed({"hidden": 13})
    with pytest.raises(CheckpointError, match="not one of this version"):
        Config.parse({"depth": 3})
    assert run.config.resumed({"hidden": 12, "minutes": 3.0}).steps is None


def test_a_run_that_left_the_numbers_is_not_saved(tmp_path, monkeypatch, texts):
    run = start(texts, steps=4)
    train(run, tmp_path / "x", QUIET)
    before = (tmp_path / "x").read_bytes()
    worse = start(texts, steps=50, lr=1e38, cell="rnn_relu")
    with pytest.raises(OpenRNNError, match="try a lower --lr than 1e"):
        train(worse, tmp_path / "x", QUIET)
    assert (tmp_path / "x").read_bytes() == before
    monkeypatch.setattr("openrnn.lm.train.SAVE", 0.0)
    with pytest.raises(OpenRNNError, match="try a lower --lr than 1e"):
        train(start(texts, steps=50, lr=1e38, cell="rnn_relu"), tmp_path / "y", QUIET)
    kept, _ = checkpoint.read(tmp_path / "y")
    assert all(tensor.isfinite().all() for tensor in kept.values())


def test_saves_on_the_way(tmp_path, monkeypatch, texts):
    monkeypatch.setattr("openrnn.lm.train.SAVE", 0.0)
    steps = []
    write = checkpoint.write
    monkeypatch.setattr(
        checkpoint, "write", lambda p, t, r: (steps.append(r["step"]), write(p, t, r))
    )
    train(start(texts, steps=5), tmp_path / "x", QUIET)
    assert steps == [1, 2, 3, 4, 5]


# several processes


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, folder, texts):
    """Through torchrun, with a resume halfway: the same numbers, rounding apart."""
    options = ["--corpus", folder, "--out", tmp_path / "two", "--quiet"]
    for name, value in {**TINY, "steps": 3}.items():
        options += [f"--{name}", value]
    # standalone: a port that is free, as other runs may be on this machine
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "-m", "openrnn.cli", "train"]
    for arguments in (options, ["--resume", tmp_path / "two", "--steps", 6, "--quiet"]):
        done = subprocess.run(
            [*torchrun, *map(str, arguments)], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    one = start(texts, steps=3, corpus=str(folder))
    train(one, tmp_path / "one", QUIET)
    tensors, record = checkpoint.read(tmp_path / "one")
    record = Record.parse(record)
    one = TrainingRun(record.config.resumed({"steps": 6}), texts, ALONE)
    one.restore(tensors, record)
    train(one, tmp_path / "one", QUIET)
    (mine, record), (theirs, other) = (
        checkpoint.read(path) for path in (tmp_path / "one", checkpoint.path_in(tmp_path / "two"))
    )
    for name in mine:
        if name.startswith(("model/", "state/", "optimizer/")):
            torch.testing.assert_close(theirs[name], mine[name], rtol=1e-3, atol=1e-5, msg=name)
    assert [name for name in theirs if name not in mine] == ["generator/cpu/1"]
    same = ("step", "epoch", "chunk", "corpus")
    assert [record[name] for name in same] == [other[name] for name in same]
    assert json.dumps(other["world"]) == "2"
