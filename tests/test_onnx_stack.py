"""`openrnn convert` of ONNX files: one node, stacks of nodes, and nodes that are none."""

import io
import sys
import warnings

import numpy as np
import pytest
import torch
from cases import First
from onnx_models import MARKS, export, onnx
from torch import nn

import openrnn
from openrnn import cli

pytestmark = MARKS


def converted(folder, model, *more, source="onnx", target="torch"):
    """The status of the command, and the tensors that it wrote."""
    onnx.save(getattr(model, "model_proto", model), folder / "a.onnx")
    out = folder / "b.pt"
    out.unlink(missing_ok=True)
    command = ["convert", str(folder / "a.onnx"), str(out), "--from", source, "--to", target]
    status = cli.main([*command, *more])
    return status, torch.load(out) if out.exists() else None


def exported(model):
    return export(model.eval(), {"x": torch.randn(5, 3, 4)}, None)


def older(model):
    """By the exporter that torch had before, of which most files in the world are."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop it
        torch.onnx.export(model.eval(), (torch.randn(5, 3, 4),), file, dynamo=False)
    return onnx.load_from_string(file.getvalue())


SQUEEZE = ("Squeeze", ["{x}", "axis"])
RELU = ("Relu", ["{x}"])
SWAP = ("Transpose", ["{x}"], {"perm": [1, 0, 2]})


def joined(*order, axis=-1):
    """The directions of Y side by side, as we write them: taken one by one, and put together."""
    parts = [("Gather", ["Y{n}", str(which)], {"axis": 1}) for which in order]
    names = [f"M{{n}}{place}" for place in range(len(order))]
    return [*parts, ("Concat", names, {"axis": axis})]


def by_hand(*layers, between=(SQUEEZE,), names=("part0", "part1")):
    """A node for each layer, and behind each what makes the next one's X of its Y.

    Of a node between: operator, inputs and attributes; {x} is the output before, {n} the layer.
    """
    make, nodes, x = onnx.helper.make_node, [], "X"
    weights = {"axis": np.array([1]), "first": np.array([0]), "last": np.array(-1)}
    weights |= {"0": np.array(0), "1": np.array(1), "ratio": np.array(0.5, np.float32)}
    weights |= {"training": np.array(True), "swapped": np.array([3, 5, -1]), "axis2": np.array([2])}
    weights |= {"low": np.array(-9, np.float32), "high": np.array(9, np.float32)}
    for place, layer in enumerate(layers):
        arrays = openrnn.to_weights(layer, "onnx")
        weights |= {f"{name}{place}": array for name, array in arrays.items()}
        options = {"linear_before_reset": 1} if layer.cell.key == "gru" else {}
        options |= {"layout": 1} if layer.batch_first else {}
        direction = "reverse" if layer.spec.reverse else "forward"
        direction = "bidirectional" if layer.spec.bidirectional else direction
        nodes.append(make(
            type(layer).__name__, [x, *(f"{name}{place}" for name in arrays)], [f"Y{place}"],
            name=names[place], direction=direction, hidden_size=layer.hidden_size, **options,
        ))  # fmt: skip
        x = f"Y{place}"
        for count, (operator, inputs, *more) in enumerate(between):
            given = [name.format(x=x, n=place) for name in inputs]
            nodes.append(make(operator, given, [f"M{place}{count}"], **dict(*more)))
            x = f"M{place}{count}"
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "some", [value("X", onnx.TensorProto.FLOAT, [5, 3, 4])],
        [value(x, onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)])


SLOW = pytest.mark.slow
STACKS = {
    "ours": lambda: openrnn.LSTM(4, 6, 2, bidirectional=True),
    "ours, batch first": lambda: openrnn.GRU(4, 6, 3, batch_first=True),
    "torch": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "torch's older": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "torch's older, batch first": lambda: nn.GRU(4, 6, 2, batch_first=True),
}
KINDS = [pytest.param(name, marks=SLOW if "first" in name else ()) for name in STACKS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_comes_back(tmp_path, kind):
    """Nodes of several layers, as exporters write them, with the numbers that they had."""
    torch.manual_seed(0)
    layer = STACKS[kind]()
    write = older if "older" in kind else exported
    status, made = converted(tmp_path, write(First(layer)))
    assert status == 0
    assert made.keys() == layer.state_dict().keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in layer.state_dict().items())


def test_one_node_of_several_is_chosen(tmp_path, capsys):
    """Layers of a model with something between are no stack, whatever their sizes."""
    layers = [openrnn.GRU(4, 4), openrnn.GRU(4, 4)]
    model = by_hand(*layers, between=[SQUEEZE, RELU])
    assert converted(tmp_path, model) == (2, None)
    says = "no stack of one cell, in which each reads what the one before gives: choose one by "
    assert f"{says}--prefix: part0, part1" in capsys.readouterr().err
    for place, layer in enumerate(layers):
        status, made = converted(tmp_path, model, "--prefix", f"part{place}")
        assert status == 0
        assert torch.equal(made["weight_hh_l0"], layer.weight_hh_l0)
    assert converted(tmp_path, model, "--prefix", "none")[0] == 2
    assert "no node has a name that begins with 'none': part0, " in capsys.readouterr().err


OTHERS = {
    "cells": (openrnn.GRU(4, 4), openrnn.LSTM(4, 4)),
    "directions": (openrnn.GRU(4, 4), openrnn.GRU(4, 4, reverse=True)),
    "sizes": (openrnn.GRU(4, 4), openrnn.GRU(4, 5)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_of_several_kinds_are_no_stack(tmp_path, capsys, kind):
    assert converted(tmp_path, by_hand(*OTHERS[kind]))[0] == 2
    assert "are no stack of one cell" in capsys.readouterr().err


def test_a_decoder_is_no_second_layer(tmp_path, capsys):
    """It begins from the last output of the node before, with the same sizes."""
    between = [SQUEEZE, ("Gather", ["{x}", "last"]), ("Unsqueeze", ["{x}", "first"])]
    assert converted(tmp_path, by_hand(*OTHERS["sizes"][:1] * 2, between=between))[0] == 2
    assert "are no stack of one cell" in capsys.readouterr().err


def both():
    """Two layers whose nodes have both directions."""
    return [openrnn.GRU(4, 4, bidirectional=True), openrnn.GRU(8, 4, bidirectional=True)]


def forward(*batch_first):
    return [openrnn.GRU(4, 4, batch_first=first) for first in batch_first]


LAYOUT_1 = ("Squeeze", ["{x}", "axis2"])
STACKED = {
    "directions in order": (both, joined(0, 1)),
    "directions by the last axis": (both, joined(0, 1, axis=2)),
    "two swaps": (lambda: forward(False, False), [SQUEEZE, SWAP, SWAP]),
    "layout 1": (lambda: forward(True, True), [LAYOUT_1]),
    "dropout": (lambda: forward(False, False), [SQUEEZE, ("Dropout", ["{x}"])]),
    "dropout in training": (
        lambda: forward(False, False), [SQUEEZE, ("Dropout", ["{x}", "ratio", "training"])]
    ),
}  # fmt: skip
APART = {
    "over the batch": (lambda: forward(False, False), [SQUEEZE, SWAP]),
    "by a view": (lambda: forward(False, False), [SQUEEZE, ("Reshape", ["{x}", "swapped"])]),
    "layout 1 after 0": (lambda: forward(False, True), [SQUEEZE]),
    "layout 1 after 0, moved": (lambda: forward(False, True), [SQUEEZE, SWAP]),
    "directions in turn": (both, joined(1, 0)),
    "one direction twice": (both, joined(0, 0)),
    "directions one after the other": (both, joined(0, 1, axis=0)),
    "relu": (lambda: forward(False, False), [SQUEEZE, RELU]),
    "a bound": (lambda: forward(False, False), [SQUEEZE, ("Clip", ["{x}", "low", "high"])]),
    "the model's input": (lambda: forward(False, False), [SQUEEZE, ("Add", ["{x}", "X"])]),
}


@pytest.mark.parametrize("kind", STACKED)
def test_what_stands_between_the_nodes_of_a_stack(tmp_path, kind):
    make, between = STACKED[kind]
    status, made = converted(tmp_path, by_hand(*make(), between=between))
    assert status == 0
    assert "weight_ih_l1" in made


@pytest.mark.parametrize("kind", APART)
def test_what_stands_between_nodes_that_are_no_stack(tmp_path, capsys, kind):
    make, between = APART[kind]
    assert converted(tmp_path, by_hand(*make(), between=between)) == (2, None)
    assert "are no stack of one cell" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [(5, 3), (3, 5)])
def test_a_view_with_the_sizes_of_the_model(tmp_path, sizes):
    """Where T and B are numbers, as in many files; with these in turn it is no stack."""
    model = by_hand(*forward(False, False), between=[SQUEEZE, ("Reshape", ["{x}", "swapped"])])
    value = onnx.helper.make_tensor_value_info(
        "Y0", onnx.TensorProto.FLOAT, [sizes[0], 1, sizes[1], 4]
    )
    model.graph.value_info.append(value)
    assert converted(tmp_path, model)[0] == (0 if sizes == (3, 5) else 2)


def test_the_name_of_a_node_may_begin_that_of_another(tmp_path):
    """Keras names layers so."""
    layers = [openrnn.LSTM(4, 4), openrnn.LSTM(4, 4)]
    model = by_hand(*layers, names=("LSTM", "LSTM_1"))
    for name, layer in zip(("LSTM", "LSTM_1"), layers):
        status, made = converted(tmp_path, model, "--prefix", name)
        assert status == 0
        assert made.keys() == layer.state_dict().keys()
        assert torch.equal(made["weight_hh_l0"], layer.weight_hh_l0)
    assert "weight_hh_l1" in converted(tmp_path, model, "--prefix", "LST")[1]


def test_a_reverse_stack(tmp_path, capsys):
    """Which torch does not have."""
    layers = [openrnn.LSTM(4, 4, reverse=True) for _ in range(2)]
    status, made = converted(tmp_path, by_hand(*layers), target="openrnn")
    assert status == 0
    for place, layer in enumerate(layers):
        for name, tensor in layer.state_dict().items():
            assert torch.equal(made[name.replace("l0", f"l{place}")], tensor)
    assert "reverse=True" in capsys.readouterr().out
    assert converted(tmp_path, by_hand(*layers))[0] == 2
    assert "reverse" in capsys.readouterr().err


def test_what_is_refused(tmp_path, capsys, monkeypatch):
    model = by_hand(openrnn.RNN(4, 5))
    assert converted(tmp_path, model, source="keras")[0] == 2
    assert "--from must be onnx, got keras" in capsys.readouterr().err
    for more in ("--cell rnn_relu", "--no-bidirectional", "--layers 2"):
        assert converted(tmp_path, model, *more.split())[0] == 2
        assert "follow from nodes: leave them out" in capsys.readouterr().err
    assert converted(tmp_path, by_hand())[0] == 2
    assert "must have an LSTM, GRU or RNN node, got none" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "onnx", None)
    command = [str(tmp_path / "a.onnx"), str(tmp_path / "b.pt"), "--from", "onnx", "--to", "torch"]
    assert cli.main(["convert", *command]) == 2
    assert "is read by the package onnx, which is not here" in capsys.readouterr().err
