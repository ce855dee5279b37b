"""Weights in panels that inference keeps: used while the weights' elements are the same."""

import copy
import ctypes
import io
import threading

import pytest
import torch
from torch import nn

import openrnn
from openrnn.backends.cpu import weight_cache
from openrnn.kernels.cpu import launch, matrices
from openrnn.kernels.cpu.args import DIGEST_WORDS


@pytest.fixture
def packed(monkeypatch):
    """How many matrices have been packed."""
    count, pack = [0], weight_cache.CachedPanels._packed

    def counting(self, values):
        count[0] += 1
        return pack(self, values)

    monkeypatch.setattr(weight_cache.CachedPanels, "_packed", counting)
    return count


def case(**options):
    torch.manual_seed(0)
    return openrnn.LSTM(9, 40, backend="cpu", **options), torch.randn(60, 2, 9)


def warm(layer, x):
    """Calls are remembered from the second of a kind on, and the third keeps panels."""
    return [layer(x)[0] for _ in range(3)][-1]


def right(layer, x):
    """The reference's answer with the weights as they are now."""
    kind = {"proj_size": layer.proj_size, "dtype": layer.weight_ih_l0.dtype}
    plain = openrnn.LSTM(9, layer.hidden_size, backend="reference", **kind)
    plain.load_state_dict(layer.state_dict())
    return plain(x)[0]


def close(layer, x):
    torch.testing.assert_close(layer(x)[0], right(layer, x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_calls_without_gradients_pack_once(packed):
    layer, x = case()
    first = layer(x)[0]
    warm(layer, x)
    before = packed[0]
    again = [layer(some)[0] for some in (x, x, x[:50], x[:50], x[:50], x[:50])]
    assert packed[0] == before + 4  # calls of another size are not remembered at once
    assert all(torch.equal(y, first[: len(y)]) for y in again)
    warm(layer, x[:2])  # too few rows for packing to pay: read as they are
    assert packed[0] == before + 4


def test_training_packs_in_its_workspace(packed):
    layer, x = case()
    for _ in range(4):
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
    warm(layer, x)
    before = packed[0]
    CHANGES[change](layer.get_parameter(name))
    for _ in range(2):
        close(layer, x)
    assert packed[0] == before + 1


@torch.no_grad()
def test_another_parameter(packed):
    layer, x = case()
    warm(layer, x)
    layer.weight_ih_l0 = nn.Parameter(-layer.weight_ih_l0)
    close(layer, x)
    swapped = nn.Parameter(layer.weight_hh_l0.clone() * 2)
    torch.utils.swap_tensors(layer.weight_hh_l0, swapped)  # refuses what has a weak reference
    close(layer, x)
    other = copy.deepcopy(layer)
    assert torch.equal(warm(other, x), layer(x)[0])
    assert not other._call_cache.module_cache.keys() - layer._call_cache.module_cache.keys()
    layer.double()
    assert not layer._call_cache.module_cache
    close(layer, x.double())


@torch.no_grad()
def test_a_stepper_sees_a_change():
    layer, _ = case()
    stepper, x = layer.stepper(128), torch.randn(128, 9)
    for _ in range(4):  # both halves of its memory are bound, and have packed
        stepper(x)
    layer.weight_hh_l0.data.mul_(-1)
    layer.weight_ih_l0.data.mul_(2)
    for _ in range(2):
        h, c = (state.clone() for state in stepper.state)
        y = stepper(x)
        want = layer(x[None], (h, c))[0][0]
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_panels_go_into_no_file_and_no_copy():
    layer, x = case()
    size = io.BytesIO()
    torch.save(layer, size)
    warm(layer, x)
    assert len(layer._call_cache.module_cache) == 2
    file = io.BytesIO()
    torch.save(layer, file)
    assert abs(file.tell() - size.tell()) < 64
    assert not copy.deepcopy(layer)._call_cache.module_cache


@torch.no_grad()
def test_the_digest_is_that_of_any_number_of_threads(packed):
    layer, x = openrnn.LSTM(64, 200, backend="cpu"), torch.randn(100, 1, 64)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 1, 2):
            torch.set_num_threads(count)
            warm(layer, x)
        before = packed[0]
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            layer(x)
        assert packed[0] == before + 2  # of three threads none was remembered
    finally:
        torch.set_num_threads(threads)


def test_threads_call_a_layer_whose_weights_change():
    """Panels are never overwritten, so none reads half of the old and half of the new ones."""
    layer, x = case()
    with torch.no_grad():
        weights = [p.clone() for p in layer.parameters()]
        warm(layer, x)
        wanted = []
        for scale in (1, -1):
            for own, weight in zip(layer.parameters(), weights):
                own.copy_(scale * weight)
            wanted.append(layer(x)[0])
    wrong, begin, rounds = [], threading.Barrier(4), 40

    def work(place):
        try:
            with torch.no_grad():
                for turn in range(rounds):
                    begin.wait(60)
                    if place == 0:
                        for own, weight in zip(layer.parameters(), weights):
                            own.copy_((1, -1)[turn % 2] * weight)
                    begin.wait(60)
                    if not torch.equal(layer(x)[0], wanted[turn % 2]):
                        wrong.append(turn)
        except Exception as error:
            wrong.append(error)
            begin.abort()

    running = [threading.Thread(target=work, args=(place,)) for place in range(4)]
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
        args.tasks, args.parts, words = tasks, 4, (ctypes.c_int32 * (4 * DIGEST_WORDS))()
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
