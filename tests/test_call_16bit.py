"""Calls of 16 bits on a CPU: matrices read in place, and memory of conversions."""

import copy
import itertools
import threading

import pytest
import torch
from cases import thinned

import openrnn
from openrnn import cells
from openrnn.backends.cpu import arena, backward
from openrnn.backends.cpu.rounding import backward_reads_in_place, described, reads_in_place
from openrnn.kernels.cpu import host, objects
from openrnn.spec import Problem

KINDS = {
    "LSTM": openrnn.LSTM, "GRU": openrnn.GRU, "RNN": openrnn.RNN,
    "peephole": lambda *sizes, **more: openrnn.Recurrent(cells.peephole_lstm, *sizes, **more),
}  # fmt: skip
DTYPES = torch.bfloat16, torch.float16
LARGE = 160  # units whose matrices are large enough for the arena


def wide_of(layer):
    """The same weights, and those of its own after, in float32."""
    return copy.deepcopy(layer).float()


def results(layer, x, states, grad):
    """y, final states and, with grad, all gradients; of random dy."""
    leaves = [x.detach().requires_grad_(grad), *layer.parameters()]
    states = None if states is None else tuple(s.detach().requires_grad_(grad) for s in states)
    y, finals = layer(leaves[0], states if states is None or len(states) > 1 else states[0])
    finals = finals if isinstance(finals, tuple) else (finals,)
    found = [y, *finals]
    if not grad:
        return found
    generator = torch.Generator().manual_seed(1)
    total = sum((one.float() * torch.randn(one.shape, generator=generator)).sum() for one in found)
    leaves += [] if states is None else states
    return [*found, *torch.autograd.grad(total, leaves, allow_unused=True)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "kind", "hidden", "steps", "batch", "layers", "both", "given", "grad"),
    thinned(
        itertools.product(
            DTYPES, KINDS, (37, LARGE), (1, 15), (1, 6), (1, 2), (False, True), (False, True),
            (False, True),
        ),
        11,
    ),
)  # fmt: skip
def test_bits_are_those_of_float32_between_conversions(
    threads, dtype, kind, hidden, steps, batch, layers, both, given, grad
):
    """Of a call that comes for the first time, and of one that repeats."""
    torch.manual_seed(0)
    before, x = torch.get_num_threads(), torch.randn(steps, batch, 9).to(dtype)
    layer = KINDS[kind](9, hidden, num_layers=layers, bidirectional=both).to(dtype)
    reads = reads_in_place(Problem(layer.spec, dtype, "cpu", grad=grad), steps, batch)
    assert reads == (dtype is torch.bfloat16 or host.WIDENS_FLOAT16)
    shape = layers * (1 + both), batch, hidden
    count = 2 if kind in ("LSTM", "peephole") else 1
    states = tuple(torch.randn(shape).to(dtype) for _ in range(count)) if given else None
    torch.set_num_threads(threads)
    try:
        with torch.set_grad_enabled(grad):
            wide = wide_of(layer)
            float_states = None if states is None else tuple(s.float() for s in states)
            wanted = results(wide, x.float(), float_states, grad)
            for _ in range(4):
                found = results(layer, x, states, grad)
                for one, other in zip(found[: 1 + count], wanted):
                    assert torch.equal(one, other.to(dtype))
                for one, other in zip(found[1 + count :], wanted[1 + count :], strict=True):
                    assert (one is None) == (other is None)
                    if one is not None:  # backward reads y as it was rounded
                        error = (one.float() - other).norm()
                        assert error <= 0.02 * other.norm() + 1e-6
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "hidden"), [(64, 64), (320, 96), (96, 320), (9, 37)])
@pytest.mark.parametrize(("batch", "layers"), [(1, 1), (5, 2), (40, 1), (95, 1)])
def test_gradients_of_one_step_are_those_of_float32_rounded(
    threads, dtype, kind, inputs, hidden, batch, layers
):
    """To the bit: backward of one step reads no y, so it computes with the same numbers.

    Matrices of some of these sizes are read, and gradients of them written, in 16 bits.
    """
    torch.manual_seed(0)
    before, x = torch.get_num_threads(), torch.randn(1, batch, inputs).to(dtype)
    layer = KINDS[kind](inputs, hidden, num_layers=layers).to(dtype)
    count = 2 if kind in ("LSTM", "peephole") else 1
    states = [torch.randn(layers, batch, hidden).to(dtype) for _ in range(count)]
    dy = torch.randn(1, batch, hidden).to(dtype)
    wide = wide_of(layer)
    steps = Problem(layer.spec, dtype, "cpu", grad=True), 1, batch
    whole = inputs % 32 == hidden % 32 == 0
    assert backward_reads_in_place(*steps) == (whole and reads_in_place(*steps))

    def gradients(of, kind):
        leaves = [one.detach().to(kind).requires_grad_() for one in (x, *states)]
        given = tuple(leaves[1:]) if count > 1 else leaves[1]
        y = of(leaves[0], given)[0]
        return torch.autograd.grad(y, [*leaves, *of.parameters()], dy.to(kind))

    torch.set_num_threads(threads)
    try:
        wanted = gradients(wide, torch.float32)
        for _ in range(3):
            for found, one in zip(gradients(layer, dtype), wanted, strict=True):
                assert torch.equal(found, one.to(dtype))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_hook_of_saved_tensors_may_change_their_dtype(dtype, steps):
    torch.manual_seed(0)
    layer = openrnn.GRU(64, 96).to(dtype)
    x = torch.randn(steps, 3, 64).to(dtype).requires_grad_()
    wanted = torch.autograd.grad(layer(x)[0].sum(), [x, *layer.parameters()])
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.float(), lambda one: one):
        y = layer(x)[0]
    found = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    assert all(map(torch.equal, found, wanted))


def check_narrower():
    """What a process with narrower vectors runs, see test_widths."""
    for dtype, (hidden, batch) in itertools.product(DTYPES, ((5, 3), (37, 1), (100, 7))):
        layer, x = openrnn.GRU(9, hidden).to(dtype), torch.randn(2, batch, 9).to(dtype)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(layer(x)[0], wide_of(layer)(x.float())[0].to(dtype))
    for dtype, batch in itertools.product(DTYPES, (1, 7)):
        layer, x = openrnn.GRU(64, 96).to(dtype), torch.randn(1, batch, 64).to(dtype)
        wide = wide_of(layer)
        wanted = torch.autograd.grad(wide(x.float())[0].sum(), [*wide.parameters()])
        found = torch.autograd.grad(layer(x)[0].sum(), [*layer.parameters()])
        assert all(torch.equal(one, other.to(dtype)) for one, other in zip(found, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", ["all", "weights", "x"])
def test_gradients_in_lent_memory_stay_what_they_were(dtype, wanted):
    """Each has memory of its own once it is returned, in whatever order calls follow."""
    torch.manual_seed(0)
    layer, x = openrnn.LSTM(LARGE, LARGE, 2).to(dtype), torch.randn(2, 3, LARGE).to(dtype)
    leaves = {"all": [x, *layer.parameters()], "weights": [*layer.parameters()], "x": [x]}[wanted]
    x.requires_grad_(wanted != "weights")
    kept = []
    for number in range(6):
        y = layer(x * (1 + number % 2) if wanted == "weights" else x)[0]
        grads = torch.autograd.grad(y.float().square().sum(), leaves)
        kept.append([y.detach(), *grads, *(one.clone() for one in (y.detach(), *grads))])
    for found in kept:
        half = len(found) // 2
        assert all(map(torch.equal, found[:half], found[half:]))
    for one, other in zip(kept[4], kept[2]):
        assert torch.equal(one, other)


def test_a_matrix_that_changes_is_read_anew():
    """In place: no copy has to be found wrong."""
    layer, x = openrnn.GRU(LARGE, LARGE).bfloat16(), torch.randn(1, 1, LARGE).bfloat16()
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        layer.weight_hh_l0.data.copy_(torch.randn(3 * LARGE, LARGE) / 9)
        h = torch.randn(1, 1, LARGE).bfloat16()
        layer(x, h), layer(x, h)
        found, wide = layer(x, h)[0], wide_of(layer)
        assert torch.equal(found, wide(x.float(), h.float())[0].bfloat16())


def test_threads_have_arenas_of_their_own():
    layer, x = openrnn.LSTM(LARGE, LARGE).bfloat16(), torch.randn(1, 4, LARGE).bfloat16()

    def step():
        y = layer(x)[0]
        return [y.detach(), *torch.autograd.grad(y.float().sum(), [*layer.parameters()])]

    wanted, wrong = step(), []

    def work():
        for _ in range(60):
            if not all(map(torch.equal, step(), wanted)):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_an_arena_gives_memory_of_its_own_until_the_call_ends():
    mine, like = arena.Arena(), torch.empty(300, 300)
    with mine:
        first = mine.take(like)
    with mine:  # it now has as much as that call took
        one, other = mine.take(like), mine.take(like)  # the second does not fit
        with mine:  # a call within a call, from a finalizer
            inner = mine.take(like)
        taken = [first, one, other, inner]
        for value, tensor in enumerate(taken):
            tensor.fill_(value)
        assert [tensor[0, 0].item() for tensor in taken] == [0, 1, 2, 3]
    with mine:
        assert len({mine.take(like).untyped_storage().data_ptr() for _ in range(3)}) == 1
    outside = [mine.take(like), mine.take(like)]
    assert outside[0].data_ptr() != outside[1].data_ptr()


def test_a_call_beyond_the_limit_leaves_an_arena_to_others(monkeypatch):
    monkeypatch.setattr(arena, "SCRATCH", 1 << 20)
    mine, large, small = arena.Arena(), torch.empty(1 << 19), torch.empty(1 << 10)
    for _ in range(3):
        with mine:
            taken = [mine.take(large) for _ in range(2)]
            places = {one.untyped_storage().data_ptr() for one in taken}
            assert len(places) == 2
    assert mine._memory.numel() == 0
    with mine:
        mine.take(small)
    assert mine._memory.numel() == 1 << 10


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_torch_s_default_dtype_is_not_that_of_an_arena(default):
    layer, x = openrnn.LSTM(LARGE, LARGE).bfloat16(), torch.randn(1, 4, LARGE).bfloat16()

    def step():
        y = layer(x)[0]
        return [y.detach(), *torch.autograd.grad(y.float().sum(), [*layer.parameters()])]

    wanted, before = step(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for _ in range(6):
            assert all(map(torch.equal, step(), wanted))
    finally:
        torch.set_default_dtype(before)


def test_nor_is_torch_s_default_device():
    """As on a GPU a call of a layer on the CPU has."""
    layer = openrnn.LSTM(256, 256).bfloat16()
    with torch.no_grad():
        x = torch.randn(40, 20, 256).bfloat16()
        wanted = layer(x)[0]
        for _ in range(3):
            layer(x[:20])
        with torch.device("meta"):
            for _ in range(4):
                assert torch.equal(layer(x)[0], wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_with_matrices_in_place_are_compiled_ahead(monkeypatch, dtype):
    layer, x = openrnn.GRU(9, 40).to(dtype), torch.randn(1, 3, 9).to(dtype)
    openrnn.compile_kernels(layer, dtype, device="cpu")
    monkeypatch.setattr(objects, "kernels", lambda *_: pytest.fail("it compiles"))
    layer(x)


def test_a_gradient_that_is_part_of_a_tensor_in_an_arena():
    made = torch.arange(20.0)[8:]
    found = backward.gradient(backward.View(0, (2, 3), (3, 1), 4), [made])
    assert torch.equal(found, torch.arange(12.0, 18.0).view(2, 3))


@pytest.mark.parametrize(
    ("steps", "grad", "reads"),
    [(1, False, True), (1, True, True), (95, True, True), (96, True, False)],
)
def test_explain_says_that_matrices_are_read_as_they_are(steps, grad, reads):
    spec = cells.lstm.spec(9, 40)
    problem = Problem(spec, torch.bfloat16, "cpu", grad=grad, steps=steps, batch=1)
    assert any("but matrices are read as bfloat16" in line for line in described(problem)) == reads
