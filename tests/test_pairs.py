"""Products of bfloat16 pairs on the CPU: the kernels, on any processor, and calls made of them."""

import ctypes
import platform

import numpy as np
import pytest
import torch

import openrnn
from openrnn import memo
from openrnn.backends.cpu import rounding
from openrnn.kernels.cpu import amx, bf16, host, launch, matrices, objects
from openrnn.kernels.cpu.host import LANES, PANEL
from openrnn.kernels.cpu.layout import Layout, whole_pairs
from openrnn.spec import Problem

LANE, WIDE = LANES["float32"], PANEL["float32"]
# root mean squares over those of float64. A rounding to bfloat16 makes 1.7e-3; two make 2.4e-3, and
# gradients have more of them
Y_ERROR, GRAD_ERROR = 2.3e-3, 4e-3

KINDS = {
    "lstm": lambda: openrnn.LSTM(40, 37),
    "gru": lambda: openrnn.GRU(33, 64),
    "teams": lambda: openrnn.LSTM(30, 300),
    "two layers, both ways": lambda: openrnn.LSTM(33, 50, 2, bidirectional=True),
    "projection": lambda: openrnn.LSTM(30, 50, 2, proj_size=20),
    "no bias": lambda: openrnn.GRU(12, 20, bias=False),
    "skip": lambda: openrnn.GRU(20, 20, 2, input_mode="skip"),
    "own": lambda: openrnn.Recurrent(damped, 12, 37),
}


@openrnn.cell(gates=("a",), states=("h",), params=("rate",))
def damped(x, r, s, p):
    """h_t = h_{t-1} + sigmoid(rate) (tanh(x + r) - h_{t-1})"""
    return s.h + torch.sigmoid(p.rate) * (torch.tanh(x.a + r.a) - s.h)


@pytest.fixture(autouse=True, params=["amx", "pairs"])
def pairs(monkeypatch, request):
    """Calls in bfloat16 are made of pairs, whatever the processor; of each kind of product."""
    amx = request.param == "amx"
    if amx and not host.request_amx():
        pytest.skip("this processor has no AMX, or the system does not permit it")
    monkeypatch.setattr(matrices, "request_amx", lambda: amx)
    monkeypatch.setattr(host, "MULTIPLIES_BF16", True)
    memo.clear()  # programs with the other kind of products
    yield
    memo.clear()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# the kernels


def packed(name, weight, gates, units, padded):
    """A matrix in panels, and the same as a tensor (columns of the product, its inner length)."""
    columns = weight.shape[1]
    args = matrices.pack_args(gates, units, padded, columns, 2)
    panels = torch.full(
        (matrices.panel_elements(name, "float32", gates, padded, columns),), float("nan")
    )
    args.matrix, args.out = weight.data_ptr(), panels.data_ptr()
    launch.run(matrices.kernel(name, "float32"), args, args.tasks)
    inner = 2 * whole_pairs(gates * padded if name == "pack_pairs" else columns)
    found = panels.view(torch.bfloat16).view(-1, inner // 2, WIDE, 2).transpose(1, 2)
    return panels, found.reshape(-1, inner)


def spread(weight, gates, units, padded):
    """The rows of each gate, with zeros up to `padded`."""
    made = torch.zeros(gates, padded, weight.shape[1])
    made[:, :units] = weight.view(gates, units, -1)
    return made.view(gates * padded, -1)


def check_panels(gates, units, padded, columns):
    """Each weight is at its place, rounded as torch rounds it; all others are zeros."""
    weight = torch.randn(gates * units, columns)
    wanted = spread(weight, gates, units, padded).bfloat16()
    for name, exact in (("transpose_pairs", wanted), ("pack_pairs", wanted.T)):
        found = packed(name, weight, gates, units, padded)[1]
        rows, inner = exact.shape
        assert torch.equal(found[:rows, :inner], exact)
        assert not found[rows:].any()
        assert not found[:, inner:].any()


def check_product(rows, inner, gates, units, padded, begin, end, backwards):
    """Of a part of the units, added to what is there; other columns of C stay."""
    weight, a = torch.randn(gates * units, inner), torch.randn(rows, inner + 3)[:, :inner]
    panels, _ = packed("transpose_pairs", weight, gates, units, padded)
    columns = -(-gates * padded // WIDE) * WIDE
    before = torch.randn(rows, columns)
    exact = a.bfloat16().double() @ spread(weight, gates, units, padded).bfloat16().double().T
    size = Layout("float32", 1, 0, 0, 0, True, inner, 1, 1).pairs_memory(rows, backward=False) // 4
    memory = torch.full((size + 64,), float("nan"))
    run: ctypes._CFuncPtr = matrices.pairs().product.ctypes
    mine = torch.zeros(gates, padded, dtype=torch.bool)
    mine[:, begin:end] = True
    mine = torch.nn.functional.pad(mine.flatten(), (0, columns - gates * padded))
    for add in (0, 1):
        c = before.clone()
        run(
            rows, inner, gates, units, padded, begin, end, a.data_ptr(), inner + 3,
            panels.data_ptr(), 0, c.data_ptr(), columns, add, memory.data_ptr(), backwards,
        )  # fmt: skip
        assert memory[size:].isnan().all()  # which is not ours to write
        if begin > 0 or end < padded:
            assert torch.equal(c[:, ~mine], before[:, ~mine])
        wanted = exact + add * before[:, : gates * padded].double()
        some, limit = mine[: gates * padded], 2e-5 + 5e-8 * inner
        torch.testing.assert_close(c[:, mine].double(), wanted[:, some], rtol=1e-5, atol=limit)


def check_outer(count, rows, columns, begin, end):
    """The products over rows with two matrices, as weight gradients are, of some rows of both C."""
    a, strip = torch.randn(count, rows), torch.full((96, whole_pairs(count)), float("nan"))
    kernels, b, panels, c, wanted = matrices.pairs(), [], [], [], []
    for width in (columns, WIDE):
        b.append(torch.randn(count, width))
        panels.append(torch.full((whole_pairs(count), width), float("nan")))
        c.append(torch.randn(rows, width))
        wanted.append(a.bfloat16().double().T @ b[-1].bfloat16().double())
        for first, last in ((0, WIDE), (WIDE, width)):  # by two threads
            at = b[-1].data_ptr(), width, panels[-1].data_ptr()
            kernels.panels.ctypes(first, last, count, *at)
    for second in (0, WIDE):
        for add in (1, 0):
            before = [each.clone() for each in c]
            kernels.outer.ctypes(
                begin, end, count, a.data_ptr(), rows, panels[0].data_ptr(), columns,
                strip.data_ptr(), c[0].data_ptr(), add, panels[1].data_ptr(), second,
                c[1].data_ptr(),
            )  # fmt: skip
            for have, old, new in zip(c, before, wanted, strict=True):
                exact = old.double()
                if have is c[0] or second:
                    exact[begin:end] = new[begin:end] + add * exact[begin:end]
                torch.testing.assert_close(have.double(), exact, rtol=1e-5, atol=5e-5)


PRODUCTS = (
    # rows, inner, gates, units, padded, begin, end, backwards
    (1, 1, 1, 3, LANE, 0, LANE, 0),
    (5, 19, 4, 2 * WIDE, 2 * WIDE, 0, 2 * WIDE, 1),
    (13, 40, 3, 2 * WIDE, 2 * WIDE, WIDE, 2 * WIDE, 1),
    (40, 33, 3, LANE + 1, 3 * LANE, 0, 3 * LANE, 0),
    (70, 4099, 1, 3, LANE, 0, LANE, 0),  # rows that are rounded in several turns
)


def check_narrower():
    """What a process with narrower vectors runs, see test_widths."""
    torch.manual_seed(0)
    for sizes in PRODUCTS:
        check_product(*sizes)
    check_panels(3, 18, 20, 33)
    check_outer(7, 200, 3 * WIDE, 3, 150)


@pytest.mark.parametrize(
    ("gates", "units", "padded"),
    [(1, 1, LANE), (4, 37, -(-37 // LANE) * LANE), (3, 2 * WIDE, 2 * WIDE)],
)
@pytest.mark.parametrize("columns", [1, 32, 45])
def test_panels(gates, units, padded, columns):
    check_panels(gates, units, padded, columns)


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_products(sizes):
    check_product(*sizes)


@pytest.mark.parametrize("count", [1, 2, 31, 300])
@pytest.mark.parametrize("rows", [(40, 0, 40), (300, 17, 290)])
def test_products_over_rows(count, rows):
    check_outer(count, rows[0], 3 * WIDE, *rows[1:])


# calls


def leaves(states):
    """The states of a layer, one or several, as a list."""
    return [states] if isinstance(states, torch.Tensor) else [*states]


def outcome(layer, x, dy, hx=None, reset_state=None, **more):
    """Y without gradients; then y and the gradients of x, of all states and of all parameters."""
    given = [x, *(hx or []), *(reset_state or [])]
    given = [each.to(x.dtype, copy=True).requires_grad_() for each in given]

    def call():
        parts = given[1 : 1 + len(hx or [])], given[1 + len(hx or []) :]
        parts = [(part[0] if len(part) == 1 else tuple(part)) if part else None for part in parts]
        options = more | ({"reset_state": parts[1]} if reset_state else {})
        return layer(given[0], parts[0], **options)[0]

    with torch.no_grad():
        alone = call()
    y = call()
    grads = torch.autograd.grad(y, [*given, *layer.parameters()], dy, allow_unused=True)
    return [alone, y.detach(), *(grad for grad in grads if grad is not None)]


def errors(found, exact):
    """The root mean square of each error, relative to that of float64."""
    pairs = zip(found, exact, strict=True)
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_by_float64(threads, kind, count):
    threads(count)
    torch.manual_seed(0)
    layer, twin = KINDS[kind]().bfloat16(), KINDS[kind]().double()
    x = torch.randn(24, 20, layer.input_size).bfloat16()
    y, first = layer(x)
    dy = torch.randn_like(y)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    lengths, reset = torch.randint(0, 25, (20,)), torch.rand(24, 20) < 0.1
    lengths[0] = 0
    states, again = ([torch.randn_like(one).bfloat16() for one in leaves(first)] for _ in range(2))
    reset_state = {"reset": reset, "reset_state": again}
    for hx, more in ((None, {}), (states, {"lengths": lengths}), (states, reset_state)):
        found = outcome(layer, x, dy, hx, **more)
        exact = outcome(twin, x.double(), dy.double(), hx, **more)
        y, again, *grads = errors(found, exact)
        assert max(y, again) < Y_ERROR, (more, y, again)
        assert max(grads) < GRAD_ERROR, (more, grads)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_errors_are_not_those_of_torch(kind):
    """Of each result ours is the nearer one to float64, or as near."""
    torch.manual_seed(1)
    theirs = getattr(torch.nn, kind)(48, 70).bfloat16()
    ours, twin = getattr(openrnn, kind)(48, 70).bfloat16(), getattr(torch.nn, kind)(48, 70).double()
    ours.load_state_dict(theirs.state_dict())
    twin.load_state_dict({name: value.double() for name, value in theirs.state_dict().items()})
    x, dy = torch.randn(40, 12, 48).bfloat16(), torch.randn(40, 12, 70).bfloat16()
    exact = outcome(twin, x.double(), dy.double())
    pairs = zip(*(errors(outcome(layer, x, dy), exact) for layer in (ours, theirs)), strict=True)
    assert all(mine <= 1.02 * other for mine, other in pairs)


def test_one_step_of_many_rows_and_a_row_that_is_not_finite():
    """Other rows of a batch are those of a call without it."""
    torch.manual_seed(2)
    layer, x = openrnn.GRU(40, 37).bfloat16(), torch.randn(1, 130, 40).bfloat16()
    dy, other = torch.randn(1, 130, 37).bfloat16(), x.clone()
    other[0, 77, 3] = float("nan")
    found, wanted = outcome(layer, other, dy), outcome(layer, x, dy)
    assert not found[0][0, 77].isfinite().all()
    kept = torch.arange(130) != 77
    for have, want in zip(found[:3], wanted[:3], strict=True):  # y twice, dx
        assert torch.equal(have[:, kept], want[:, kept])


def test_which_calls_are_made_of_pairs(monkeypatch):
    spec = openrnn.LSTM(8, 8).spec

    def pairs(dtype, grad, steps, batch):
        return rounding.multiplies_bf16(Problem(spec, dtype, "cpu", grad=grad), steps, batch)

    assert pairs(torch.bfloat16, False, launch.BF16_STEPS, 1)
    assert not pairs(torch.bfloat16, False, launch.BF16_STEPS - 1, 1)
    assert pairs(torch.bfloat16, True, 2, launch.PACK_FROM // 2)
    assert not pairs(torch.bfloat16, True, launch.BF16_STEPS, 1)  # float32 is read in place
    assert not pairs(torch.float16, False, 100, 100)
    assert not pairs(torch.float32, False, 100, 100)
    monkeypatch.setattr(host, "MULTIPLIES_BF16", False)
    assert not pairs(torch.bfloat16, False, 100, 100)


@torch.no_grad()
def test_calls_round_h_where_the_processor_multiplies_bfloat16(monkeypatch, capsys):
    """Repeated calls, and a stepper of many rows, as the first ones; elsewhere h is float32."""
    torch.manual_seed(0)
    layer, x = openrnn.LSTM(24, 40).bfloat16(), torch.randn(30, 100, 24).bfloat16()
    first = [layer(x)[0] for _ in range(4)]
    assert all(torch.equal(y, first[0]) for y in first)
    stepper = layer.stepper(100)
    # which rounds c as well, between steps
    steps = torch.stack([stepper(x_t).clone() for x_t in x])
    assert torch.equal(steps[0], first[0][0])
    torch.testing.assert_close(steps, first[0], rtol=2e-2, atol=2e-2)
    layer.weight_hh_l0.mul_(-1.5)
    assert not torch.equal(layer(x)[0], first[0])
    layer.weight_hh_l0.div_(-1.5)
    openrnn.explain(layer, x, grad=False)
    assert "but products are of numbers rounded to bfloat16" in capsys.readouterr().out
    monkeypatch.setattr(host, "MULTIPLIES_BF16", False)
    other = openrnn.LSTM(24, 40).bfloat16()
    other.load_state_dict(layer.state_dict())
    y = other(x)[0]
    assert not torch.equal(y, layer(x)[0])
    torch.testing.assert_close(y, first[0], rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 processors have AMX")
def test_products_by_amx_compile_for_processors_that_have_it(monkeypatch):
    """On any x86 machine; where it has AMX, the tests above run them."""
    told = objects.llvm.get_host_cpu_features()
    told |= dict.fromkeys(("avx512f", "avx512bw", "avx512bf16", "amx-tile", "amx-bf16"), True)
    monkeypatch.setattr(host, "FEATURES", told.flatten())
    monkeypatch.setattr(host, "NAME", "sapphirerapids")
    names = ["pairs_product", "pairs_outer"]
    source = f"from openrnn.kernels.cpu.amx import {', '.join(names)}\n"
    code = objects._in_a_process({"source": source, "names": names})
    vex = zip(code, code[1:], code[2:], code[3:], strict=False)
    # tdpbf16ps is VEX.128.F3.0F38.W0 5C
    assert any(a == 0xC4 and b & 31 == 2 and c & 0x87 == 2 and d == 0x5C for a, b, c, d in vex)


def test_blocks_of_amx_cover_a_product(monkeypatch):
    """The way through a product, with numpy in place of the instructions."""
    torch.manual_seed(3)
    rows_of = []

    def block(shape, a, w, c, accumulate):
        rows, words = shape[0], 16 * shape[2]
        assert rows == rows_of[-1]
        left = np.lib.stride_tricks.as_strided(memory[a[0] // 4 :], (rows, words), (4 * a[1], 4))
        right = panels[w[0] // 4 :][: words * 32].reshape(words, 32)
        sums = sum(half(left).astype(float) @ half(right) for half in (lower, upper))
        out = np.lib.stride_tricks.as_strided(found[c[0] // 4 :], (rows, 32), (4 * c[1], 4))
        out[:] = sums + accumulate * out

    def lower(words):
        return (words << 16).view(np.float32)

    def upper(words):
        return (words & np.uint32(0xFFFF0000)).view(np.float32)

    # panels as processors with AMX have them, whatever this one has
    monkeypatch.setattr(bf16, "_PANEL", 32)
    product = bf16.over_panels("numpy", block, (1,) * 32).py_func
    monkeypatch.setattr(amx, "_over_panels", product)
    monkeypatch.setattr(amx, "_configure", rows_of.append)
    monkeypatch.setattr(amx, "_release", lambda: rows_of.append(None))
    gates, units, inner = 3, 70, 45
    padded, words = 96, whole_pairs(45)
    columns = gates * padded
    for rows, begin, end in ((70, 0, 96), (32, 32, 96), (5, 0, 32)):
        a = torch.zeros(rows, 2 * words).bfloat16()
        a[:, :inner] = torch.randn(rows, inner)
        weight = torch.zeros(gates, padded, 2 * words).bfloat16()
        weight[:, :units, :inner] = torch.randn(gates, units, inner)
        pairs_of = weight.view(columns // 32, 32, words, 2).transpose(1, 2).contiguous()
        memory = a.view(torch.int32).numpy().view(np.uint32).ravel()
        panels = pairs_of.view(torch.int32).numpy().view(np.uint32).ravel()
        found = np.ones(rows * columns, np.float32)
        amx._over_blocks.py_func(
            (rows, (inner + 1) // 2), (gates, padded, begin, end), (0, words), (0, 32 * words),
            (0, columns), True, rows == 5,
        )  # fmt: skip
        assert rows_of.pop() is None
        made = torch.from_numpy(found).view(rows, gates, padded)
        exact = 1 + torch.einsum("ik,guk->igu", a.double(), weight.double())
        exact[:, :, :begin], exact[:, :, end:] = 1, 1
        torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-5)
