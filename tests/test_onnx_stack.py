"""`openrnn convert` of ONNX files: one node, stacks of nodes, and nodes that are none."""

import io
import sys
import warnings

import numpy as np
import pytest
import torch
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


class First(nn.Module):
    """A layer's output alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def by_hand(*layers, between=()):
    """A node for each layer, the directions of Y squeezed away; then what stands between."""
    make, weights, nodes, x = onnx.helper.make_node, {"axis": np.array([1])}, [], "X"
    weights |= {"last": np.array(-1), "first": np.array([0])}
    for place, layer in enumerate(layers):
        arrays = openrnn.to_weights(layer, "onnx")
        weights |= {f"{name}{place}": array for name, array in arrays.items()}
        options = {"linear_before_reset": 1} if layer.cell.key == "gru" else {}
        direction = "reverse" if layer.spec.reverse else "forward"
        nodes.append(make(
            type(layer).__name__, [x, *(f"{name}{place}" for name in arrays)], [f"Y{place}"],
            name=f"part{place}", direction=direction, hidden_size=layer.hidden_size, **options,
        ))  # fmt: skip
        x = f"S{place}"
        nodes.append(make("Squeeze", [f"Y{place}", "axis"], [x]))
        for count, (operator, *more) in enumerate(between):
            nodes.append(make(operator, [x, *more], [f"M{place}{count}"]))
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
    model = by_hand(*layers, between=[("Relu",)])
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
    between = [("Gather", "last"), ("Unsqueeze", "first")]
    assert converted(tmp_path, by_hand(*OTHERS["sizes"][:1] * 2, between=between))[0] == 2
    assert "are no stack of one cell" in capsys.readouterr().err


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
    assert converted(tmp_path, by_hand(between=[("Relu",)]))[0] == 2
    assert "must have an LSTM, GRU or RNN node, got none" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "onnx", None)
    command = [str(tmp_path / "a.onnx"), str(tmp_path / "b.pt"), "--from", "onnx", "--to", "torch"]
    assert cli.main(["convert", *command]) == 2
    assert "is read by the package onnx, which is not here" in capsys.readouterr().err
