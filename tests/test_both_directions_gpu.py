"""Both directions of a layer at once on the GPU: the bits of one after the other."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from cases import under

import openrnn
from openrnn.backends.fused import program, schedules
from openrnn.schedule import both_directions
from openrnn.tuning import measured

pytestmark = pytest.mark.gpu
T, B, WIDTH = 200, 20, 24


def given(kind="LSTM", hidden=128, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    module = getattr(openrnn, kind)(
        WIDTH, hidden, bidirectional=True, device="cuda", dtype=dtype, backend="fused", **options
    )
    x = torch.randn(T, B, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    return module, x


def step(module, x, **masks):
    """Results and gradients."""
    torch.manual_seed(1)
    y, states = module(x, **masks)
    results = [y, *(states if isinstance(states, tuple) else (states,))]
    weights = [torch.randn_like(result) for result in results]
    return [*results, *torch.autograd.grad(results, [x, *module.parameters()], weights)]


def apart(monkeypatch, module, x, **masks):
    """The same, one direction after the other."""
    run = partial(step, module, x, **masks)
    return under(monkeypatch, module, run, schedules, "choose_both_directions", lambda *_: False)


def masks_of(names, batch=B):
    every = {
        "lengths": torch.randint(0, T + 1, (batch,), device="cuda"),
        "reset": torch.rand(T, batch, device="cuda") < 0.05,
    }
    return {name: every[name] for name in names}


def listed(module, x, **masks):
    """How often the side stream waits for the main one, forward and backward."""
    return on_side(module, x, "wait  for main", **masks)


def on_side(module, x, what, **masks):
    """How often the side stream does something, by the call's schedule."""
    table = openrnn.explain(module, x, schedule=True, quiet=True, **masks)
    lines = (line for row in table.rows for line in row.details)
    return sum(line.startswith("side") and what in line for line in lines)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [13, 64, 256])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("masks", [(), ("lengths",), ("reset",)], ids=str)
def test_bits_are_those_of_one_after_the_other(monkeypatch, capsys, kind, hidden, dtype, masks):
    """Also where the call is repeated."""
    module, x = given(kind, hidden, dtype)
    masks = masks_of(masks)
    wanted = apart(monkeypatch, module, x, **masks)
    for _ in range(4):
        assert all(map(torch.equal, step(module, x, **masks), wanted))
    if not masks:
        assert listed(module, x) == 2


GRIDS = [
    ("LSTM", 1024, torch.bfloat16, 16), ("LSTM", 1024, torch.float16, 64),
    ("GRU", 1024, torch.bfloat16, 20), ("GRU", 1024, torch.bfloat16, 64),
    ("LSTM", 768, torch.float32, 16), ("GRU", 1000, torch.float32, 20),
]  # fmt: skip


@pytest.mark.parametrize("masks", [(), ("lengths",), ("reset",)], ids=str)
@pytest.mark.parametrize(("kind", "hidden", "dtype", "batch"), GRIDS, ids=str)
def test_grids_of_half_the_device(monkeypatch, kind, hidden, dtype, batch, masks):
    """The bits of the same kernels on one stream; near those of the kernels of one direction."""
    module, _ = given(kind, hidden, dtype)
    x = torch.randn(T, batch, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    about = torch.cuda.get_device_properties(0)
    if not measured.knows((about.major, about.minor), about.multi_processor_count):
        pytest.skip("whether this device runs two of its grids at once was not measured")
    assert on_side(module, x, "loop")
    masks = masks_of(masks, batch)
    near = apart(monkeypatch, module, x, **masks)
    run = partial(step, module, x, **masks)
    wanted = under(monkeypatch, module, run, both_directions, "SIDE", both_directions.MAIN)
    for number in range(4):  # too large for a call that is remembered
        found = run()
        assert all(map(torch.equal, found, wanted)), number
    for one, other in zip(found, near):
        assert (one - other).double().norm() <= 2e-2 * other.double().norm()


@pytest.mark.parametrize("masks", [(), ("lengths",), ("reset",), ("lengths", "reset")], ids=str)
def test_inputs_of_a_chunk_are_multiplied_beside_both_loops(monkeypatch, masks):
    """The bits of products before the loops, also of calls that repeat."""
    module, _ = given(hidden=512, num_layers=2)
    x = torch.randn(T, 32, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    masks = masks_of(masks, 32)
    run = partial(step, module, x, **masks)
    cut = [0, 40, 90, T]
    monkeypatch.setattr(schedules, "choose_both_directions", lambda *_: 2)
    wanted = under(monkeypatch, module, run, schedules, "edges_of_both", lambda *_: [])
    chunked = (
        schedules, "edges_of_both",
        lambda pair, *_: cut if pair.options.kind == "forward" else [],
    )  # fmt: skip
    for found in under(monkeypatch, module, lambda: [run() for _ in range(5)], *chunked):
        assert all(map(torch.equal, found, wanted))
    listed = partial(on_side, module, x, "input_product", **dict.fromkeys(masks, True))
    assert under(monkeypatch, module, listed, *chunked) == 2 * 2 * 2


@pytest.mark.parametrize("cut", [[0, 60, T], [0, 10, 90, T], [0, 150, T]], ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("masks", [(), ("lengths",), ("reset",), ("lengths", "reset")], ids=str)
def test_dx_of_a_chunk_is_computed_beside_both_loops(monkeypatch, kind, cut, masks):
    """Both directions add to it in another order; all calls have the same bits, also of a graph."""
    module, _ = given(kind, 512, num_layers=2, dropout=0.1)
    x = torch.randn(T, 32, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    masks = masks_of(masks, 32)
    run = partial(step, module, x, **masks)
    monkeypatch.setattr(schedules, "choose_both_directions", lambda *_: 2)
    near = under(monkeypatch, module, run, schedules, "edges_of_both", lambda *_: [])
    near = [one.detach() for one in near]  # no capture bears an autograd graph of this stream
    chunked = (
        schedules, "edges_of_both",
        lambda pair, *_: cut if pair.options.kind == "backward" else [],
    )  # fmt: skip

    def several():
        found = [[one.detach() for one in run()] for _ in range(5)]
        module.eval()
        grad = torch.randn(T, 32, 1024, device="cuda", dtype=torch.bfloat16)
        leaves = [x, *module.parameters()]
        first = torch.autograd.grad(module(x, **masks)[0], leaves, grad)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = torch.autograd.grad(module(x, **masks)[0], leaves, grad)
        for _ in range(3):
            graph.replay()
        module.train()
        return found, first, replayed

    found, first, replayed = under(monkeypatch, module, several, *chunked)
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))
    assert all(map(torch.equal, replayed, first))
    for one, other in zip(found[0], near):
        assert (one - other).double().norm() <= 1e-2 * other.double().norm()
    beside = partial(on_side, module, x, "gradient_products  of x", **dict.fromkeys(masks, True))
    assert under(monkeypatch, module, beside, *chunked) == 2 * 2 * (len(cut) - 2)


def test_products_of_weights_run_beside_the_layer_below(monkeypatch):
    """The bits of products after the loops, also from a graph."""
    module, _ = given(hidden=512, num_layers=3, dropout=0.1)
    x = torch.randn(T, 32, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    run = partial(step, module, x)
    # whatever runs beside the loops
    monkeypatch.setattr(schedules, "choose_both_directions", lambda *_: 2)
    monkeypatch.setattr(schedules, "edges_of_both", lambda *_: [])
    wanted = under(monkeypatch, module, run, schedules, "idle", lambda *_: 0.0)
    table = openrnn.explain(module, x, schedule=True, quiet=True)
    lines = [line for row in table.rows for line in row.details]
    about = torch.cuda.get_device_properties(0)
    if measured.knows((about.major, about.minor), about.multi_processor_count):
        for stream in ("side 2", "side 4"):
            assert any(line.startswith(stream) and "of weights" in line for line in lines)
    for _ in range(3):
        assert all(map(torch.equal, run(), wanted))
    del wanted  # its autograd graph is of this stream, which no capture bears
    module.eval()
    grad = torch.randn(T, 32, 1024, device="cuda", dtype=torch.bfloat16)
    leaves = [x, *module.parameters()]
    first = torch.autograd.grad(module(x)[0], leaves, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(module(x)[0], leaves, grad)
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, found, first))


def test_grids_at_once_are_replayed(monkeypatch):
    """Few steps: a call that is remembered holds at most 64 MiB."""
    module, _ = given(hidden=1024)
    x = torch.randn(24, 16, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wanted = step(module, x)
    made = []
    run = program.Program.run
    monkeypatch.setattr(program.Program, "run", lambda *given: made.append(1) or run(*given))
    for _ in range(4):
        assert all(map(torch.equal, step(module, x), wanted))
    assert made


def test_grids_from_several_threads():
    """Each thread has streams of its own: more loops are launched than the device holds."""
    module, _ = given(hidden=1024)
    inputs = [torch.randn(T, 16, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    with torch.no_grad():
        wanted = [module(x)[0].clone() for x in inputs]

    def run(x):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            found = [module(x)[0] for _ in range(30)]
            torch.cuda.current_stream().synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for found, want in zip(pool.map(run, inputs), wanted):
            assert all(torch.equal(one, want) for one in found)


def test_layers_with_dropout_between(monkeypatch):
    module, x = given(num_layers=3, dropout=0.5)
    wanted = apart(monkeypatch, module, x)
    for _ in range(3):
        assert all(map(torch.equal, step(module, x), wanted))


def test_short_calls_and_recompute_stay_as_they_are():
    module, x = given()
    assert listed(module, x[:4]) == 0
    module, x = given(recompute="gates")
    assert listed(module, x) == 0


def test_many_calls_one_after_the_other(monkeypatch):
    """Memory of the side stream goes round without being written too early."""
    module, x = given(hidden=256)
    others = [torch.randn_like(x) for _ in range(4)]
    with torch.no_grad():
        wanted = [module(other)[0].clone() for other in others]
        for number in range(200):
            y, _ = module(others[number % 4])
            noise = [torch.full_like(y, float("nan")) for _ in range(3)]
            assert torch.equal(y, wanted[number % 4])
            del noise
    wanted = [step(module, other.requires_grad_()) for other in others]
    for number in range(40):
        found = step(module, others[number % 4])
        assert all(map(torch.equal, found, wanted[number % 4]))


def test_in_a_graph_and_on_other_streams():
    module, x = given()
    with torch.no_grad():
        wanted, _ = module(x)[0], module(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = [module(x)[0] for _ in range(3)]
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(one, wanted) for one in found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = module(x)
        x.mul_(2)
        again, _ = module(x)
        graph.replay()
        assert torch.equal(y, again)
