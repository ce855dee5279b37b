"""Weights in panels that inference keeps: used while the weights' elements are the same."""

import copy
import ctypes
import gc
import io
import threading

import pytest
import torch
from torch import nn

import openrnn
from openrnn.backends.cpu import kept
from openrnn.kernels.cpu import launch, matrices
from openrnn.kernels.cpu.args import DIGEST_WORDS


@pytest.fixture
def packed(monkeypatch):
    """How many matrices have been packed."""
    count, pack = [0], kept.Kept._packed

    def counting(self, values):
        count[0] += 1
        return pack(self, values)

    monkeypatch.setattr(kept.Kept, "_packed", counting)
    return count


def case(**options):
    torch.manual_seed(0)
    return openrnn.LSTM(9, 40, backend="cpu", **options), torch.randn(60, 2, 9)


def right(layer, x):
    """The reference's answer with the weights as they are now."""
    plain = openrnn.LSTM(9, layer.hidden_size, proj_size=layer.proj_size, backend="reference")
    plain.load_state_dict(layer.state_dict())
    return plain.to(x.dtype)(x)[0]


@torch.no_grad()
def test_calls_of_inference_pack_once(packed):
    layer, x = case()
    first = layer(x)[0]
    assert packed == [2]
    again = [layer(some)[0] for some in (x, x, x[:50], x[:50], x[:50])]
    assert packed == [2]
    assert all(torch.equal(y, first[: len(y)]) for y in again)
    layer(x[:2])  # too few rows for packing to pay: read as they are
    assert packed == [2]


def test_training_packs_in_its_workspace(packed):
    layer, x = case()
    for _ in range(3):
        layer(x)[0].sum().backward()
    assert packed == [0]


CHANGES = {
    "signs": lambda p: p.data.neg_(),
    "exponents": lambda p: p.data.mul_(2),
    "rows": lambda p: p.data.copy_(p.data.flip(0)),
    "in place": lambda p: p.mul_(1.5),
    "data": lambda p: p.data.copy_(p.data * 1.5),
    "one element of data": lambda p: p.data[-1, -1].add_(1),
    "the last bit": lambda p: p.data.view(-1).view(torch.int32)[77].bitwise_xor_(1),
    "memory": lambda p: setattr(p, "data", p.data * 1.5),
    "numpy": lambda p: p.data.numpy().__setitem__((3, 3), 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "weight_hr_l0"])
@torch.no_grad()
def test_any_change_of_a_weight_is_seen(packed, change, name):
    """Most leave a tensor's version as it is, so versions would not tell."""
    layer, x = case(proj_size=30 if name == "weight_hr_l0" else 0)
    for _ in range(3):
        layer(x)
    before = packed[0]
    CHANGES[change](layer.get_parameter(name))
    for _ in range(2):
        torch.testing.assert_close(layer(x)[0], right(layer, x), rtol=1e-4, atol=1e-5)
    assert packed[0] == before + 1


@torch.no_grad()
def test_another_parameter_has_panels_of_its_own(packed):
    layer, x = case()
    layer(x)
    layer.weight_ih_l0 = nn.Parameter(-layer.weight_ih_l0)
    torch.testing.assert_close(layer(x)[0], right(layer, x), rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(layer)
    assert packed == [3]
    assert torch.equal(other(x)[0], layer(x)[0])
    assert packed == [5]


@torch.no_grad()
def test_a_stepper_sees_a_change(packed):
    layer, _ = case()
    stepper, x = layer.stepper(128), torch.randn(128, 9)
    stepper(x)
    layer.weight_hh_l0.data.mul_(-1)
    layer.weight_ih_l0.data.mul_(2)
    h, c = (state.clone() for state in stepper.state)
    y = stepper(x)
    want = layer(x[None], (h, c))[0][0]
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_only_parameters_keep_them(packed):
    """A converted or computed weight is another tensor in each call."""
    gc.collect()
    before = len(kept._KEPT)
    layer, x = case(dtype=torch.bfloat16)
    for _ in range(3):
        layer(x.bfloat16())
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    layer.float()(x)
    assert packed == [8]
    gc.collect()
    assert len(kept._KEPT) == before + 1  # weight_ih of the last call


@torch.no_grad()
def test_panels_go_with_their_parameter_and_into_no_file():
    gc.collect()
    before = len(kept._KEPT)
    layer, x = case()
    size = io.BytesIO()
    torch.save(layer, size)
    layer(x)
    assert len(kept._KEPT) == before + 2
    file = io.BytesIO()
    torch.save(layer, file)
    assert abs(file.tell() - size.tell()) < 64
    del layer
    gc.collect()
    assert len(kept._KEPT) == before


def test_threads_call_one_layer():
    layer, x = case()
    with torch.no_grad():
        want, wrong = layer(x)[0], []

    def work():
        with torch.no_grad():
            for _ in range(30):
                if not torch.allclose(layer(x)[0], want, atol=1e-5):
                    wrong.append(1)

    running = [threading.Thread(target=work) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tasks", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 127, 128, 5000])
def test_every_word_is_in_the_digest(dtype, tasks, count):
    x = torch.randn(count, dtype=getattr(torch, dtype))

    def told():
        args = matrices.digest_args(count, dtype, 1)
        args.tasks, words = tasks, (ctypes.c_int32 * (tasks * DIGEST_WORDS))()
        args.matrix, args.out = x.data_ptr(), ctypes.addressof(words)
        launch.run(matrices.digest(), args, tasks)
        return bytes(words)

    first, bits = told(), x.view(torch.int32)
    for change in (x.neg(), 2 * x, torch.zeros_like(x), x.flip(0) if count > 1 else x + 1):
        before = x.clone()
        x.copy_(change)
        assert told() != first
        x.copy_(before)
    assert told() == first
    for place in {0, len(bits) // 3, len(bits) // 2, len(bits) - 1}:
        for bit in (0, 13, 31):
            bits[place] ^= -(2**31) if bit == 31 else 1 << bit
            assert told() != first
            bits[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert told() == first
