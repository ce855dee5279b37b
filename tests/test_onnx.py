"""ONNX out: every cell and option of a call, run by ONNX Runtime beside ours."""

import pytest
import torch
from cases import CELLS, CLIP
from onnx_models import MARKS, assert_close, both, kinds
from torch import nn

import openrnn

pytestmark = MARKS


@openrnn.cell(gates="a b", states="h k", params="p_a", name="own")
def own(x, r, s, p):
    """Passes a state on as it is, branches, and has a vector."""
    k = torch.where(x.a > r.a, torch.erf(x.b + p.p_a), torch.nn.functional.softplus(r.b) - s.k)
    return torch.tanh(k), s.h


def cell_part(cell, both_ways=True):
    """Lengths and initial states, in both directions or forward."""
    states = len(cell.states)

    def call(layer, x, lengths, h, c, **_):
        given = (h, c, h, c)[:states]
        return layer(x, given if both_ways else [one[:1] for one in given], lengths=lengths)

    return lambda: openrnn.Recurrent(cell, 4, 4, bidirectional=both_ways), call


NODES_OF_ONNX = {
    "lstm", "peephole_lstm", "coupled_lstm", "gru", "gru_reset_before", "rnn_tanh", "rnn_relu",
}  # fmt: skip
EVERY_CELL = {name: cell_part(cell) for name, cell in CELLS.items()}
# a node has both directions, of a Scan each is one more: SCANS has them
EACH_CELL = {name: cell_part(cell, name in NODES_OF_ONNX) for name, cell in CELLS.items()}


# onnxscript's optimiser takes a third of the time of an export: test_optimised has it
@pytest.fixture(scope="module")
def cells_run(one_thread):
    return both(EACH_CELL, optimize=False)


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell(cells_run, cell):
    """Lengths, 0 among them, nan in the padding, initial states; nodes in both directions."""
    _, found, wanted = cells_run
    assert_close(found[cell], wanted[cell])


def test_which_cells_are_nodes(cells_run):
    """A node for both directions of the seven that ONNX has, else a Scan."""
    counts = kinds(cells_run[0])
    assert {kind: counts[kind] for kind in ("LSTM", "GRU", "RNN", "Scan", "Loop")} == {
        "LSTM": 3, "GRU": 2, "RNN": 2, "Scan": len(CELLS) - 7, "Loop": 0,
    }  # fmt: skip


def plain(layer, x, **_):
    return layer(x)


def layers(make, **options):
    return lambda: make(4, 4, **options)


def biased(make, modes):
    return {f"{make.__name__}-{mode}": (layers(make, bias_mode=mode), plain) for mode in modes}


# an export takes most of a second for each of its parts: those of `MORE_NODES` are variants
NODES = {
    **biased(openrnn.LSTM, ["none"]),
    **biased(openrnn.GRU, ["recurrent"]),
    "deep": (
        layers(openrnn.LSTM, num_layers=2, bidirectional=True, dropout=0.5),
        lambda layer, x, lengths, h, c, **_: layer(
            x, (torch.cat([h, 2 * h]), torch.cat([c, -c])), lengths=lengths
        ),
    ),
    "reverse": (
        layers(openrnn.LSTM, num_layers=2, reverse=True),
        lambda layer, x, lengths, h, c, **_: layer(x, (h, c), lengths=lengths),
    ),
    "skip": (layers(openrnn.LSTM, input_mode="skip", num_layers=2), plain),
    "skip-coupled": (
        lambda: openrnn.Recurrent(openrnn.cells.coupled_lstm, 4, 4, input_mode="skip"),
        plain,
    ),
    "batch-first": (
        layers(openrnn.GRU, batch_first=True, bidirectional=True),
        lambda layer, x, lengths, **_: layer(x.transpose(0, 1), lengths=lengths),
    ),
    "unbatched": (layers(openrnn.GRU, num_layers=2), lambda layer, x, **_: layer(x[:, 0])),
    "all-states": (
        layers(openrnn.GRU, num_layers=2, bidirectional=True),
        lambda layer, x, lengths, **_: layer(x, lengths=lengths, return_states=True),
    ),
    "padding-value": (
        layers(openrnn.LSTM),
        lambda layer, x, lengths, **_: layer(x, lengths=lengths, padding_value=2.5),
    ),
    "inside": (
        lambda: nn.ModuleList([nn.Embedding(9, 4), openrnn.LSTM(4, 4), nn.Linear(4, 2)]),
        lambda parts, lengths, **_: parts[2](parts[1](parts[0](lengths[:, None] % 9))[0]),
    ),
    "LSTMCell": (layers(openrnn.LSTMCell), lambda cell, x, h, c, **_: cell(x[0], (h[0], c[0]))),
    "RNNCell": (layers(openrnn.RNNCell), lambda cell, x, h, **_: cell(x[0, 0], h[0, 0])),
}
MORE_NODES = {
    **biased(openrnn.LSTM, ["double", "input", "recurrent"]),
    **biased(openrnn.GRU, ["double", "input", "none"]),
    **biased(openrnn.RNN, ["double", "input", "recurrent", "none"]),
    "deep": (
        layers(openrnn.LSTM, num_layers=3, bidirectional=True, dropout=0.5),
        lambda layer, x, lengths, h, c, **_: layer(
            x, (torch.cat([h, 2 * h, -h]), torch.cat([c, -c, 2 * c])), lengths=lengths
        ),
    ),
    "GRUCell": (layers(openrnn.GRUCell), lambda cell, x, **_: cell(x[0])),
    "relu": (layers(openrnn.RNN, nonlinearity="relu", bidirectional=True), plain),
    **{f"{make.__name__}-deep": (layers(make, num_layers=3), plain)
       for make in (openrnn.LSTM, openrnn.GRU, openrnn.RNN)},
}  # fmt: skip


@pytest.fixture(scope="module")
def nodes_run(one_thread):
    return both(NODES, fill=False, optimize=False)


@pytest.mark.parametrize("part", NODES)
def test_nodes(nodes_run, part):
    _, found, wanted = nodes_run
    assert_close(found[part], wanted[part])


def test_nodes_are_nodes(nodes_run):
    assert not {"Scan", "Loop"} & kinds(nodes_run[0]).keys()


@pytest.mark.slow
def test_more_nodes():
    program, found, wanted = both(MORE_NODES, fill=False)
    for part in MORE_NODES:
        assert_close(found[part], wanted[part])
    assert not {"Scan", "Loop"} & kinds(program).keys()


def test_a_reverse_layer_is_a_node_of_that_direction(nodes_run):
    """Of all the parts one has it, and two layers."""
    found = [node.attributes.get("direction") for node in nodes_run[0].model.graph]
    assert [one.value for one in found if one is not None].count("reverse") == 2


def everything(layer, x, lengths, reset, h, c, **_):
    h, c = (state[: layer.spec.chains] for state in (h, c))
    width = layer.spec.output_size
    return layer(
        x, (h[..., :width], c), lengths=lengths, reset=reset,
        reset_state=(h[:, :1, :width] + 1, c[:, :1] + 2), return_states=True,
    )  # fmt: skip


# each direction of a layer is a Scan, whose export takes most of a second
SCANS = {
    "everything": (
        lambda: openrnn.LSTM(4, 4, proj_size=3, bidirectional=True, cell_clip=CLIP), everything,
    ),
    "reverse": (lambda: openrnn.LSTM(4, 4, num_layers=2, reverse=True), everything),
    "reset-before": (
        lambda: openrnn.Recurrent(openrnn.cells.gru_reset_before, 4, 4),
        lambda layer, x, reset, **_: layer(x, reset=reset),
    ),
    "own": (lambda: openrnn.Recurrent(own, 4, 4, input_mode="skip", bias_mode="input"), plain),
    "gates": (
        lambda: openrnn.GRU(12, 4, input_mode="gates"),
        lambda layer, x, lengths, **_: layer(torch.cat([x, 2 * x, -x], -1), lengths=lengths),
    ),
    "step": (
        lambda: openrnn.Recurrent(openrnn.cells.mgu, 4, 4),
        lambda layer, x, reset, h, **_: layer.step(x[0], (h[:1],), reset=reset[0]),
    ),
}  # fmt: skip
MORE_SCANS = {
    "peepholes": (
        lambda: openrnn.Recurrent(openrnn.cells.peephole_lstm, 4, 4, bidirectional=True),
        everything,
    ),
    "projection": (lambda: openrnn.LSTM(4, 5, proj_size=3, bidirectional=True), plain),
    "projection-forward": (lambda: openrnn.LSTM(4, 5, proj_size=3), plain),
    "clip-forward": (
        layers(openrnn.LSTM, cell_clip=CLIP),
        lambda layer, x, h, c, **_: layer(x, (h[:1], 9 * c[:1])),
    ),
    "gates-both": (
        lambda: openrnn.GRU(12, 4, input_mode="gates", bidirectional=True),
        lambda layer, x, lengths, **_: layer(torch.cat([x, 2 * x, -x], -1), lengths=lengths),
    ),
    "gates": (
        lambda: openrnn.GRU(12, 4, 2, input_mode="gates", bidirectional=True),
        lambda layer, x, lengths, **_: layer(torch.cat([x, 2 * x, -x], -1), lengths=lengths),
    ),
    "clip": (
        layers(openrnn.LSTM, cell_clip=CLIP, num_layers=2),
        lambda layer, x, h, c, **_: layer(x, (h, 9 * c)),
    ),
    "all-states": (
        layers(openrnn.LSTM, num_layers=2),
        lambda layer, x, lengths, **_: layer(x, lengths=lengths, return_states=True),
    ),
    "reset-before": (
        lambda: openrnn.Recurrent(openrnn.cells.gru_reset_before, 4, 4, bidirectional=True),
        lambda layer, x, reset, **_: layer(x, reset=reset),
    ),
}


@pytest.fixture(scope="module")
def scans_run(one_thread):
    return both(SCANS, fill=False, optimize=False)


@pytest.mark.parametrize("part", SCANS)
def test_scans(scans_run, part):
    _, found, wanted = scans_run
    assert_close(found[part], wanted[part])


def test_scans_are_scans(scans_run):
    assert not {"LSTM", "GRU", "RNN", "Loop"} & kinds(scans_run[0]).keys()


@pytest.mark.slow
@pytest.mark.parametrize("parts", [NODES, SCANS, EVERY_CELL], ids=["nodes", "scans", "cells"])
def test_optimised(parts):
    """As users export, by the default of torch; test_onnx_export.py has that in every landing."""
    program, found, wanted = both(parts, fill=parts is EVERY_CELL)
    for part in parts:
        assert_close(found[part], wanted[part])
    nodes = bool({"LSTM", "GRU", "RNN"} & kinds(program).keys())
    assert (nodes, "Scan" in kinds(program)) == (parts is not SCANS, parts is not NODES)


@pytest.mark.slow
def test_more_scans():
    _, found, wanted = both(MORE_SCANS, fill=False)
    for part in MORE_SCANS:
        assert_close(found[part], wanted[part])
