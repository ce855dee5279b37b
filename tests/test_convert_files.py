"""Weights in files, and `openrnn convert`."""

import json
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import openrnn
from openrnn import cli
from openrnn.convert import files, keras
from openrnn.convert.arrays import ordered

DATA = Path(__file__).with_name("data") / "convert"


def weights():
    return {name: tensor.detach() for name, tensor in torch.nn.GRU(3, 4, 2).state_dict().items()}


def as_npz(path, tensors):
    np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})


def as_checkpoint(path, tensors):
    """As trainers save one: a model's tensors beside much else."""
    torch.save({"epoch": 3, "model": tensors, "notes": ["one"]}, path)


def read(path):
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


@pytest.mark.parametrize(
    ("ending", "write"),
    [(".safetensors", lambda path, tensors: save_file(tensors, path)), (".npz", as_npz),
     (".pt", lambda path, tensors: torch.save(tensors, path)), (".pth", as_checkpoint)],
)  # fmt: skip
def test_the_command_converts_files_both_ways(tmp_path, capsys, ending, write):
    given = weights()
    write(tmp_path / f"a{ending}", given)
    there = tmp_path / f"b{ending}"
    command = ["convert", str(tmp_path / f"a{ending}"), str(there)]
    assert cli.main([*command, "--from", "torch", "--to", "keras"]) == 0
    assert capsys.readouterr().out == (f"GRU(3, 4, num_layers=2): 6 arrays of keras in {there}\n")
    kernel = read(there)["layer1/kernel"]
    gates = [given["weight_ih_l1"][rows].T for rows in (slice(4, 8), slice(0, 4), slice(8, 12))]
    assert torch.equal(kernel, torch.cat(gates, dim=1))
    back = tmp_path / f"c{ending}"
    assert cli.main(["convert", str(there), str(back), "--from", "keras", "--to", "torch"]) == 0
    made = read(back)
    assert made.keys() == given.keys()
    assert all(torch.equal(made[name], given[name]) for name in given)


def test_bfloat16_in_files(tmp_path):
    given = {name: tensor.bfloat16() for name, tensor in weights().items()}
    files.write(tmp_path / "a.safetensors", given)
    found, said = files.read(tmp_path / "a.safetensors")
    assert said == (None, False)
    assert all(torch.equal(found[name], given[name]) for name in given)


def test_options_of_the_command(tmp_path, capsys):
    layer = openrnn.LSTM(3, 4, 2, bidirectional=True)
    buffer = openrnn.params.pack(layer.spec, [*layer.parameters()]).detach()
    save_file({"params": buffer}, tmp_path / "a.safetensors")
    sizes = "--cell lstm --hidden 4 --layers 2 --bidirectional".split()
    command = ["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    assert cli.main([*command, "--from", "cudnn", "--to", "torch", *sizes]) == 0
    made = load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(made[name], tensor) for name, tensor in layer.state_dict().items())
    capsys.readouterr()
    assert cli.main([*command, "--from", "cudnn", "--to", "keras", *sizes]) == 2
    assert "--sum-biases writes their sum" in capsys.readouterr().err
    assert cli.main([*command, "--from", "cudnn", "--to", "keras", *sizes, "--sum-biases"]) == 0


def test_names_of_a_file_must_say_the_order_of_layers(tmp_path, capsys):
    """A file is no sequence: its layers `second` and `first` would be taken by the alphabet."""
    made = openrnn.to_weights(openrnn.LSTM(4, 4, bias_mode="input"), "keras")
    given = {f"{name}/{key}": torch.tensor(array) for name in ("second", "first")
             for key, array in made.items()}  # fmt: skip
    save_file(given, tmp_path / "a.safetensors")
    command = ["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.npz")]
    command += ["--from", "keras", "--to", "torch", "--no-bidirectional"]
    assert cli.main(command) == 2
    assert "do not say which layer is before which" in capsys.readouterr().err
    assert cli.main([*command, "--prefix", "second"]) == 0
    assert openrnn.from_weights(given, "keras", bidirectional=False).num_layers == 2


@pytest.mark.parametrize(
    ("given", "out", "more", "text"),
    [
        ("a.npz", "b.npz", "--from torch --to caffe", "--to must be one of openrnn, torch, "),
        ("a.npz", "b.onnx", "--from torch --to keras", "b.onnx must end in one of .safetensors, "),
        ("a.bin", "b.npz", "--from torch --to keras", "a.bin must end in one of .safetensors, "),
        ("a.onx", "b.npz", "--from onnx --to torch", ".pth, .h5, .hdf5, .keras, .onnx\n"),
        ("none.npz", "b.npz", "--from torch --to keras", "none.npz: No such file or directory"),
        ("bad.npz", "b.npz", "--from torch --to keras", "bad.npz cannot be read as a file of"),
        ("bad.pt", "b.npz", "--from torch --to keras", "bad.pt cannot be read by torch.load"),
        ("bad.safetensors", "b.npz", "--from torch --to keras",
         "bad.safetensors cannot be read as a safetensors file"),
        ("bad.keras", "b.npz", "--from keras --to torch", "bad.keras cannot be read as a model"),
        ("words.npz", "b.npz", "--from torch --to keras", "words.npz cannot be read as a file"),
        ("one.npz", "b.npz", "--from torch --to keras", "one.npz cannot be read as a file of"),
        ("deep.keras", "b.npz", "--from keras --to torch", "it is nested too deeply"),
        ("a.npz", "b.npz", "--from torch --to keras --layers 2", "--hidden, --layers and --"),
        ("a.npz", "b.npz", "--from torch --to keras --prefix x", "begins with 'x'"),
        ("a.npz", "b.npz", "--from torch --to xlstm", "xlstm has no cell 'gru', it has slstm"),
    ],
)  # fmt: skip
def test_what_the_command_refuses(tmp_path, capsys, given, out, more, text):
    as_npz(tmp_path / "a.npz", weights())
    for name in ("bad.npz", "bad.pt", "bad.safetensors", "bad.keras"):
        (tmp_path / name).write_bytes(b"not what its name says")
    np.savez(tmp_path / "words.npz", a=np.array(["words"]))
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.ones(3))
    with zipfile.ZipFile(tmp_path / "deep.keras", "w") as archive:
        archive.writestr("model.weights.h5", b"")
        archive.writestr("config.json", "[" * 100_000 + "]" * 100_000)
    command = ["convert", str(tmp_path / given), str(tmp_path / out), *more.split()]
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert re.search(re.escape(text), said)
    assert said.count("\n") == 1
    assert not (tmp_path / out).exists()


def test_refusals_name_options_and_leave_paths_as_they_are(tmp_path, capsys):
    folder = tmp_path / "cell=gru, prefix="
    folder.mkdir()

    def refusal(tensors, more, name="a.npz"):
        as_npz(folder / "a.npz", tensors)
        command = ["convert", str(folder / name), str(tmp_path / "b.npz"), *more.split()]
        assert cli.main(command) == 2
        return capsys.readouterr().err

    assert f"{folder}/none.npz" in refusal(weights(), "--from torch --to keras", "none.npz")
    two = {f"{name}=cell=/{key}": w for name in "ab" for key, w in weights().items()}
    says = "choose one by --prefix: 'a=cell=/', 'b=cell=/'"
    assert says in refusal(two, "--from torch --to keras --cell gru")
    says = "--hidden, --layers and --proj follow from the shapes of torch's arrays"
    assert says in refusal(weights(), "--from torch --to keras --layers 2")
    says = "needs --cell, --hidden and, where not 1, --layers and --bidirectional or"
    assert says in refusal({"params": torch.ones(9)}, "--from cudnn --to keras")
    square = {"kernel": torch.ones(4, 12), "recurrent_kernel": torch.ones(4, 12)}
    deep = {f"layer_{n}/{key}": w for n in range(2) for key, w in square.items()}
    says = "layers or directions: say which by --bidirectional or --no-bidirectional"
    assert says in refusal(deep, "--from keras --to torch --cell gru")
    assert says in refusal(deep, "--from keras --to torch")


def test_code_in_a_checkpoint_does_not_run(tmp_path, capsys):
    class Hostile:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    torch.save({"weight_ih_l0": Hostile()}, tmp_path / "a.pt")
    command = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.npz")]
    assert cli.main([*command, "--from", "torch", "--to", "keras"]) == 2
    assert "cannot be read by torch.load(weights_only=True)" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_keras_model(tmp_path, capsys):
    """The file that Keras saved, whole and its weights alone; a cell of its own is left out."""
    pytest.importorskip("h5py", reason="h5py reads these files; the extra hdf5 has it")
    model = DATA / "gru_both.keras"
    alone = tmp_path / "model.weights.h5"
    with zipfile.ZipFile(model) as archive:
        alone.write_bytes(archive.read("model.weights.h5"))
    want = {
        name.removeprefix("gru_both:w:"): tensor
        for name, tensor in load_file(DATA / "keras.safetensors").items()
        if name.startswith("gru_both:w:")
    }
    layer = openrnn.from_weights(ordered(want), "keras")
    for given in (model, alone):
        command = [
            "convert",
            str(given),
            str(tmp_path / "b.pt"),
            "--from",
            "keras",
            "--to",
            "torch",
        ]
        assert cli.main(command) == 0
        made = torch.load(tmp_path / "b.pt")
        assert all(torch.equal(made[name], tensor) for name, tensor in layer.state_dict().items())


def test_without_h5py(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    command = ["convert", str(DATA / "gru_both.keras"), str(tmp_path / "b.pt")]
    assert cli.main([*command, "--from", "keras", "--to", "torch"]) == 2
    assert "is read by the package h5py, which is not here" in capsys.readouterr().err


def config(kind, **own):
    return {"class_name": kind, "config": {"name": "a", **own}}


def test_what_a_keras_model_says_of_its_layers():
    with zipfile.ZipFile(DATA / "gru_both.keras") as archive:
        real = json.loads(archive.read("config.json"))
    assert keras.said(real) == ("gru", False)
    assert keras.said([config("GRU", reset_after=False)]) == ("gru_reset_before", False)
    assert keras.said({"layers": [config("SimpleRNN", activation="relu")]}) == ("rnn_relu", False)
    assert keras.said([config("LSTM"), config("GRU")]) == (None, False)
    assert keras.said([config("Dense")]) == (None, False)
    assert keras.said([config("LSTM", go_backwards=True)]) == ("lstm", True)


@pytest.mark.parametrize("second", [True, False])
def test_keras_layers_of_which_one_runs_backwards_are_no_stack(second):
    """After a layer that runs backwards, a second that does so runs forward in original time."""
    layers = [config("LSTM", go_backwards=True), config("LSTM", go_backwards=second)]
    with pytest.raises(ValueError, match="one of several recurrent layers has go_backwards=True"):
        keras.said({"layers": layers})


def test_a_keras_model_that_runs_backwards(tmp_path, capsys):
    """Its file says go_backwards, which is a reverse layer; torch has none."""
    h5py = pytest.importorskip("h5py", reason="h5py reads these files; the extra hdf5 has it")
    layer = openrnn.LSTM(3, 4, reverse=True, bias_mode="input")
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        for place, array in enumerate(openrnn.to_weights(layer, "keras").values()):
            file[f"layers/lstm/cell/vars/{place}"] = array
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.write(tmp_path / "weights.h5", "model.weights.h5")
        archive.writestr("config.json", json.dumps([config("LSTM", go_backwards=True)]))
    command = ["convert", str(tmp_path / "a.keras"), str(tmp_path / "b.pt"), "--from", "keras"]
    assert cli.main([*command, "--to", "openrnn"]) == 0
    assert "reverse=True" in capsys.readouterr().out
    made = torch.load(tmp_path / "b.pt")
    assert all(torch.equal(made[name], tensor) for name, tensor in layer.state_dict().items())
    assert cli.main([*command, "--to", "torch"]) == 2
    assert "reverse" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (
            config("Bidirectional", layer=config("LSTM", go_backwards=True)),
            "LSTM a has go_backwards=True inside a Bidirectional",
        ),
        (config("LSTM", activation="relu"), "LSTM a has activation='relu', ours only 'tanh'"),
        (config("GRU", recurrent_activation="hard_sigmoid"), "recurrent_activation='hard_sigmoid'"),
        (config("SimpleRNN", activation="gelu"), "ours only 'tanh' or 'relu'"),
        (config("Bidirectional", merge_mode="sum", layer=config("LSTM")), "merge_mode='sum'"),
        (config("Bidirectional", layer=config("LSTM", activation="relu")), "activation='relu'"),
    ],
)
def test_keras_layers_that_compute_something_else(layer, text):
    with pytest.raises(ValueError, match=text):
        keras.said({"config": {"layers": [config("Dense"), layer]}})
