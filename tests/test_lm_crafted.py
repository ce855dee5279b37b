"""Run folders that somebody else wrote: sealed as ours are, and nothing in them believed."""

import io
import json
import math
import os
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

import forks
import pytest
import torch
from cases import thinned
from safetensors.torch import save

from openrnn import cli
from openrnn.errors import CheckpointError
from openrnn.lm import checkpoint, claim
from openrnn.lm.claim import claimed

TINY = "--hidden 6 --embed 5 --bptt 8 --batch 4 --layers 1 --steps 2 --device cpu".split()
DEEP = "[" * 50_000 + "]" * 50_000
ODD = [
    -1, 7, 2**63, 10**400, 0.5, 5e-324, math.nan, True, None, "seven", "\0\n\x1b[31m\ud800",
    "/dev/zero", "gru", [[[1]]], {"a": 1},
]  # fmt: skip
FIELDS = ("config", "step", "elapsed", "epoch", "chunk", "world", "corpus")
CONFIG = (
    "corpus", "cell", "layers", "hidden", "embed", "bptt", "batch", "lr", "dropout", "dtype",
    "seed", "steps", "minutes", "device", "backend", "model", "task", "dropout_input",
    "dropout_output", "dropout_embedding", "dropout_weight", "activation", "temporal", "tied",
    "vocabulary",
)  # fmt: skip

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:dropout option adds dropout"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The tensors, the record and the bytes of a real run of two steps."""
    root = tmp_path_factory.mktemp("crafted")
    (root / "text").write_bytes(b"hello world, " * 100)
    arguments = ["train", *TINY, "--backend", "reference", "--quiet"]
    assert cli.main([*arguments, "--corpus", str(root / "text"), "--out", str(root / "run")]) == 0
    path = checkpoint.path_in(root / "run")
    return (*checkpoint.read(path), path.read_bytes())


def sealed(tensors, record, **own):
    """A checkpoint with the right seal, whatever it says; a text is taken as the record's JSON."""
    text = record if isinstance(record, str) else json.dumps(record)
    head = {"format": "openrnn.lm", "version": "1", "sha256": checkpoint.BLANK}
    data = save(tensors, {**head, "record": text, **own})
    front, body = checkpoint._halves(data)
    seal = checkpoint._digest(front, body)
    return front.replace(checkpoint.BLANK.encode(), seal.encode(), 1) + bytes(body)


def ends_well(tmp_path, data, says=""):
    """`train --resume` and `sample` of it run, or end with 2 and one sentence that `says` it."""
    for number, command in enumerate(
        (["train", "--steps", "3", "--quiet", "--resume"], ["sample", "--length", "2"])
    ):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        (folder / checkpoint.NAME).write_bytes(data)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as caught:
            code = cli.main([*command, str(folder)])
        err = caught.getvalue()
        assert code in (0, 2)
        assert "\x1b" not in err
        if code == 2:
            assert err.startswith("openrnn: ")
            assert err.count("\n") == 1 or "no backend takes" in err
        if number == 0 and says:
            assert (code, says in err, checkpoint.NAME in err) == (2, True, True), err


@pytest.mark.parametrize("field", FIELDS)
def test_any_field_of_a_record(run, tmp_path, field):
    tensors, record, _ = run
    for value in ODD:
        ends_well(tmp_path, sealed(tensors, {**record, field: value}))
    less = {name: value for name, value in record.items() if name != field}
    ends_well(tmp_path, sealed(tensors, less), f"its record has no {field}")
    deep = json.dumps({**record, field: "DEEP"}).replace('"DEEP"', DEEP)
    ends_well(tmp_path, sealed(tensors, deep), "its record is nested too deeply")


@pytest.mark.parametrize("field", thinned(CONFIG, 6))
def test_any_field_of_a_config(run, tmp_path, field):
    tensors, record, _ = run
    assert record["config"].keys() == set(CONFIG)
    for value in ODD:
        ends_well(
            tmp_path, sealed(tensors, {**record, "config": {**record["config"], field: value}})
        )
    less = {name: value for name, value in record["config"].items() if name != field}
    ends_well(tmp_path, sealed(tensors, {**record, "config": less}))
    wrong = sealed(tensors, {**record, "config": {**record["config"], field: [1]}})
    ends_well(tmp_path, wrong, f"{field} must be")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": "seven"}, "its step must be an integer from 1 on, less than 2**31, got 'seven'"),
        ({"elapsed": math.nan}, "its elapsed must be a number of seconds, 0 or greater, got nan"),
        ({"chunk": 1000}, "its chunk must be less than the"),
        ({"world": 2}, "has 2 processes, got 1"),
        ({"config": []}, "its config must be an object, got []"),
        ({"config": {"depth": 3}}, "not one of this version: it has a field 'depth'"),
    ],
    ids=str,
)
def test_what_is_said_of_a_field(run, tmp_path, change, says):
    ends_well(tmp_path, sealed(run[0], {**run[1], **change}), says)


@pytest.mark.parametrize("text", ["[" * 100_000, DEEP, "", "nonsense", "NaN", "[]", "1" * 5000])
def test_a_record_that_is_none(run, tmp_path, text):
    ends_well(tmp_path, sealed(run[0], text), "d")


@pytest.mark.parametrize(
    "own",
    [{"version": "2"}, {"format": "x"}, {"sha256": ""}, {"sha256": "0" * 63}, {"version": "1\n"}],
    ids=str,
)
def test_any_head(run, tmp_path, own):
    ends_well(tmp_path, sealed(run[0], run[1], **own), "")


@pytest.mark.parametrize(
    "name",
    thinned(
        ["model/rnn.weight_hh_l0", "model/embedding.weight", "model/output.bias",
         "optimizer/output.bias/exp_avg_sq", "optimizer/rnn.weight_hh_l0/exp_avg",
         "optimizer/output.bias/step", "state/0", "state/1", "generator/cpu/0"],
        3,
    ),
)  # fmt: skip
def test_any_tensor(run, tmp_path, name):
    """The shapes of a moment were not looked at: the optimiser wrote past its end."""
    tensors, record, _ = run
    given = tensors[name]
    shapes = (1, 1), (0,), (given.numel() + 1,), (1, *given.shape), (*given.shape, 0)
    wrong = [torch.zeros(shape, dtype=given.dtype) for shape in shapes]
    wrong += [given.to(kind) for kind in (torch.float64, torch.bfloat16, torch.int64, torch.bool)]
    for tensor in wrong:
        says = f"its tensor {name} must have shape {tuple(given.shape)} and dtype"
        data = sealed({**tensors, name: tensor.contiguous()}, record)
        ends_well(tmp_path, data, says)
    for value in (math.nan, math.inf, -1.0, 3e38) if given.is_floating_point() else (0, 255):
        ends_well(tmp_path, sealed({**tensors, name: torch.full_like(given, value)}, record))
    less = {other: tensor for other, tensor in tensors.items() if other != name}
    ends_well(tmp_path, sealed(less, record), f"it lacks the tensor {name}")


@pytest.mark.parametrize("name", ["model/x", "state/7", "generator/cpu/1", "x", "a\nb", "\x1b[2J"])
def test_a_tensor_too_many(run, tmp_path, name):
    ends_well(tmp_path, sealed({**run[0], name: torch.zeros(3)}, run[1]), "it has a tensor")


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_memory_of_a_config_is_not_made_before_it_is_compared(run, tmp_path, cell):
    """A model of a terabyte: refused by its size, not by the system."""
    config = {**run[1]["config"], "cell": cell, "hidden": 2**20, "layers": 2**30}
    ends_well(tmp_path, sealed(run[0], {**run[1], "config": config}), "model/output.weight")


def test_truncated(run, tmp_path):
    whole = run[2]
    for size in (0, 1, 8, 9, 200, len(whole) // 2, len(whole) - 1):
        ends_well(tmp_path, whole[:size], "d")
    for size in (0, 2**20, 2**62, 2**64 - 1):
        ends_well(tmp_path, size.to_bytes(8, "little") + whole[8:], "d")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_file_without_end(tmp_path, make):
    make(tmp_path / checkpoint.NAME)
    with pytest.raises(CheckpointError, match="is no regular file"):
        checkpoint.read(tmp_path / checkpoint.NAME)


# claims


def test_a_folder_has_one_run(tmp_path):
    with ExitStack() as stack:
        stack.enter_context(claimed(tmp_path / "a" / "b"))
        with (
            pytest.raises(CheckpointError, match=r"another openrnn train is at work in .*b: "),
            claimed(tmp_path / "a" / "b"),
        ):
            pass
        stack.enter_context(claimed(tmp_path / "c"))
    with claimed(tmp_path / "a" / "b"):  # it is free again
        assert [file.name for file in (tmp_path / "a" / "b").iterdir()] == [claim.NAME]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / claim.NAME).mkdir()
    with pytest.raises(CheckpointError, match="cannot write in the folder"), claimed(tmp_path):
        pass


# processes that claim one folder, told to at once: what each says, and after the winner's kill
HOLDERS = """
import os, signal, sys
from pathlib import Path
from openrnn.errors import CheckpointError
from openrnn.lm.claim import claimed

folder, begin, heard = Path(sys.argv[1]), os.pipe(), {}
for _ in range(int(sys.argv[2])):
    told = os.pipe()
    if process := os.fork():
        os.close(told[1])
        heard[process] = open(told[0])
        continue
    os.close(begin[1])
    os.read(begin[0], 1)
    try:
        with claimed(folder):
            os.write(told[1], b"mine\\n")
            signal.pause()
    except CheckpointError as error:
        os.write(told[1], f"{error}\\n".encode())
    os._exit(0)
os.close(begin[1])
said = {process: file.readline().strip() for process, file in heard.items()}
print(*said.values(), sep="\\n")
for process, words in said.items():
    if words == "mine":
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
with claimed(folder):
    print("free")
"""


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_of_processes_that_begin_at_once_one_wins_and_its_kill_frees_the_folder(tmp_path, count):
    ran = forks.python(HOLDERS, tmp_path / "out", count)
    assert ran.returncode == 0, ran.stderr
    *said, last = ran.stdout.splitlines()
    assert len(said) == count
    assert said.count("mine") == 1
    assert sum("another openrnn train is at work" in line for line in said) == count - 1
    assert last == "free"


def test_a_run_in_a_folder_that_another_has(run, tmp_path, capsys):
    """Before its first checkpoint, as of two runs that begin at once; the folder stays clean."""
    (tmp_path / "text").write_bytes(b"hello world, " * 100)
    words = ["train", *TINY, "--backend", "reference", "--quiet", "--corpus", tmp_path / "text"]
    with claimed(tmp_path / "out"):
        assert cli.main([*map(str, words), "--out", str(tmp_path / "out")]) == 2
        assert "another openrnn train is at work" in capsys.readouterr().err
        checkpoint.path_in(tmp_path / "out").write_bytes(run[2])
        assert cli.main(["train", "--resume", str(tmp_path / "out"), "--quiet"]) == 2
        assert "another openrnn train is at work" in capsys.readouterr().err
    assert checkpoint.path_in(tmp_path / "out").read_bytes() == run[2]


def test_a_checkpoint_that_was_written_while_it_was_read(run, tmp_path, monkeypatch, capsys):
    """The run that is resumed went on, and ended between our look and our claim."""
    path = checkpoint.path_in(tmp_path)
    path.write_bytes(run[2])
    enter = claimed.__wrapped__

    def late(folder):
        (tmp_path / "new").write_bytes(run[2])
        (tmp_path / "new").replace(path)
        return enter(folder)

    monkeypatch.setattr("openrnn.lm.job.claimed", contextmanager(late))
    assert cli.main(["train", "--resume", str(tmp_path), "--steps", "3", "--quiet"]) == 2
    assert "was written while it was read: resume once more" in capsys.readouterr().err
    assert path.read_bytes() == run[2]
