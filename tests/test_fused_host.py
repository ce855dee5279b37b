"""What surrounds the fused kernels, orders, small kernels, products, threads."""

import itertools
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from cases import CELLS, thinned
from torch.nn.functional import pad

import openrnn
from openrnn import cells
from openrnn.backends.fused import kernels
from openrnn.backends.fused import lengths as sorting
from openrnn.backends.fused.copies import MOST_BY_VALUE, copied, dense, narrowed
from openrnn.backends.fused.layer import layer_kernels, nibbles, spans
from openrnn.backends.fused.pass_runner import fill_flags
from openrnn.codegen import cuda
from openrnn.kernels.cuda.args import PLAIN, CopyRowsArgs, PermuteWeightsArgs
from openrnn.native import nvrtc
from openrnn.native.cublaslt import Layout, Product
from openrnn.schedule import Chunk

ABSENT = nvrtc.absent()
compiles = pytest.mark.skipif(ABSENT is not None, reason=f"cannot compile: {ABSENT}")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_spans_name_every_gate_in_its_order(count):
    for order in itertools.permutations(range(count)):
        found = spans(order)
        assert [gate for a, b in found for gate in range(a, b)] == list(order)
        # as few as possible: each product writes one
        assert all(before[1] != after[0] for before, after in itertools.pairwise(found))


def test_nibbles_come_back_from_64_bits():
    for order in ((0,), (2, 0, 1), tuple(range(16)), tuple(reversed(range(16)))):
        word = nibbles(order)
        assert -(2**63) <= word < 2**63
        assert tuple((word >> 4 * place) & 15 for place in range(len(order))) == order


@compiles
@pytest.mark.parametrize(("name", "dtype"), thinned(itertools.product(PLAIN, cuda.SIZES), 4))
def test_small_kernels_spill_nothing(name, dtype):
    for arch in ("sm_80", "sm_90", "sm_120"):
        for structs in (1, 7):
            source = cuda.plain_source(name, dtype, structs)
            made = nvrtc.binary(nvrtc.KernelSource(source, name, arch, name))
            assert made.resources.spilled == 0


def test_no_shipped_cell_has_more_gates_than_a_word_names():
    assert max(len(cell.gates) for cell in CELLS.values()) <= 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1024, 256, 32), (33, 250, 1030), (1, 7, 5), (7, 1, 16)])
def test_products_of_every_layout(sizes, dtype):
    """Against float64, in memory filled with nan; added up where asked; the same bits again."""
    rows, columns, inner = sizes
    torch.manual_seed(0)
    a = torch.randn(rows, inner, device="cuda", dtype=dtype)
    b = torch.randn(inner, columns, device="cuda", dtype=dtype)
    want = a.double() @ b.double()
    lefts = {False: a, True: a.t().contiguous()}
    rights = {False: b, True: b.t().contiguous()}
    for (turned_a, left), (turned_b, right) in itertools.product(lefts.items(), rights.items()):
        found = []
        for add in (False, True, False):
            out = torch.full_like(want, 1.0 if add else math.nan, dtype=dtype)
            Product(
                dtype, 0, sizes, Layout(left.shape[1], turned_a), Layout(right.shape[1], turned_b),
                Layout(columns),
            ).run(left.data_ptr(), right.data_ptr(), out.data_ptr(), add)  # fmt: skip
            error = (out.double() - float(add) - want).norm() / want.norm()
            assert error < (1e-3 if dtype == torch.float32 else 1e-2)
            found.append(out)
        assert torch.equal(found[0], found[2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 6, 13, 64])
def test_products_at_once_write_where_each_belongs(width, dtype):
    """One left side, several right ones, and results with room between them."""
    rows, inner, count, apart = 37, 19, 4, width + 3
    left = torch.randn(rows, inner, device="cuda").to(dtype)
    right = torch.randn(count, width, inner, device="cuda").to(dtype)
    out = torch.full((rows, count, apart), 7.0, device="cuda", dtype=dtype)
    Product(
        dtype, 0, (rows, width, inner), Layout(inner), Layout(inner, True, width * inner),
        Layout(count * apart, False, apart), count=count,
    ).run(left.data_ptr(), right.data_ptr(), out.data_ptr())  # fmt: skip
    want = torch.einsum("ri,cwi->rcw", left.double(), right.double())
    error = (out[..., :width].double() - want).norm() / want.norm()
    assert error < (1e-3 if dtype == torch.float32 else 1e-2)
    assert (out[..., width:] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 7, 8, 2048, 2049, 100_003])
def test_sums_in_fewer_bits(count, dtype):
    """As torch rounds them, with infinities, and what is beyond float16."""
    x = torch.randn(count, device="cuda") * 10.0 ** torch.randint(-6, 6, (count,), device="cuda")
    x[0] = math.inf
    assert torch.equal(narrowed(x, dtype), x.to(dtype))
    assert narrowed(x[:1] - math.inf, dtype).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 256, 257])
def test_lengths_within_a_chunk(batch):
    lengths = sorting.SortedLengths(torch.randint(0, 50, (batch,), device="cuda"), torch.empty(0))
    inside, order = sorting.cut_lengths(lengths, Chunk(1, 20, 33, 13))
    assert torch.equal(inside, (lengths.lengths - 20).clamp(0, 13))
    assert order is lengths.order


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 7, 256, 257, 5000, sorting.COUNTED + 1])
def test_rows_go_by_falling_length(batch):
    """As a stable sort has them, for lengths of which many are equal."""
    lengths = torch.randint(0, 50, (batch,), device="cuda")
    want = lengths.argsort(descending=True, stable=True)
    assert torch.equal(sorting.sort_lengths(lengths, None).order, want)
    room = torch.full_like(lengths, -1)
    assert sorting.sort_lengths(lengths, room).order is room
    assert torch.equal(room, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 8, 12, 37, 256, 650])
@pytest.mark.parametrize("given", [(), ("lengths",), ("mask",), ("lengths", "mask")], ids=str)
@pytest.mark.parametrize("more", [0, 3, 8])
def test_copies_of_sequences(width, dtype, given, more):
    """Zero past the lengths, where masked and in new columns, of every layout; no nan is read."""
    lengths = torch.tensor([0, 9, 4, 9, 1], device="cuda") if "lengths" in given else None
    mask = torch.rand(11, 5, device="cuda")[2:] < 0.3 if "mask" in given else None
    blank = torch.zeros(9, 5, dtype=torch.bool, device="cuda") if mask is None else mask
    if lengths is not None:
        blank = blank | (torch.arange(9, device="cuda")[:, None] >= lengths)
    x = torch.randn(9, 5, width, device="cuda", dtype=dtype)
    x[blank] = math.nan
    want = pad(x.masked_fill(blank[..., None], 0), (0, more))
    wide = torch.zeros(9, 5, width + 3, device="cuda", dtype=dtype)[..., 1 : 1 + width]
    far = torch.zeros(9, 5 * width + 1, device="cuda", dtype=dtype)[:, :-1].unflatten(1, (5, width))
    for layout in (
        x,
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        wide.copy_(x),
        far.copy_(x),
    ):
        assert torch.equal(copied(layout, width + more, lengths, mask), want)


def test_large_copies_by_value_are_left_to_torch(monkeypatch):
    """Ours copies one value at a time where rows are no multiples of 4 bytes."""
    monkeypatch.setattr(kernels, "plain", lambda *_: pytest.fail("a launch"))
    x = torch.randn(1 << 12, 8, 2 * 131)[..., :131].bfloat16()
    for width in (131, 136):
        found = copied(x, width)
        assert torch.equal(found, pad(x, (0, width - 131)))
        assert found.is_contiguous()


@pytest.mark.parametrize(
    ("size", "columns", "width"),
    [(16, 656, 656), (8, 652, 656), (4, 650, 656), (2, 651, 656)], ids=str,
)  # fmt: skip
def test_copies_take_as_many_bytes_at_a_time_as_rows_are_made_of(monkeypatch, size, columns, width):
    """Of 16 bits; where x begins and its strides count, too."""
    found = []

    def launch(blocks, words):
        names = [field.name for field in CopyRowsArgs.fields]
        found.append(width * 2 // dict(zip(names, words))["pieces"])

    kernel = SimpleNamespace(threads=256, launch=launch)
    monkeypatch.setattr(kernels, "plain", lambda *_: kernel)
    x = torch.zeros(1, 4, columns).bfloat16()
    copied(x, width)
    shifted = torch.zeros(4 * columns + 2).bfloat16()[2:].view(1, 4, columns)
    copied(shifted, width)
    copied(torch.zeros(1, 4, columns + 1).bfloat16()[..., :columns], width)
    assert found == [size, min(size, 4), 2]
    steps = torch.zeros(3, 4 * columns + 1).bfloat16()[:, :-1].unflatten(1, (4, columns))
    copied(steps, width)
    out = torch.zeros(4 * width + 1).bfloat16()[1:].view(1, 4, width)
    copied(x, width, out=out)
    assert found[3:] == [2, 2]


def test_a_large_misaligned_tensor_is_copied():
    """Above 4M values torch copies, and has nothing to do where the tensor is contiguous."""
    columns = 1032
    values = torch.randn(4 * columns * columns + 1)[1:].view(4 * columns, columns)
    assert values.data_ptr() % 16
    assert values.numel() > MOST_BY_VALUE
    made = dense(values)
    assert made.data_ptr() % 16 == 0
    assert torch.equal(made, values)


def test_no_copy_begins_inside_of_a_value():
    """As memory of another library may."""
    memory = torch.zeros(18, dtype=torch.uint8)[2:].numpy()
    foreign = torch.frombuffer(memory, dtype=torch.float32).view(1, 1, 4)
    with pytest.raises(ValueError, match="needs a multiple of 4"):
        copied(foreign)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_flags_are_filled_where_they_are_and_nowhere_else(dtype):
    """A buffer of its own, and one direction's part of y."""
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    y = torch.zeros(7, 5, 48, device="cuda", dtype=dtype)
    fill_flags(y[2:6, :, 16:32])
    part = y.view(bits)[2:6, :, 16:32]
    assert (part == -1).all()
    part.zero_()
    assert (y == 0).all()
    fill_flags(y)
    assert (y.view(bits) == -1).all()


@pytest.mark.gpu
def test_a_thread_without_a_context_may_launch_first():
    """Backward runs on autograd's thread, where nothing else may have touched the device yet."""
    kernel = kernels.plain("permute_weights", "float32", torch.cuda.current_device())
    matrix = torch.arange(6.0, device="cuda").view(2, 3)
    out = torch.full((3, 8), math.nan, device="cuda")
    wrong = []

    def launch():
        try:
            args = PermuteWeightsArgs(
                matrix=matrix.data_ptr(), row=3, out=out.data_ptr(), units=8, hidden=2, across=3,
                columns=3, gates=1, order=nibbles((0,)), transposed=True,
            )  # fmt: skip
            kernel.launch(1, args.words())
        except nvrtc.DriverError as error:
            wrong.append(str(error))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert not wrong
    assert torch.equal(out, pad(matrix.t(), (0, 6)))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1, 12, 31, 40, 97, 192])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_are_permuted(hidden, offset, dtype):
    """Gates in any order, rows up to a multiple of 8 of units, turned or not; at any address.

    The last matrices are permuted by one launch.
    """
    one = layer_kernels(cells.gru.spec(11, hidden), 0, dtype, torch.cuda.current_device())
    units, order, jobs = one.units, (2, 0, 1), []
    for columns, turned in ((11, False), (72, False), *[(hidden, True)] * 3):
        values = torch.randn(offset + 3 * hidden * columns, device="cuda", dtype=dtype)
        matrix = values[offset:].view(3 * hidden, columns)
        rows = matrix.unflatten(0, (3, hidden))[list(order)]
        across = units if turned else columns
        want = pad(rows, (0, across - columns, 0, units - hidden))
        want = want.permute(2, 0, 1) if turned else want
        assert torch.equal(one.permuted(matrix, order, turned, across), want)
        if not turned:  # with more columns
            wider = pad(want, (0, 16 - columns % 16))
            assert torch.equal(one.permuted(matrix, order, False, wider.shape[2]), wider)
        jobs.append((matrix, want, *one.permutation(matrix, order, turned, across)))
    _, _, _, every, (blocks, *_) = zip(*jobs[2:])
    for _, _, out, _, _ in jobs[2:]:
        out.fill_(math.nan)
    kernels.launch_several("permute_weights", one.dtype_name, one.device, every, blocks)
    for _, want, out, _, _ in jobs[2:]:
        assert torch.equal(out, want)


@pytest.mark.gpu
def test_explain_says_tiles_and_measures(capsys):
    layer = openrnn.LSTM(64, 64, device="cuda", dtype=torch.bfloat16, backend="fused")
    table = openrnn.explain(layer, torch.zeros(32, 16, 64, device="cuda").bfloat16(), measure=True)
    (row,) = (row for row in table.rows if row.chosen)
    forward, backward, measured = row.details
    assert "registers" in forward
    assert backward.startswith("backward: ")
    assert "us a step by the model" in backward
    assert measured.startswith("forward and backward of 32 steps of B 16: ")
    assert forward in capsys.readouterr().out
