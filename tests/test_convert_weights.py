"""Weights of other libraries: their outputs from our layers, and every bit of them back.

`data/convert/*.safetensors` hold weights and outputs of the libraries themselves; `data/convert/make.py`
made them and names the versions.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from openrnn import from_weights, to_weights
from openrnn.convert.arrays import ordered
from openrnn.convert.libraries import LIBRARIES

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = Path(__file__).with_name("data") / "convert"
NAMES = {"tf_keras": "keras", "tensorflow": "tf_cell"}
CELLS = ("peephole_lstm", "gru_reset_before", "slstm", "lstm", "gru", "rnn_tanh", "rnn_relu")
FLAT = ("jax", "mxnet_fused")


def source_of(library, case):
    """Our name of the layout that a case has."""
    first = case.partition("_")[0]
    if library == "mxnet":
        return {"gluon": "gluon", "fused": "mxnet_fused", "cells": "mxnet"}[first]
    if first == "nnx":
        return "nnx_plain" if case.endswith("plain") else "nnx"
    return "xlstm_cuda" if case.startswith("slstm_cuda") else NAMES.get(library, library)


def cases():
    """(library, case) -> its arrays, and what its library computed."""
    found = {}
    for path in sorted(DATA.glob("*.safetensors")):
        tensors = load_file(path)
        x = tensors.pop("x")
        for key, tensor in tensors.items():
            case, kind, *name = key.split(":", 2)
            entry = found.setdefault((path.stem, case), {"x": x, "w": {}})
            if kind == "w":
                entry["w"][name[0]] = tensor
            else:
                entry[kind] = tensor
    return found


CASES = cases()
EVERY = pytest.mark.parametrize(("library", "case"), CASES, ids=["-".join(key) for key in CASES])


def options_of(library, case):
    """What a user has to say: the cell where shapes leave it open, and sizes of flat buffers."""
    made = {"cell": next((cell for cell in CELLS if cell in case), "lstm")}
    if source_of(library, case) in FLAT:
        both = case.endswith("both")
        layers = 2 if case in ("lstm_both", "fused_rnn_relu") else 1
        made |= {"hidden_size": 4, "num_layers": layers, "bidirectional": both}
    return made


def load(library, case):
    arrays = ordered(CASES[library, case]["w"])
    return from_weights(arrays, source_of(library, case), **options_of(library, case))


def same_bits(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second):
        assert np.asarray(one).shape == np.asarray(other).shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@EVERY
def test_outputs_are_those_of_the_library(library, case):
    entry = CASES[library, case]
    layer = load(library, case)
    lengths = torch.tensor([5, 3]) if case == "masked" else None
    y, state = layer(entry["x"], lengths=lengths)
    want = entry["y"]
    if lengths is not None:  # Keras goes on with the last output, ours is 0 there
        assert not y[3:, 1].any()
        y[3:, 1] = want[3:, 1]
    torch.testing.assert_close(y, want, rtol=0, atol=1e-6)
    for name, found in zip("hc", state):
        if name in entry:
            torch.testing.assert_close(found, entry[name], rtol=0, atol=1e-6)


@EVERY
def test_every_bit_comes_back(library, case):
    heads = int(case[-1]) if library in ("xlstm", "flashrnn") else 1
    made = to_weights(load(library, case), source_of(library, case), heads=heads)
    given = ordered(CASES[library, case]["w"])
    same_bits(given.values(), ordered(made).values())
    again = from_weights(made, source_of(library, case), **options_of(library, case))
    same_bits(load(library, case).state_dict().values(), again.state_dict().values())


def test_each_library_of_the_rows_is_tested():
    tested = {source_of(*key) for key in CASES}
    assert tested | {"openrnn", "torch", "cudnn", "tf_canonical", "haste"} == set(LIBRARIES)
