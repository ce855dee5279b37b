"""Sizes are ints and rates are numbers, wherever a network is described."""

import numpy as np
import pytest
import torch

import openrnn
from openrnn import ops


@pytest.mark.parametrize("odd", [True, 2.0, torch.tensor(2), "2", None], ids=repr)
def test_sizes_are_whole_numbers(odd):
    kind = type(odd).__name__
    for make in (
        lambda: openrnn.LSTM(3, odd),
        lambda: openrnn.RNNCell(3, odd),
        lambda: openrnn.GRU(odd, 3),
        lambda: openrnn.LSTM(3, 4, odd),
        lambda: openrnn.LSTM(3, 4, proj_size=odd),
    ):
        with pytest.raises(TypeError, match=f"_(size|layers) should be of type int, got: {kind}"):
            make()


def test_sizes_that_become_ints():
    layer = openrnn.LSTM(np.int64(3), np.int32(4), np.uint8(2), proj_size=np.int16(2))
    sizes = layer.input_size, layer.hidden_size, layer.num_layers, layer.proj_size
    assert sizes == (3, 4, 2, 2)
    assert {type(size) for size in sizes} == {int}
    assert layer.spec == openrnn.LSTM(3, 4, 2, proj_size=2).spec


@pytest.mark.parametrize("odd", [torch.tensor(0.5), float("nan"), True, "0.5"], ids=repr)
def test_dropout_is_a_number(odd):
    with pytest.raises(ValueError, match="dropout should be a number in range"):
        openrnn.LSTM(3, 4, 2, dropout=odd)


def test_sizes_of_operators_poison_no_cache():
    """`params_size` kept a tensor, which a later sum changed in place."""
    for odd in (torch.tensor(3), 3.0, True):
        with pytest.raises(TypeError, match="input_size must be a whole number"):
            ops.spec("lstm", odd, 4, num_layers=2)
    with pytest.raises(TypeError, match=r"num_layers must be a whole number, got 2.5"):
        ops.spec("lstm", 3, 4, num_layers=2.5)
    with pytest.raises(TypeError, match="dropout must be a number, got a Tensor"):
        ops.spec("lstm", 3, 4, dropout=torch.tensor(0.5))
    with pytest.raises(ValueError, match="cell_clip must be a number or a pair"):
        ops.spec("lstm", 3, 4, cell_clip=torch.tensor(0.5))
    spec = ops.spec("lstm", np.int64(3), np.int64(4), num_layers=np.int64(2))
    assert spec == ops.spec("lstm", 3, 4, num_layers=2)
    assert ops.params_size(spec) == 304
    assert type(ops.params_size(spec)) is int
