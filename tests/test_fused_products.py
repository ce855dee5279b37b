"""What follows the reverse time loop: products over all steps, by chunk; no device needed."""

import ctypes
import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
import torch
from cases import thinned
from loops import kernels_of_an_h200
from test_fused_launches import clear_caches, named, without_side_stream
from torch.nn.functional import pad

from openrnn import cells
from openrnn.backends.base import Call, Cotangents, Needs
from openrnn.backends.fused import (
    backend,
    kernels,
    products,
    schedules,
    weight_gradients,
)
from openrnn.codegen.config import BackwardConfig, ForwardConfig
from openrnn.dispatch import BACKENDS
from openrnn.kernels.cuda.args import BackwardArgs, CopyRowsArgs, PermuteWeightsArgs
from openrnn.native.cublaslt import Algorithm, MatmulPlan, Product
from openrnn.params import module_slots
from openrnn.spec import Problem
from openrnn.tuning import chunks

STEPS, BATCH, WIDTH = 11, 4, 6
CONFIGS = {
    "forward": ForwardConfig(16, 1, 2, 1, 1, 1, 4),
    "backward": BackwardConfig(16, 1, 4, 2, 1, 1, 3),
}


def at(address, shape, stride=None):
    """The float32 numbers that lie there, row by row."""
    stride = stride or shape[-1]
    count = (shape[0] - 1) * stride + shape[1]
    raw = numpy.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
    return torch.as_strided(torch.from_numpy(raw), shape, (stride, 1))


def multiply(product, a, b, d, add=False):
    """What `cublaslt.Product.run` does."""
    rows, columns, inner = product.sizes
    layouts = product.a, product.b, product.d
    for number in range(product.count):
        starts = [
            start + 4 * number * layout.batch_stride for start, layout in zip((a, b, d), layouts)
        ]
        x, w, y = layouts
        left = at(starts[0], (inner, rows) if x.transposed else (rows, inner), x.stride)
        right = at(starts[1], (columns, inner) if w.transposed else (inner, columns), w.stride)
        out = at(starts[2], (rows, columns), y.stride)
        found = (left.T if x.transposed else left) @ (right.T if w.transposed else right)
        out.copy_(out + found if add else found)


def permute_weights(args):
    """What permute_weights.cuh does."""
    matrix = at(args.matrix, (args.gates * args.hidden, args.columns), args.row)
    taken = matrix.unflatten(0, (args.gates, args.hidden))
    taken = taken[[args.order >> 4 * gate & 15 for gate in range(args.gates)]]
    wide = pad(taken, (0, args.across - args.columns, 0, args.units - args.hidden))
    made = wide.permute(2, 0, 1) if args.transposed else wide
    at(args.out, (1, made.numel()))[0].copy_(made.flatten())


def copy_rows(args):
    """What copy_rows.cuh does, but for rows of zeros."""
    assert args.out_width / args.pieces in (1, 2, 4)  # float32 values of 4, 8 or 16 bytes
    count = (args.steps - 1) * args.x_step + (args.batch - 1) * args.x_row + args.width
    x = at(args.x, (1, count))[0]
    x = x.as_strided((args.steps, args.batch, args.width), (args.x_step, args.x_row, 1)).clone()
    if args.lengths:
        lengths = numpy.ctypeslib.as_array((ctypes.c_int64 * args.batch).from_address(args.lengths))
        x[torch.arange(args.steps)[:, None] >= torch.from_numpy(lengths)] = 0
    if args.mask:
        count = args.steps * args.batch
        mask = numpy.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(args.mask))
        x[torch.from_numpy(mask).view(args.steps, args.batch) != 0] = 0
    out = at(args.out, (args.steps * args.batch, args.out_width))
    out.copy_(pad(x, (0, args.out_width - args.width)).flatten(0, 1))


class Kernel:
    """A launch that leaves given gate gradients, those of its steps, or arranges weights."""

    threads, max_clusters = 256, 64

    def __init__(self, kind, left):
        self.kind, self.left = kind, left

    def launch(self, blocks, words, begun=0):
        if self.kind == "permute_weights":
            permute_weights(named(PermuteWeightsArgs, words))
        if self.kind == "copy_rows":
            copy_rows(named(CopyRowsArgs, words))
        if self.kind == "backward":
            args = named(BackwardArgs, words)
            self.left.begun.append(begun)
            at(args.d_gates, (args.steps * BATCH, self.left.shape[-1])).copy_(
                self.left.next(args.steps).reshape(args.steps * BATCH, -1)
            )


class Given:
    """Gate gradients (T, B, G*H) that chunks take in the order in which backward runs them."""

    def __init__(self, values, reverse):
        self.values, self.reverse, self.shape, self.begun = values, reverse, values.shape, []

    def next(self, steps):
        taken = self.values[:steps] if self.reverse else self.values[-steps:]
        self.values = self.values[steps:] if self.reverse else self.values[:-steps]
        return taken


def make_matrices(monkeypatch):
    """Products of any size are of matrices that are padded or transposed for them."""
    monkeypatch.setattr(products, "PADDED_FROM", {2: 0.0, 4: 0.0})
    monkeypatch.setattr(products, "TRANSPOSED_DX_FROM", (0, 0))
    monkeypatch.setattr(products, "TRANSPOSED_ROWS_FROM", (0, 0, 0.0))
    monkeypatch.setattr(products, "reads_rows", lambda device: True)


def divide(monkeypatch, number, made):
    """Calls have that many chunks, or others whose products run beside the loops of the next.

    made: see `make_matrices`.
    """
    if made:
        make_matrices(monkeypatch)
    monkeypatch.setattr(schedules, "choose_both_directions", lambda *_: number == "at once")
    monkeypatch.setattr(schedules, "idle", lambda *_: 0.0)
    if isinstance(number, int):
        monkeypatch.setattr(chunks, "for_memory", lambda *_: number)
        return
    without_side_stream(monkeypatch, lambda: None)
    if number != "at once":
        monkeypatch.setattr(schedules, "edges", lambda *_: list(number))


MASKS = (), ("lengths",), ("reset",), ("lengths", "reset")
NUMBERS = 1, 3, 11, (0, 4, STEPS), (0, 1, 4, STEPS), "at once"
BOTH = False, True


@pytest.mark.parametrize(
    ("hidden", "masks", "starts", "reverse", "number", "made"),
    # no factor of the numbers of values: a fifth has each of them
    thinned(itertools.product([16, 13], MASKS, BOTH, BOTH, NUMBERS, BOTH), 5),
    ids=str,
)
def test_products_of_chunks_are_those_of_all_steps(
    monkeypatch, hidden, masks, starts, reverse, number, made
):
    """dx, dW and dR of one direction, against sums written out; H and I no multiples of 8."""
    torch.manual_seed(0)
    spec = cells.lstm.spec(WIDTH, hidden, bidirectional=True, bias_mode="none")
    given = {"lengths": torch.tensor([11, 0, 4, 7]), "reset": torch.rand(STEPS, BATCH) < 0.3}
    given = {name: given[name] for name in masks}
    lengths = given.get("lengths", torch.full((BATCH,), STEPS))
    live = torch.arange(STEPS)[:, None] < lengths
    d_gates = torch.randn(STEPS, BATCH, 4 * hidden) * live[..., None]
    x = torch.randn(STEPS, BATCH, WIDTH)
    y = torch.randn(STEPS, BATCH, 2 * hidden) * live[..., None]
    states = [torch.randn(2, BATCH, hidden) for _ in "hc"] if starts else []
    weights = [torch.randn(slot.shape) for slot in module_slots(spec)]
    padded = pad(d_gates.unflatten(-1, (4, hidden)), (0, 16 - hidden)).flatten(-2)
    lefts = [
        Given(padded if way == reverse else torch.zeros_like(padded), way) for way in (False, True)
    ]
    directions = iter(lefts)
    divide(monkeypatch, number, made)
    monkeypatch.setattr(kernels, "plain", lambda name, *_: Kernel(name, None))

    def kernel(loop, *_):
        given = next(directions) if loop.kind == "backward" else None
        return Kernel(loop.kind, given), CONFIGS[loop.kind]

    kernels_of_an_h200(monkeypatch, kernel)
    monkeypatch.setattr(backend, "On", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Product, "run", multiply)
    clear_caches()
    problem = Problem(spec, torch.float32, "cpu", grad=True, **dict.fromkeys(masks, True))
    call = Call(problem, x, states, weights, **given)
    reserve = [
        torch.zeros(shape, dtype=dtype)
        for shape, dtype in BACKENDS["fused"].reserve(problem, STEPS, BATCH)
    ]
    needs = Needs(True, (True,) * len(states), (True,) * len(weights), ())
    found = BACKENDS["fused"].backward(call, y, reserve, Cotangents(y, [None, None], []), needs)
    clear_caches()

    d_input, d_recurrent = torch.zeros(4 * hidden, WIDTH), torch.zeros(4 * hidden, hidden)
    place = 2 if reverse else 0
    h = y[..., hidden:] if reverse else y[..., :hidden]
    reset = given.get("reset", torch.zeros(STEPS, BATCH, dtype=torch.bool))
    for b in range(BATCH):
        for t in range(int(lengths[b])):
            d_input += torch.outer(d_gates[t, b], x[t, b])
            other = t + 1 if reverse else t - 1
            if 0 <= other < lengths[b]:
                before = h[other, b] * (not reset[max(t, other), b])
            elif starts:
                before = states[0][int(reverse), b] * (reverse or not reset[0, b])
            else:
                continue
            d_recurrent += torch.outer(d_gates[t, b], before)
    beside = number if isinstance(number, tuple) else ()
    begun = (
        [0] + [7] * (len(beside) - 2) if beside else [0] * (number if number != "at once" else 1)
    )
    assert [given.begun for given in lefts] == [begun] * 2
    assert all(grad.is_contiguous() for grad in found.params)
    torch.testing.assert_close(found.x, d_gates @ weights[place], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.params[place], d_input, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.params[place + 1], d_recurrent, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("hidden", "columns"), [(16, 8), (16, 6), (13, 8), (13, 1)])
def test_a_weight_s_gradient_from_planes_of_gates(monkeypatch, hidden, columns, chunked):
    """A GRU's: gate 2 stands first, and what is padding is gone."""
    monkeypatch.setattr(Product, "run", multiply)
    monkeypatch.setattr(kernels, "plain", lambda name, *_: Kernel(name, None))
    torch.manual_seed(0)
    rows, gates, units = 12, 3, 16

    class Layer(SimpleNamespace):
        __hash__ = object.__hash__

    one = Layer(
        gates=gates,
        units=units,
        hidden=hidden,
        unpadded=hidden == units,
        dtype=torch.float32,
        device=0,
    )
    weights = SimpleNamespace(layer=one, w_hh=torch.empty(0))
    clear_caches()
    d_gates, values = torch.randn(rows, gates * units), torch.randn(rows, columns)
    found = weight_gradients.WeightGradient(weights, [(2, 3), (0, 2)], columns, chunked)
    for part in (slice(0, 5), slice(5, rows)) if chunked else (slice(0, rows),):
        mine = d_gates[part].contiguous()
        other = weight_gradients.padded_to_16_bytes(values[None, part])[0]
        found.add(
            weight_gradients.Rows(mine.data_ptr(), mine.shape[1]),
            weight_gradients.Rows(other.data_ptr(), other.shape[1]), len(mine),
        )  # fmt: skip
    by_gate = d_gates.unflatten(1, (gates, units))[:, [1, 2, 0], :hidden].flatten(1)
    made = found.finished()
    assert made.is_contiguous()
    torch.testing.assert_close(made, by_gate.T @ values)


@pytest.mark.parametrize(
    ("tiles", "splits", "waves", "wanted"),
    [
        # of 128 x 256, 128 x 128 and 128 x 160 values
        ([32768, 16384, 20480], [1, 1, 1], 4.0, 1),
        ([32768, 8192, 20480], [1, 1, 1], 4.0, 2),
        ([32768, 16384, 20480], [1, 2, 1], 4.0, 2),
        ([32768, 16384, 20480], [2, 1, 1], 4.0, 0),  # none splits K alike
        ([20480, 16384], [1, 1], 4.0, 0),  # small enough
        ([32768, 16384], [1, 1], 40.0, 0),  # too many waves
        ([32768, 8192], [1, 1], 4.0, 0),  # none is large enough
    ],
)
def test_smaller_tiles_are_chosen(monkeypatch, tiles, splits, waves, wanted):
    """By the waves that cuBLASLt says: those of all tiles, of each part of K."""
    processors = 132
    values = int(waves * processors * tiles[0] / splits[0])
    plan = MatmulPlan.__new__(MatmulPlan)
    plan._made, plan._proposed = [], (Algorithm * len(tiles))()
    for one, tile, split in zip(plan._proposed, tiles, splits):
        one.waves, one.words[0] = values * split / tile / processors, split
    monkeypatch.setattr(plan, "_split", lambda one: one.words[0])
    assert plan._with_smaller_tiles(len(tiles), values, processors) == wanted
    assert ctypes.sizeof(Algorithm) == 96  # as cublasLt.h has it
