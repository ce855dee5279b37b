"""The language model of words: corpora, regularisers, the rate's plateaus, checkpoints, samples."""

import json
import math
from dataclasses import replace

import pytest
import torch
from cases import thinned
from test_lm_crafted import ODD, ends_well, sealed
from torch.nn.functional import cross_entropy

from openrnn import cli
from openrnn.errors import CheckpointError, CorpusError
from openrnn.lm import checkpoint, evaluate, vocabulary, words
from openrnn.lm.build import build
from openrnn.lm.config import OF_WORDS, Config
from openrnn.lm.contents import Record, check_model
from openrnn.lm.docstrings import docstrings
from openrnn.lm.report import Several
from openrnn.lm.run import TrainingRun
from openrnn.lm.sample import sample
from openrnn.lm.schedule import Plateau
from openrnn.lm.streams import Streams
from openrnn.lm.train import train
from openrnn.lm.workers import Workers

ALONE = Workers(torch.device("cpu"))
QUIET = Several([])
TINY = {
    "task": "words", "hidden": 12, "embed": 6, "bptt": 8, "batch": 4, "steps": 12, "device": "cpu",
    "backend": "reference",
}  # fmt: skip
# every regulariser at once
HEAVY = {
    "dropout": 0.3, "dropout_input": 0.2, "dropout_output": 0.4, "dropout_embedding": 0.1,
    "dropout_weight": 0.5, "activation": 2.0, "temporal": 1.0,
}  # fmt: skip
NONE = {"dropout": 0.0, "dropout_input": 0.0, "dropout_output": 0.0}
TEXT = "the cat sat on the mat\n\nthe dog saw the <unk> cat\n"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A prepared corpus under the names of the Penn Treebank's files."""
    path = tmp_path_factory.mktemp("ptb")
    (path / "README").write_text("not a part")
    (path / "ptb.train.txt").write_text(TEXT * 40)
    (path / "ptb.valid.txt").write_text("the cat saw the dog\n" * 6)
    (path / "ptb.test.txt").write_text("the zebra sat\n" * 6)
    return path


@pytest.fixture(scope="module")
def texts(folder):
    return words.read(str(folder))


def spelt(corpus, part):
    return [corpus.vocabulary[number] for number in part.data.tolist()]


def start(texts, **changes):
    return TrainingRun(Config.make({**TINY, **changes}), texts, ALONE)


# corpora


def test_prepared_files_are_taken_as_they_are(texts):
    assert texts.vocabulary[:4] == ("<unk>", "<eos>", "the", "cat")
    assert set(texts.vocabulary[4:]) == {"sat", "on", "mat", "dog", "saw"}
    line = ["the", "cat", "sat", "on", "the", "mat", "<eos>", "<eos>"]
    assert spelt(texts, texts.train)[:10] == [*line, "the", "dog"]
    assert spelt(texts, texts.test)[:4] == ["the", "<unk>", "sat", "<eos>"]
    assert len(texts.train.data) == 40 * 15
    assert (len(texts.held_out.data), texts.files) == (36, 3)


def test_the_names_of_wikitext_and_a_small_vocabulary(folder, tmp_path, texts):
    for part in words.PARTS:
        text = (folder / f"ptb.{part}.txt").read_text()
        (tmp_path / f"wiki.{part}.tokens").write_text(text)
    found = words.read(str(tmp_path))
    assert found.fingerprint == texts.fingerprint
    small = words.read(str(tmp_path), 4)
    assert small.vocabulary == texts.vocabulary[:4]
    assert small.fingerprint != found.fingerprint


def test_raw_text_is_cut_and_split_by_file(tmp_path):
    for place in range(60):
        (tmp_path / f"{place}.py").write_text(f"Don't say: f(x_{place}) = 12!\n\n")
    found = words.read(str(tmp_path))
    line = ["don't", "say", ":", "f", "(", "x", "_", "<unk>", ")", "=", "12", "!", "<eos>"]
    for part in (found.train, found.held_out, found.test):
        assert len(part.data) % len(line) == 0
        assert spelt(found, part)[: len(line)] == line
    assert len(found.train.starts) > 40
    assert sum(len(part.starts) for part in (found.train, found.held_out, found.test)) == 60
    (tmp_path / "one.txt").write_text("a b c d e " * 40)
    one = words.read(str(tmp_path / "one.txt"))
    assert [len(part.data) for part in (one.train, one.held_out, one.test)] == [181, 10, 10]


@pytest.mark.parametrize(
    "names",
    [
        ("ptb.{}.txt", "ptb.char.{}.txt"),  # as they lie in the archive
        ("wiki.{}.tokens",),
        ("wiki.{}.raw",),
        ("ptb.char.{}.txt",),
    ],
    ids=str,
)
def test_files_under_their_published_names(tmp_path, names):
    """Each part is its file's; single characters are read only where there are no words."""
    for place, name in enumerate(names):
        for part in words.PARTS:
            (tmp_path / name.format(part)).write_text(
                f" = The {part} = \n" if not place else "t h e"
            )
    (tmp_path / "README").write_text("= not a part =")
    found = words.read(str(tmp_path))
    wanted = ["<unk>", "<unk>", "<unk>", "<unk>", "<eos>"]
    assert found.files == 3
    for part in (found.train, found.held_out, found.test):
        assert spelt(found, part) == wanted


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"train.txt": b"a b"}, r"needs one file valid\.txt .* got none"),
        ({"train.txt": b"a", "b.train.txt": b"b"}, r"got b\.train\.txt, train\.txt"),
        ({"x": b"\xff\xfe text"}, "x is not UTF-8 text: byte 0"),
        ({"x": b" \n"}, "has too few words"),
        ({}, "holds no text"),
    ],
    ids=str,
)
def test_a_corpus_of_words_that_is_none(tmp_path, files, says):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=says):
        words.read(str(tmp_path))


def test_documentation_strings(tmp_path, monkeypatch):
    """Of a small library: tests have none, broken modules are passed over."""
    sources = {
        "a.py": '"""Module."""\nclass A:\n  """Class."""\n  def f(self):\n    """Method."""',
        "test/b.py": '"""A test."""',
        "c.py": '"""broken',
        "d.py": "x = '''no documentation'''",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert docstrings() == [("a.py", b"Module.\nClass.\nMethod.")]


# the model


def test_in_eval_mode_nothing_regularises(texts):
    """State is carried over chunks: of 8 words or of all, the score is the same."""
    run = start(texts, dtype="float64", **HEAVY)
    streams = Streams(texts.held_out, 4)
    whole = streams.chunk(0, streams.length)
    run.model.eval()
    with torch.no_grad():
        logits, _ = run.model(whole.x, None, whole.reset)
        nats = cross_entropy(logits.flatten(0, 1), whole.target.flatten())
    assert evaluate.nats(run, texts.held_out) == pytest.approx(nats.item(), rel=1e-12)


def test_tied_weights(texts):
    tied, free = (start(texts, tied=tied).model for tied in (True, False))
    assert [stack.hidden_size for stack in tied.stacks] == [12, 6]
    assert [stack.hidden_size for stack in free.stacks] == [12, 12]
    assert "output.weight" not in dict(tied.named_parameters())
    y = torch.randn(3, 2, 6)
    wanted = y @ tied.embedding.weight.T + tied.output.bias
    torch.testing.assert_close(tied.scores(y), wanted)


def test_masks_and_penalties_are_those_of_the_equations(texts, monkeypatch):
    """With masks drawn once and kept, the model in training is computed by hand."""
    options = {**TINY, **NONE, "dtype": "float64", "layers": 2}
    changes = {"dropout": 0.3, "dropout_input": 0.2, "dropout_output": 0.4}
    changes |= {"dropout_embedding": 0.1, "dropout_weight": 0.5, "activation": 2.0, "temporal": 3.0}
    model = build(Config.make({**options, **changes}), texts.vocabulary)
    masks = []

    def keep(values, p):
        mask = (torch.rand(values.shape) >= p).double() / (1 - p)
        masks.append((p, mask))
        return values * mask

    monkeypatch.setattr("openrnn.lm.word_model.dropout", keep)
    x = torch.randint(9, (7, 3))
    logits, _, penalty = model(x)
    (rows, inside, first, between, second, outside) = masks
    assert [p for p, _ in masks] == [0.1, 0.2, 0.5, 0.3, 0.5, 0.4]
    assert rows[1].shape == (9, 1)
    assert inside[1].shape == (1, 3, 6)
    assert between[1].shape == (1, 3, 12)
    z = model.embedding(x) * rows[1][x] * inside[1]
    for stack, weights, above in zip(model.stacks, (first, second), (between, outside)):
        with torch.no_grad():
            stack.weight_hh_l0 *= weights[1]
        y, _ = stack(z)
        z = y * above[1]
    torch.testing.assert_close(logits, model.scores(z))
    changes = (y[1:] - y[:-1]).square().mean()
    torch.testing.assert_close(penalty, 2 * z.square().mean() + 3 * changes, check_dtype=False)


def test_every_regulariser_reaches_the_gradient_and_not_the_loss(texts):
    run = start(texts, **NONE, activation=1e4, temporal=1e4)
    plain = start(texts, **NONE)
    heavy, light = run.learn(), plain.learn()
    assert heavy.loss.item() == pytest.approx(light.loss.item(), rel=1e-5)
    assert heavy.norm > 10 * light.norm


def test_it_learns(tmp_path):
    (tmp_path / "x").write_text("to be or not to be that is the question\n" * 120)
    texts = words.read(str(tmp_path / "x"))
    run = start(texts, steps=150, hidden=24, embed=24, layers=1, **NONE)
    assert train(run, tmp_path / "c", QUIET) == 0
    scores = evaluate.score(run)
    assert scores.model < 1.3
    assert scores.baselines["unigram"] > 6
    assert scores.test == pytest.approx(scores.model, rel=0.2)
    text = "".join(sample(run.model.eval(), b"to be or", 9, 0.0, 0))
    assert text == "to be or not to be that is the question\nto"
    text = "".join(sample(run.model, b"be\n", 2, 0.0, 0))
    assert text.startswith("be\nto")


# the rate


def test_a_pass_without_progress_cuts_the_rate(texts, tmp_path, monkeypatch):
    plateau = Plateau()
    shares = []
    for nats in (5.0, 4.0, 4.0, 3.9, 4.5):
        plateau.judge(nats)
        shares.append(plateau.share)
    assert shares == [1, 1, 0.25, 0.25, 0.0625]
    assert plateau.best == 3.9
    monkeypatch.setattr("openrnn.lm.train.GLANCES", 0)
    losses = iter([5.0, 6.0])
    monkeypatch.setattr(evaluate, "nats", lambda *_: next(losses))
    run = start(texts, lr=8.0, steps=2 * 18 + 1)
    assert run.reader.chunks == 18
    train(run, tmp_path / "c", QUIET)
    assert run.plateau == Plateau(5.0, 1)
    assert run.learn().lr == 2.0


# checkpoints


@pytest.mark.parametrize("cell", thinned(["lstm", "gru"], 2))
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, texts, cell):
    """46 steps over two passes at once, or 20, and 26 in a new process in effect."""
    changes = {**HEAVY, "cell": cell, "lr": 5.0}
    train(start(texts, steps=46, **changes), tmp_path / "once", QUIET)
    first = start(texts, steps=20, **changes)
    train(first, tmp_path / "parts", QUIET)
    tensors, record = checkpoint.read(tmp_path / "parts")
    assert tensors["vocabulary"].numpy().tobytes().decode().split("\n")[2] == "the"
    record = Record.parse(record)
    assert record.plateau == first.plateau
    assert record.plateau.best is not None
    torch.manual_seed(12345)
    second = TrainingRun(record.config.resumed({"steps": 46}), texts, ALONE)
    second.restore(tensors, record)
    train(second, tmp_path / "parts", QUIET)
    (a, one), (b, two) = (checkpoint.read(tmp_path / name) for name in ("once", "parts"))
    assert (a.keys(), [name for name in a if not a[name].equal(b[name])]) == (b.keys(), [])
    same = ("config", "step", "epoch", "chunk", "best", "cuts", "corpus")
    assert [one[name] for name in same] == [two[name] for name in same]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"<unk>\n<eos>\n\xff", "not UTF-8 text"),
        (b"<unk>\n<eos>", "have another word"),
        (b"a\nb\nc", "must begin with <unk>"),
        (b"<unk>\n<eos>\na\na", "a word twice"),
        (b"<unk>\n<eos>\na b", "with blanks"),
        (b"<unk>\n<eos>\n\n", "a word twice, or one with blanks"),
    ],
)
def test_a_vocabulary_that_no_run_leaves(text, says):
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=says):
        vocabulary.of_tensors({"vocabulary": tensor})
    for wrong, what in ((tensor.view(1, -1), "one dimension"), (tensor.int(), "dtype uint8")):
        with pytest.raises(CheckpointError, match=what):
            vocabulary.of_tensors({"vocabulary": wrong})
    with pytest.raises(CheckpointError, match="lacks the tensor vocabulary"):
        vocabulary.of_tensors({})


def test_what_a_checkpoint_of_words_says_is_compared(texts, tmp_path):
    run = start(texts, steps=2)
    train(run, tmp_path / "x", QUIET)
    tensors, record = checkpoint.read(tmp_path / "x")
    for field in ("best", "cuts"):
        for wrong in ("x", -1, math.nan, True, [1]):
            with pytest.raises(CheckpointError, match=f"its {field} must be"):
                Record.parse({**record, field: wrong})
    longer = vocabulary.as_tensor((*texts.vocabulary, "more"))
    shape = r"embedding.weight must have shape \(10, 6\)"
    with pytest.raises(CheckpointError, match=shape):
        start(texts).restore({**tensors, "vocabulary": longer}, Record.parse(record))
    bytes_ = replace(run.config, **dict.fromkeys(HEAVY, 0.0), tied=False, task="bytes")
    with pytest.raises(CheckpointError, match=r"embedding.weight must have shape \(256, 6\)"):
        check_model(bytes_, tensors)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dropout_weight": 1.5}, "dropout_weight must be a probability"),
        ({"temporal": -1.0}, "temporal must be a number, 0 or greater"),
        ({"vocabulary": 2}, "vocabulary must be from 3"),
        ({"task": "letters"}, "task must be one of bytes, words, got 'letters'"),
        ({"task": "bytes", "tied": True}, "tied is an option of task words"),
        ({"model": "torch", "backend": "auto", "dropout_weight": 0.5}, "no weight dropout"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be(changes, says):
    with pytest.raises(ValueError, match=says):
        Config.make({**TINY, **changes})


# the commands


@pytest.mark.parametrize("model", ["openrnn", "torch"])
def test_train_and_sample(folder, tmp_path, capsys, model):
    out = str(tmp_path / "run")
    tiny = "--hidden 8 --embed 6 --bptt 8 --batch 4 --steps 4 --device cpu".split()
    arguments = ["train", "--task", "words", *tiny, "--corpus", str(folder), "--out", out]
    assert cli.main([*arguments, "--model", model]) == 0
    printed = capsys.readouterr()
    assert "600 words to train on, 36 held out, 3 files, 9 different words" in printed.err
    assert "perplexity of 36 held-out words" in printed.out
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert set(scores) == {"steps", "perplexity", "test_perplexity", "words_per_s", "backend"}
    assert cli.main(["train", "--resume", out, "--steps", "5", "--quiet"]) == 0
    says = ["train", "--resume", out, "--dropout-input", "0.5"]
    assert cli.main(says) == 2
    assert "has --dropout-input 0.2, got --dropout-input 0.5" in capsys.readouterr().err
    assert cli.main(["sample", out, "--prompt", "the cat", "--length", "5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("the cat")
    assert set(text.split()) <= set(texts_of(folder))
    events = list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert events


def texts_of(folder):
    return words.read(str(folder)).vocabulary


@pytest.mark.slow
def test_no_field_or_tensor_of_a_checkpoint_is_believed(folder, tmp_path):
    """Every field of words set to odd values, every tensor to others: one sentence, or it runs."""
    out = tmp_path / "run"
    tiny = "--hidden 8 --embed 6 --bptt 8 --batch 4 --steps 2 --device cpu --quiet".split()
    words_ = ["--task", "words", "--backend", "reference", "--corpus", str(folder)]
    assert cli.main(["train", *words_, *tiny, "--out", str(out)]) == 0
    tensors, record = checkpoint.read(checkpoint.path_in(out))
    for field in (*OF_WORDS, "task", "dropout"):
        for odd in ODD:
            config = {**record["config"], field: odd}
            ends_well(tmp_path, sealed(tensors, {**record, "config": config}))
    for field in ("best", "cuts"):
        for odd in ODD:
            ends_well(tmp_path, sealed(tensors, {**record, field: odd}))
        less = {name: value for name, value in record.items() if name != field}
        ends_well(tmp_path, sealed(tensors, less), f"its record has no {field}")
    for name in ("model/embedding.weight", "model/output.bias", "state/0", "vocabulary"):
        for shape in ((0,), (1, 1), (tensors[name].numel() + 1,)):
            odd = torch.zeros(shape, dtype=tensors[name].dtype)
            ends_well(tmp_path, sealed({**tensors, name: odd}, record), "checkpoint")
        less = {other: tensor for other, tensor in tensors.items() if other != name}
        ends_well(tmp_path, sealed(less, record), f"it lacks the tensor {name}")
