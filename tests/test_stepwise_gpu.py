"""Loops of which no kernel holds R, on a GPU: each step is a GEMM and a launch of the cell."""

from dataclasses import replace

import pytest
import torch
from cases import CELLS, CORNERS, cases, check, examples, with_cell
from hypothesis import HealthCheck, given, settings
from test_backends import OWN, awkward, functions, idle, sided
from test_fused_gpu import FAIR, exactly, layer, step

import openrnn
from openrnn import cells, memo
from openrnn.backends.fused import kernels
from openrnn.backends.fused.stepwise import stepwise_kinds
from openrnn.tuning import chunks, plan

pytestmark = pytest.mark.gpu


@pytest.fixture
def stepwise(monkeypatch):
    """No other kernel, whatever the size."""

    def forget():
        kernels.kernel.cache_clear()
        memo.clear()

    monkeypatch.setattr(plan, "holding_r", lambda *_: ())
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("cell", CELLS)
def test_corners(stepwise, cell, corner):
    """Masks, clip, states, biases, directions, layers, layouts, dtypes of every cell."""
    check(with_cell(CORNERS[corner], CELLS[cell]), "fused")


@pytest.fixture(params=["forward", "backward"])
def one_stepwise(request, monkeypatch):
    """Only this kind of loop is stepwise: the kernel of the other holds R, but of no stack."""

    def forget():
        kernels.kernel.cache_clear()
        memo.clear()

    whole = plan.holding_r

    def others(loop, loops=1, layers=1):
        return () if loop.kind == request.param or layers > 1 else whole(loop, loops)

    monkeypatch.setattr(plan, "holding_r", others)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_beside_a_loop_that_holds_r(one_stepwise, cell, corner):
    """With lengths all loops save activations of rows that are sorted by them."""
    check(with_cell(CORNERS[corner], CELLS[cell]), "fused")


@pytest.mark.parametrize("cell", [awkward, idle, sided, functions], ids=lambda cell: cell.name)
@pytest.mark.parametrize("name", OWN)
def test_a_cell_of_ones_own(stepwise, name, cell):
    check(replace(with_cell(CORNERS["everything"], cell), **OWN[name]), "fused")


@pytest.mark.parametrize("cell", CELLS)
def test_any_call(stepwise, cell):
    @settings(examples(0.5), suppress_health_check=list(HealthCheck))
    @given(cases(CELLS[cell]))
    def holds(case):
        check(case, "fused")

    holds()


@pytest.mark.parametrize("dtype", FAIR, ids=str)
@pytest.mark.parametrize("batch", [1, 70])
@pytest.mark.parametrize(
    ("cell", "hidden"), [(cells.lstm, 2560), (cells.gru, 3001), (cells.peephole_lstm, 2304)],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_sizes_that_no_kernel_holds(cell, hidden, batch, dtype):
    """Outputs and gradients against float64; the same bits each time, from a graph, too."""
    net = layer(cell, hidden, dtype)
    about = torch.cuda.get_device_properties()
    problem = openrnn.Problem(
        net.spec, dtype, "cuda", (about.major, about.minor), grad=True,
        processors=about.multi_processor_count,
    )  # fmt: skip
    if not stepwise_kinds(problem):
        pytest.skip("this device holds it")
    x = torch.randn(6, batch, 24, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(6, batch, hidden, device="cuda", dtype=dtype)
    found = step(net, x, dy)
    wide = x.detach().double().requires_grad_()
    for have, want in zip(found, step(exactly(net), wide, dy.double())):
        assert (have - want).norm() <= FAIR[dtype] * want.norm()
    for _ in range(4):  # a program replaces the pass, and a graph that one's operations
        for have, again in zip(found, step(net, x, dy)):
            assert torch.equal(have, again)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step(net, x, dy)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step(net, x, dy)
    graph.replay()
    for have, again in zip(found, captured):
        assert torch.equal(have, again)


@pytest.mark.parametrize("options", [{}, {"recompute": "gates"}], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_chunks_of_time(stepwise, bidirectional, options, monkeypatch):
    """States go from chunk to chunk as from step to step; resets and lengths are cut."""
    net = layer(cells.lstm, 67, torch.float32, bidirectional=bidirectional, **options)
    exact = exactly(net)
    x = torch.randn(12, 5, 24, device="cuda")
    masks = {
        "lengths": torch.tensor([12, 7, 0, 3, 12], device="cuda"),
        "reset": torch.rand(12, 5, device="cuda") < 0.3,
    }

    def call(module, dtype):
        leaf = x.to(dtype).requires_grad_()
        y, (h, c) = module(leaf, **masks)
        total = y.square().sum() + h.sum() + (c * c).sum()
        return [y.detach(), *torch.autograd.grad(total, [leaf, *module.parameters()])]

    name = "for_recompute" if options else "for_memory"
    monkeypatch.setattr(chunks, name, lambda *asked: 5)
    for have, want in zip(call(net, torch.float32), call(exact, torch.float64)):
        assert (have - want).norm() <= FAIR[torch.float32] * want.norm()
