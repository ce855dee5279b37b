"""Parameters side by side in one buffer: they stay what they are to everybody who handles them."""

import copy
import io
import pickle

import pytest
import torch
from cases import require
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import openrnn
from openrnn import params
from openrnn.backends.cudnn import weights
from openrnn.nn import flat

on_gpu = pytest.mark.gpu
LAYERS = {
    "lstm": lambda **more: openrnn.LSTM(3, 8, 2, bidirectional=True, proj_size=5, **more),
    "gru": lambda **more: openrnn.GRU(4, 8, 2, **more),
    "one bias": lambda **more: openrnn.RNN(4, 8, bias_mode="recurrent", **more),
    "no input matrix": lambda **more: openrnn.LSTM(4, 4, bias=False, input_mode="skip", **more),
    "peepholes": lambda **more: openrnn.Recurrent(openrnn.cells.peephole_lstm, 4, 8, **more),
}


def is_flat(layer):
    """Whether cuDNN would read the parameters as they lie, in one storage."""
    found = layer.weights()
    offsets = weights._offsets(layer.spec, found[0].element_size())
    one = len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    return one and weights._adjacent(offsets, found) is not None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request, monkeypatch):
    """On a CPU, where no layer is flat, as if that were a CUDA device."""
    if request.param == "cuda":
        require("cudnn")
        return torch.device("cuda")

    def addresses(tensors):
        plain = all(type(tensor) is nn.Parameter for tensor in tensors)
        return [tensor.data_ptr() for tensor in tensors] if plain else []

    monkeypatch.setattr(flat, "addresses", addresses)
    return torch.device("cpu")


@pytest.fixture(params=LAYERS)
def layer(request, device):
    torch.manual_seed(0)
    return LAYERS[request.param](device=device)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_made_so(layer):
    assert is_flat(layer)
    assert [name for name, _ in layer.named_parameters()] == layer._names
    assert all(type(parameter) is nn.Parameter for parameter in layer.parameters())
    begin = min(parameter.data_ptr() for parameter in layer.parameters())
    for slot in params.slots(layer.spec):
        assert getattr(layer, slot.name).data_ptr() == begin + 4 * slot.offset


def test_laying_moves_memory_and_nothing_else():
    torch.manual_seed(0)
    layer = openrnn.LSTM(3, 8, 2)
    before, held = copy.deepcopy(layer), list(layer.parameters())
    versions = [parameter._version for parameter in held]
    assert not is_flat(layer)
    flat.lay(layer.spec, layer._parameters)
    assert is_flat(layer)
    assert same(layer, before)
    assert all(a is b for a, b in zip(held, layer.parameters(), strict=True))
    assert versions == [parameter._version for parameter in held]
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in held)


def test_conversion_and_copies(layer):
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert is_flat(half)
    assert half.weight_hh_l0.dtype == torch.bfloat16
    again = copy.deepcopy(layer)
    assert is_flat(again)
    assert same(again, layer)
    with torch.no_grad():
        again.weight_hh_l0.zero_()
    assert layer.weight_hh_l0.abs().min() > 0


def test_what_does_not_move_is_left_alone(layer):
    places = [parameter.data_ptr() for parameter in layer.parameters()]
    assert layer.to(layer.weight_hh_l0.device).float() is layer
    assert [parameter.data_ptr() for parameter in layer.parameters()] == places
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    apart = [parameter.data_ptr() for parameter in layer.parameters()]
    layer.float()
    assert [parameter.data_ptr() for parameter in layer.parameters()] == apart
    layer.flatten_parameters()
    assert is_flat(layer)


def test_saved_and_loaded(layer, tmp_path):
    """torch.save, safetensors (which refuses overlapping tensors), pickle."""
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    for load in torch.load, load_file:
        other = copy.deepcopy(layer)
        nn.init.zeros_(other.weight_hh_l0)
        suffix = ".pt" if load is torch.load else ".safetensors"
        other.load_state_dict(load(tmp_path / f"layer{suffix}"))
        assert same(other, layer)
        assert is_flat(other)
        other.load_state_dict(load(tmp_path / f"layer{suffix}"), assign=True)
        other.to(layer.weight_hh_l0.device)
        assert same(other, layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in torch.load(file, weights_only=False), pickle.loads(pickle.dumps(layer)):
        assert same(other, layer)


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers(device, fused):
    """The same steps as with parameters apart."""
    torch.manual_seed(0)
    layer = openrnn.LSTM(3, 5, device=device, backend="reference")
    apart = copy.deepcopy(layer)
    for parameter in apart.parameters():
        parameter.data = parameter.data.clone()
    x = torch.randn(4, 2, 3, device=device)
    for one in layer, apart:
        optimizer = torch.optim.Adam(one.parameters(), 0.1, fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            one(x)[0].square().sum().backward()
            optimizer.step()
    assert is_flat(layer)
    assert not is_flat(apart)
    for have, want in zip(layer.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(have, want)


def test_parameters_that_are_not_plain_are_left_alone(device):
    normed = weight_norm(openrnn.LSTM(3, 8, device=device), "weight_hh_l0")
    assert copy.deepcopy(normed).double().weight_hh_l0.dtype == torch.float64
    tied = openrnn.RNN(8, 8, device=device)
    tied.weight_hh_l0 = tied.weight_ih_l0
    tied.double()
    assert tied.weight_hh_l0 is tied.weight_ih_l0
    assert copy.deepcopy(tied).weight_hh_l0.dtype == torch.float64
    mixed = openrnn.RNN(8, 8, device=device)
    mixed.bias_hh_l0.data = mixed.bias_hh_l0.data.double()
    mixed.flatten_parameters()
    assert {parameter.dtype for parameter in mixed.parameters()} == {torch.float32, torch.float64}


def test_a_layer_without_memory(device):
    layer = openrnn.LSTM(3, 8, device="meta")
    assert is_flat(layer.to_empty(device=device))


def test_what_cudnn_would_misread_is_packed():
    spec = openrnn.cells.gru.spec(4, 4)
    offsets = weights._offsets(spec, 4)
    buffer = torch.randn(params.size(spec) + 4)
    begin = next(place for place in range(4) if buffer[place:].data_ptr() % 16 == 0)
    good = params.unpack(spec, buffer[begin : begin + params.size(spec)])
    assert weights._adjacent(offsets, good) == buffer[begin:].data_ptr()
    shifted = params.unpack(spec, buffer[begin + 1 :][: params.size(spec)])
    assert weights._adjacent(offsets, shifted) is None
    turned = [good[0].view(4, 12).t(), *good[1:]]
    assert turned[0].data_ptr() == good[0].data_ptr()
    assert weights._adjacent(offsets, turned) is None
    assert weights._adjacent(offsets, [good[1], good[0], *good[2:]]) is None
    assert weights._adjacent(offsets, [*good[:3], good[3].clone()]) is None


@on_gpu
def test_cudnn_reads_them_as_they_lie():
    """So nothing is packed, and a change through `.data` is seen, in inference too."""
    require("cudnn")
    layer = openrnn.LSTM(3, 4).cuda()
    layer.backend = "cudnn"
    x = torch.randn(5, 2, 3, device="cuda")
    kept = len(weights._kept)
    with torch.no_grad():
        first = layer(x)[0]
        layer.weight_hh_l0.data.zero_()
        second = layer(x)[0]
    assert not torch.equal(first, second)
    layer(x)[0].sum().backward()
    assert len(weights._kept) == kept
