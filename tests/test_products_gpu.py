"""Products of matrices that are padded or transposed for them, on a GPU."""

import itertools

import pytest
import torch
from test_fused_gpu import FAIR, exactly, step
from test_fused_products import make_matrices

import openrnn
from openrnn import cells
from openrnn.backends.fused.weight_gradients import Rows, transposed_rows
from openrnn.native.cublaslt import Layout, product_for

pytestmark = pytest.mark.gpu

OPTIONS = [
    {}, {"bidirectional": True}, {"num_layers": 3}, {"num_layers": 3, "bidirectional": True},
    {"num_layers": 2, "recompute": "gates"}, {"num_layers": 3, "wavefront": 4},
]  # fmt: skip


def compare(cell, inputs, hidden, steps, batch, dtype, given=None, **options):
    """Outputs and gradients against float64, and the same bits once a call is a program."""
    torch.manual_seed(hidden)
    net = openrnn.Recurrent(cell, inputs, hidden, device="cuda", dtype=dtype, **options)
    x = torch.randn(steps, batch, inputs, device="cuda", dtype=dtype, requires_grad=True)
    width = hidden * (2 if options.get("bidirectional") else 1)
    dy = torch.randn(steps, batch, width, device="cuda", dtype=dtype)
    first, *others = (step(net, x, dy, **given or {}) for _ in range(5))
    wide = x.detach().double().requires_grad_()
    wanted = step(exactly(net), wide, dy.double(), **given or {})
    for have, want in zip(first, wanted):
        assert have.is_contiguous()
        assert (have - want).norm() <= FAIR[dtype] * want.norm()
    for again, (have, want) in itertools.product(others, enumerate(first)):
        assert torch.equal(again[have], want)


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("inputs", "hidden"), [(6, 13), (39, 64), (50, 50)])
@pytest.mark.parametrize("cell", [cells.lstm, cells.gru], ids=lambda cell: cell.name)
def test_products_of_any_size(monkeypatch, cell, inputs, hidden, options, dtype):
    make_matrices(monkeypatch)
    compare(cell, inputs, hidden, 16, 9, dtype, **options)


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("given", [("lengths",), ("reset",), ("lengths", "reset")], ids=str)
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_with_masks(monkeypatch, options, given, dtype):
    make_matrices(monkeypatch)
    masks = {
        "lengths": torch.tensor([16, 0, 4, 7, 16, 1, 9, 16, 3], device="cuda"),
        "reset": torch.rand(16, 9, device="cuda") < 0.1,
    }
    compare(cells.lstm, 39, 50, 16, 9, dtype, {name: masks[name] for name in given}, **options)


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize(
    ("inputs", "hidden", "steps", "batch"),
    [(161, 512, 200, 32), (650, 650, 35, 20), (512, 512, 100, 64)],
)
def test_sizes_at_which_they_are_made(inputs, hidden, steps, batch, dtype):
    compare(cells.lstm, inputs, hidden, steps, batch, dtype)


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "stride"), [(1, 1, 1), (37, 72, 80), (512, 64, 128), (1000, 9, 33)]
)
def test_a_transposed_matrix(rows, columns, stride, dtype):
    matrix = torch.randn(rows, stride, device="cuda").to(dtype)
    made = transposed_rows(Rows(matrix.data_ptr(), stride), rows, columns, matrix)
    assert made.shape == (columns, -(-rows // 8) * 8)
    assert torch.equal(made[:, :rows], matrix[:, :columns].t())
    assert not made[:, rows:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes", [(8192, 2048, 512), (1000, 264, 72), (16384, 4096, 1024)], ids=str
)
def test_smaller_tiles_give_the_same_bits(sizes, dtype):
    rows, columns, inner = sizes
    x = torch.randn(rows, inner, device="cuda", dtype=dtype)
    weight = torch.randn(columns, inner, device="cuda", dtype=dtype)
    found = [torch.full((rows, columns), torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
    layouts = Layout(inner), Layout(inner, True), Layout(columns)
    for smaller, out in zip((False, True), found):
        product = product_for(dtype, x.device.index, sizes, *layouts, smaller_tiles=smaller)
        product.run(x.data_ptr(), weight.data_ptr(), out.data_ptr())
    assert torch.equal(*found)
    torch.testing.assert_close(
        found[0].double(), x.double() @ weight.double().t(), rtol=1e-2, atol=1
    )
