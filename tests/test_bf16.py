"""bfloat16 weights on the CPU: `precision="bf16"`, and the calls that it does not touch."""

import copy
import ctypes
import itertools
import pickle

import pytest
import torch
from cases import CELLS, CLIP, thinned

import openrnn
from openrnn import cells
from openrnn.backends.cpu import rounding
from openrnn.kernels.cpu import host, launch, matrices
from openrnn.kernels.cpu.host import LANES, PANEL
from openrnn.spec import precision_of

KINDS = {
    "clip": lambda **more: openrnn.LSTM(12, 20, cell_clip=CLIP, **more),
    "projection": lambda **more: openrnn.LSTM(30, 50, 2, proj_size=20, **more),
    "no bias": lambda **more: openrnn.LSTM(12, 20, bias=False, **more),
    "skip": lambda **more: openrnn.GRU(20, 20, 2, input_mode="skip", **more),
    "gates": lambda **more: openrnn.GRU(60, 20, 2, input_mode="gates", **more),
    "reverse": lambda **more: openrnn.GRU(12, 20, reverse=True, **more),
    "both ways": lambda **more: openrnn.LSTM(33, 50, 2, bidirectional=True, **more),
    "teams": lambda **more: openrnn.LSTM(30, 300, **more),
    "own": lambda **more: openrnn.Recurrent(leaky, 12, 37, **more),
}


@openrnn.cell(gates=("a",), states=("h",), params=("rate",))
def leaky(x, r, s, p):
    """h_t = h_{t-1} + sigmoid(rate) (tanh(x + r) - h_{t-1})"""
    return s.h + torch.sigmoid(p.rate) * (torch.tanh(x.a + r.a) - s.h)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def rounded(layer):
    """The parameters of a layer, gate matrices rounded to bfloat16."""
    matrix = "weight_ih", "weight_hh"
    return {
        name: value.bfloat16().float() if name.startswith(matrix) else value
        for name, value in layer.state_dict().items()
    }


def three(make, seed=0):
    """A layer with bfloat16 weights; with the weights so rounded one in float32, one by hand."""
    torch.manual_seed(seed)
    layer = make(precision="bf16")
    plain, reference = make(backend="cpu"), make(backend="reference")
    plain.load_state_dict(rounded(layer))
    reference.load_state_dict(rounded(layer))
    return layer, plain, reference


def results(found):
    """The tensors of what a call returns, whatever its nesting."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [tensor for each in found for tensor in results(each)]


def check(make, steps, batch):
    """The bits of float32 panels with the rounded weights, and what the reference makes of them."""
    layer, plain, reference = three(make)
    x = torch.randn(steps, batch, layer.input_size)
    hx = [torch.randn(layer.spec.chains, batch, size) for size in layer.spec.state_sizes]
    hx = tuple(hx) if len(hx) > 1 or type(layer) is openrnn.Recurrent else hx[0]
    lengths = torch.randint(0, steps + 1, (batch,))
    reset = torch.rand(steps, batch) < 0.2
    masked = {"reset": reset, "reset_state": hx, "return_states": True}
    problem = openrnn.explain(layer, x, grad=False, quiet=True).problem
    reads = rounding.why_not(problem, steps, batch)
    with torch.no_grad():
        for states, more in (
            (None, {}), (hx, {}), (hx, {"lengths": lengths}), (hx, masked),
            (hx, {"lengths": lengths, **masked}),
        ):  # fmt: skip
            found, exact = results(layer(x, states, **more)), results(plain(x, states, **more))
            if reads is None:
                wanted = results(reference(x, states, **more))
                if launch.packs(steps, batch):  # else float32 is read in place, in another order
                    assert all(map(torch.equal, found, exact))
                for have, want in zip(found, wanted, strict=True):
                    torch.testing.assert_close(have, want, rtol=1e-5, atol=5e-6)
            else:  # the weights as they are
                assert more or not torch.equal(found[0], exact[0])
                plain.load_state_dict(layer.state_dict())
                assert all(map(torch.equal, found, results(plain(x, states, **more))))
                plain.load_state_dict(rounded(layer))


def check_narrower():
    """What a process with narrower vectors runs, see test_widths."""
    for hidden, batch in ((5, 3), (37, 1), (300, 7)):
        check(lambda hidden=hidden, **more: openrnn.LSTM(9, hidden, **more), 32, batch)
    check_panels(3, 18, 20, 33)


@pytest.mark.parametrize(
    ("cell", "hidden", "steps", "batch", "count"),
    thinned(
        [
            (cell, *sizes)
            for cell in CELLS.values()
            if not cell.dependent_product
            for sizes in itertools.product((37, 130), (1, 20), (1, 3, 40, 100), (1, 2))
        ],
        29,  # no factor of the numbers of values: each cell, and each of those, is there
    ),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_shipped_cells(threads, cell, hidden, steps, batch, count):
    threads(count)
    check(lambda **more: openrnn.Recurrent(cell, 10, hidden, **more), steps, batch)


SIZES = (40, 2), (5, 1), (1, 2)  # rows, threads


@pytest.mark.parametrize(
    ("kind", "batch", "count"),
    # each kind once, the sizes taking turns
    thinned([(kind, *SIZES[(i + j) % 3]) for i, kind in enumerate(KINDS) for j in range(3)], 3),
)
def test_every_kind_of_layer(threads, kind, batch, count):
    threads(count)
    check(KINDS[kind], 20, batch)


def check_panels(gates, units, padded, columns):
    """Each weight is at its place, rounded as torch rounds it; a nan stays one."""
    size = gates * units * columns
    bits = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int64).to(torch.int32)
    special = [0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-45]
    weight = bits.view(torch.float32).clone()
    count = min(size, len(special))
    weight[:count] = torch.tensor(special[:count])
    if size > 20:  # nans whose payload is in the lower half alone, of either sign; ties
        words = [0x7F800001, 0xFF800001 - 2**32, -1, 0x3F808000, 0x3F818000, 0x3F808001]
        weight[10:16] = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    args = matrices.pack_args(gates, units, padded, columns, 2)
    panels = torch.full(
        (matrices.panel_elements("transpose_bf16", "float32", gates, padded, columns),), -1
    )
    panels = panels.to(torch.float32)
    args.matrix, args.out = weight.data_ptr(), panels.data_ptr()
    launch.run(matrices.kernel("transpose_bf16", "float32"), args, args.tasks)
    lanes, panel = LANES["float32"], PANEL["float32"]
    found = panels.view(torch.bfloat16).view(-1, columns, lanes, 2).transpose(2, 3)
    found = found.permute(0, 2, 3, 1).reshape(-1, columns)  # by column of the product
    assert len(found) % panel == 0
    have = torch.zeros(len(found), columns, dtype=torch.bfloat16)
    for gate in range(gates):
        rows = weight.view(gates, units, columns)[gate].bfloat16()
        have[gate * padded : gate * padded + units] = rows
    assert torch.equal(found.isnan(), have.isnan())
    there = ~have.isnan()
    assert torch.equal(found.view(torch.int16)[there], have.view(torch.int16)[there])


@pytest.mark.parametrize(("gates", "units", "padded"), [(1, 1, 8), (4, 37, 40), (3, 64, 64)])
@pytest.mark.parametrize("columns", [1, 16, 45])
def test_panels(gates, units, padded, columns):
    check_panels(gates, units, padded, columns)


# what keeps panels


@torch.no_grad()
def test_kept_panels_have_half_the_memory_and_see_every_change():
    layer, plain, _ = three(lambda **more: openrnn.LSTM(9, 40, **more))
    x = torch.randn(60, 2, 9)
    first = [layer(x)[0] for _ in range(4)]
    assert all(torch.equal(y, first[0]) for y in first)
    for _ in range(4):
        plain(x)
    kept, of_float32 = (each._call_cache.module_cache.values() for each in (layer, plain))
    assert len(kept) == 2
    for (_, panels), (_, wider) in zip(kept, of_float32, strict=True):
        assert 2 * panels.nbytes == wider.nbytes
    for change in (lambda p: p.data.copy_(-1.5 * p.data), lambda p: p.data[-1, -1].add_(1)):
        for name in ("weight_ih_l0", "weight_hh_l0"):
            change(layer.get_parameter(name))
            plain.load_state_dict(rounded(layer))
            for _ in range(2):
                assert torch.equal(layer(x)[0], plain(x)[0])


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 128])
def test_a_stepper(batch):
    """Of many rows by rounded weights as they are now; of few by float32 ones."""
    layer, plain, _ = three(lambda **more: openrnn.GRU(9, 40, **more))
    if batch == 1:
        plain.load_state_dict(layer.state_dict())
    x = torch.randn(6, batch, 9)
    ours, theirs = layer.stepper(batch), plain.stepper(batch)
    for x_t in x:
        assert torch.equal(ours(x_t), theirs(x_t))
    assert ours._runs
    layer.weight_hh_l0.data.copy_(layer.weight_hh_l0.data * -1.5)
    plain.load_state_dict(rounded(layer) if batch > 1 else layer.state_dict())
    for x_t in x:
        assert torch.equal(ours(x_t), theirs(x_t))


# calls with the weights as they are


def plain_of(layer):
    found = type(layer)(layer.input_size, layer.hidden_size, layer.num_layers, backend="cpu")
    found.load_state_dict(layer.state_dict())
    return found


def test_gradients_are_those_of_float32():
    layer = openrnn.LSTM(9, 40, 2, precision="bf16")
    plain, x = plain_of(layer), torch.randn(30, 4, 9)

    def grads(each):
        leaf = x.clone().requires_grad_()
        y, leaves = each(leaf)[0], [leaf, *each.parameters()]
        return [y, *torch.autograd.grad(y.square().sum(), leaves, create_graph=True)]

    for _ in range(3):
        found, wanted = grads(layer), grads(plain)
        assert all(map(torch.equal, found, wanted))
    twice = [
        torch.autograd.grad(each[1].square().sum(), of.weight_hh_l0)[0]
        for each, of in ((found, layer), (wanted, plain))
    ]
    assert torch.equal(*twice)
    with torch.no_grad():
        assert not torch.equal(layer(x)[0], plain(x)[0])


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own forward mode
@torch.no_grad()
def test_transforms_use_the_weights_as_they_are():
    layer = openrnn.GRU(9, 40, precision="bf16")
    plain, x = plain_of(layer), torch.randn(30, 4, 9)
    for run in (
        lambda each: torch.func.vmap(lambda row: each(row)[0])(torch.stack([x, 2 * x])),
        lambda each: torch.func.jvp(lambda row: each(row)[0], (x,), (torch.ones_like(x),)),
    ):
        for have, want in zip(results(run(layer)), results(run(plain)), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_compiled_and_copied_layers_round_as_well():
    layer, plain, _ = three(lambda **more: openrnn.LSTM(9, 40, **more))
    x = torch.randn(60, 2, 9)
    wanted = plain(x)[0]
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert each.spec.precision == "bf16"
        assert torch.equal(each(x)[0], wanted)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x)[0], wanted)
    assert torch.equal(layer.double()(x.double())[0], plain_of(layer).double()(x.double())[0])


def test_what_a_gpu_makes_of_it():
    spec = cells.lstm.spec(3, 4, precision="bf16")
    assert precision_of(spec, torch.float32, "cuda") == "tf32"
    assert precision_of(spec, torch.float32, "cpu") == "bf16"
    for name in ("fused", "cudnn"):
        table = openrnn.explain(spec, device="cuda", capability=(9, 0), backend=name, quiet=True)
        assert not any("precision" in reason for reason in table.refused[name])


def test_explain_says_how_weights_are_read(capsys):
    layer, x = openrnn.LSTM(9, 40, precision="bf16"), torch.randn(20, 3, 9)
    other, narrow = openrnn.LSTM(9, 40), openrnn.LSTM(9, 40, precision="bf16")
    openrnn.quantize(narrow, quiet=True)
    left = "weights are not rounded to bfloat16: "
    for options, words in (
        ({"what": layer, "x": x, "grad": False}, "weights are read as bfloat16\n"),
        ({"what": layer, "grad": False}, "read as bfloat16, where a call has T of 16 or"),
        ({"what": layer, "x": x}, left + "gradients are wanted\n"),
        ({"what": layer, "x": x, "grad": False, "dtype": "float64"}, left + "dtype float64, needs"),
        ({"what": layer, "x": x[:1], "grad": False}, left + "T 1 and B 3, needs T of 16 or"),
        ({"what": other, "x": x, "grad": False}, None),
        ({"what": narrow, "x": x}, None),
    ):  # fmt: skip
        openrnn.explain(**options)
        told = capsys.readouterr().out
        if words is None:
            assert "bfloat16" not in told.partition("fused")[0]
        else:
            assert words in told


def test_explain_says_what_16_bits_are_computed_in(capsys, monkeypatch):
    """Forward reads bfloat16 matrices as they are, unless it packs them for gradients."""
    monkeypatch.setattr(host, "MULTIPLIES_BF16", False)
    head, read = "computed in float32, between conversions of tensors", "read as bfloat16"
    for dtype, steps, grad, as_is in (
        (torch.bfloat16, 60, False, True), (torch.bfloat16, 60, True, False),
        (torch.bfloat16, 3, False, True), (torch.bfloat16, 3, True, True),
        (torch.float16, 40, False, False), (torch.float16, 3, False, False),
        (torch.float32, 40, False, None),
    ):  # fmt: skip
        layer = openrnn.GRU(8, 8).to(dtype)
        openrnn.explain(layer, torch.zeros(steps, 2, 8, dtype=dtype), grad=grad)
        said = capsys.readouterr().out
        assert (head in said) == (as_is is not None)
        assert (read in said) == bool(as_is)


def test_it_is_compiled_ahead():
    layer, other = openrnn.GRU(3, 4, precision="bf16"), openrnn.GRU(3, 4)
    count = openrnn.compile_kernels(layer, torch.float32, device="cpu")
    assert count == openrnn.compile_kernels(other, torch.float32, device="cpu") + 1
    count += 2  # the products with matrices as they are, of forward and of backward
    assert count == openrnn.compile_kernels(other, torch.bfloat16, device="cpu")


def test_the_product_adds_to_what_is_there():
    """As loops ask it where the gates take sums; here beside numbers of C that stay."""
    gates, units, inner, rows = 2, 2 * PANEL["float32"], 19, 3
    weight, a = torch.randn(gates * units, inner), torch.randn(rows, inner)
    args = matrices.pack_args(gates, units, units, inner, 1)
    panels = torch.empty(matrices.panel_elements("transpose_bf16", "float32", gates, units, inner))
    args.matrix, args.out = weight.data_ptr(), panels.data_ptr()
    launch.run(matrices.kernel("transpose_bf16", "float32"), args, 1)
    before = torch.randn(rows, gates * units)
    wanted = before.double() + a.double() @ weight.bfloat16().double().T
    run: ctypes._CFuncPtr = matrices.bf16_product().ctypes
    for begin, end, backwards in ((0, units, 0), (0, units, 1), (units // 2, units, 1)):
        c = before.clone()
        run(
            rows, inner, gates, units, units, begin, end, a.data_ptr(), inner, panels.data_ptr(), 0,
            c.data_ptr(), gates * units, 1, 0, backwards,
        )  # fmt: skip
        mine = torch.zeros(gates, units, dtype=torch.bool)
        mine[:, begin:end] = True
        mine = mine.flatten()
        assert torch.equal(c[:, ~mine], before[:, ~mine])
        torch.testing.assert_close(c[:, mine].double(), wanted[:, mine], rtol=1e-5, atol=1e-5)
