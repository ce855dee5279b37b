"""Stacks as wavefronts on the GPU: the results of layer by layer."""

from functools import partial

import pytest
import torch
from cases import under

import openrnn
from openrnn import memo
from openrnn.backends.fused import stack_chunks
from openrnn.schedule import wavefront
from openrnn.tuning import chunks, measured

pytestmark = pytest.mark.gpu
T, B, WIDTH = 100, 20, 24
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MASKS = [(), ("lengths",), ("reset",), ("lengths", "reset")]


def given(kind="LSTM", hidden=128, dtype=torch.bfloat16, num_layers=3, wavefront=16, **options):
    torch.manual_seed(0)
    module = getattr(openrnn, kind)(
        WIDTH, hidden, num_layers, device="cuda", dtype=dtype, backend="fused",
        wavefront=wavefront, **options,
    )  # fmt: skip
    x = torch.randn(T, B, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    return module, x


def step(module, x, **masks):
    """Results and gradients."""
    torch.manual_seed(1)
    y, states = module(x, **masks)
    results = [y, *(states if isinstance(states, tuple) else (states,))]
    weights = [torch.randn_like(result) for result in results]
    return [*results, *torch.autograd.grad(results, [x, *module.parameters()], weights)]


def in_turn(monkeypatch, module, x, **masks):
    """The same, layer by layer; skips the test where this device runs it so anyway."""
    if "side" not in str(openrnn.explain(module, x, schedule=True, quiet=True)):
        pytest.skip("this device runs the stack layer by layer")
    run = partial(step, module, x, **masks)
    return under(monkeypatch, module, run, stack_chunks, "in_wavefront", lambda *_: None)


def masks_of(names, batch=B):
    every = {
        "lengths": torch.randint(0, T + 1, (batch,), device="cuda"),
        "reset": torch.rand(T, batch, device="cuda") < 0.05,
    }
    return {name: every[name] for name in names}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [37, 64, 250, 256])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_results_are_those_of_layer_by_layer(monkeypatch, kind, hidden, dtype, masks):
    """The bits of y and the states; gradients as close as sums in another order are.

    cuBLASLt multiplies float32 of other sizes by other kernels, some of which round to tf32 and
    others cut off: they differ by tf32's last bit.
    """
    module, x = given(kind, hidden, dtype)
    masks = masks_of(masks)
    wanted = in_turn(monkeypatch, module, x, **masks)
    states = 3 if kind == "LSTM" else 2
    first = step(module, x, **masks)
    for want, found in zip(wanted, first):
        error = (found - want).float().norm() / want.float().norm()
        assert error < (1e-3 if dtype == torch.float32 else 1e-2)
    if dtype != torch.float32:
        assert all(map(torch.equal, first[:states], wanted))
    for _ in range(4):  # also where the call is repeated
        assert all(map(torch.equal, step(module, x, **masks), first))


GRIDS = [
    ("LSTM", 1024, torch.bfloat16, 16), ("LSTM", 1024, torch.float16, 64),
    ("GRU", 1024, torch.bfloat16, 64), ("LSTM", 768, torch.float32, 16),
    ("LSTM", 1000, torch.bfloat16, 16), ("LSTM", 740, torch.float32, 20),
]  # fmt: skip


@pytest.mark.parametrize("masks", [(), ("lengths", "reset")], ids=str)
@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize(("kind", "hidden", "dtype", "batch"), GRIDS, ids=str)
def test_grids_of_half_the_device(monkeypatch, kind, hidden, dtype, batch, layers, masks):
    """The bits of the same kernels on one stream; near those of layer by layer."""
    module, _ = given(kind, hidden, dtype, layers, dropout=0.1)
    x = torch.randn(T, batch, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    masks = masks_of(masks, batch)
    near = in_turn(monkeypatch, module, x, **masks)
    table = openrnn.explain(module, x, schedule=True, quiet=True)
    lines = [line for row in table.rows for line in row.details]
    assert any(line.startswith("side") and "fill_flags" in line for line in lines)
    run = partial(step, module, x, **masks)
    wanted = under(monkeypatch, module, run, wavefront, "_streams", lambda _: 1)
    for number in range(4):  # too large for a call that is remembered
        found = run()
        assert all(map(torch.equal, found, wanted)), number
    for one, other in zip(found, near):
        assert (one - other).double().norm() <= 3e-2 * other.double().norm()


def test_grids_in_a_graph():
    """Forward and backward of two layers at a time, each on a stream of its own."""
    module, _ = given(hidden=1024, num_layers=2)
    x = torch.randn(T, 16, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.randn(T, 16, 1024, device="cuda", dtype=torch.bfloat16)]

    def run():
        y, _ = module(x)
        return [y.detach(), *torch.autograd.grad([y], [x, *module.parameters()], grads)]

    first = run()
    assert all(map(torch.equal, run(), first))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, found, first))
    with torch.no_grad():
        x.mul_(2)
    graph.replay()
    again = run()
    assert all(map(torch.equal, found, again))
    assert not torch.equal(again[0], first[0])


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
@pytest.mark.parametrize("layers", [2, 3, 11])
def test_any_chunk_and_any_number_of_layers(monkeypatch, layers, chunk):
    module, x = given(num_layers=layers, wavefront=chunk)
    wanted = in_turn(monkeypatch, module, x)
    found = step(module, x)
    assert all(map(torch.equal, found[:3], wanted))
    for want, one in zip(wanted, found):
        assert (one - want).float().norm() <= 1e-2 * want.float().norm()


@pytest.mark.parametrize("hidden", [37, 250, 256])
def test_dropout_between_layers(monkeypatch, hidden):
    module, x = given(dropout=0.5, num_layers=4, hidden=hidden)
    wanted = in_turn(monkeypatch, module, x)
    for _ in range(3):
        found = step(module, x)
        assert all(map(torch.equal, found[:3], wanted))
        for want, one in zip(wanted, found):
            assert (one - want).float().norm() <= 1e-2 * want.float().norm()


@pytest.mark.parametrize("hidden", [37, 128])
def test_states_of_all_steps(monkeypatch, hidden):
    module, x = given(hidden=hidden)
    with torch.no_grad():
        found = module(x, return_states=True)
        monkeypatch.setattr(stack_chunks, "in_wavefront", lambda *_: None)
        memo.clear()
        wanted = module(x, return_states=True)
    assert torch.equal(found[0], wanted[0])
    assert all(map(torch.equal, found[2], wanted[2]))


def test_the_model_chooses_and_explain_shows_it():
    about = torch.cuda.get_device_properties()
    place = (about.major, about.minor), about.multi_processor_count
    if place != (measured.CAPABILITY, measured.PROCESSORS):
        pytest.skip("the model chooses on the device that it was fitted to alone")
    # with dropout no launch runs all layers
    module, x = given(hidden=256, num_layers=8, wavefront=None, dropout=0.5)
    x = torch.randn(512, B, WIDTH, device="cuda", dtype=x.dtype)
    table = str(openrnn.explain(module, x, schedule=True, quiet=True))
    assert "side 7" in table
    assert "wavefront" in table
    module, _ = given(hidden=256, num_layers=8, wavefront=0)
    assert "side 2" not in str(openrnn.explain(module, x, schedule=True, quiet=True))


@pytest.mark.parametrize("hidden", [250, 256])
def test_many_calls_one_after_the_other(hidden):
    """Memory of side streams goes round without being written too early."""
    module, x = given(hidden=hidden)
    others = [torch.randn_like(x).requires_grad_() for _ in range(4)]
    wanted = [step(module, other) for other in others]
    for number in range(60):
        found = step(module, others[number % 4])
        noise = [torch.full_like(x, float("nan")) for _ in range(3)]
        assert all(map(torch.equal, found, wanted[number % 4]))
        del noise


@pytest.mark.parametrize("hidden", [37, 128])
def test_in_a_graph_and_on_other_streams(hidden):
    module, x = given(hidden=hidden)
    with torch.no_grad():
        wanted = module(x)[0]
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


@pytest.mark.parametrize("chunk", [1, 16], ids=["one-launch", "chunks"])
def test_compiled(chunk):
    """A graph of torch.compile has the bits of the call without it, in training and inference."""
    torch.compiler.reset()
    module, x = given(hidden=256, num_layers=4, wavefront=chunk)
    compiled = torch.compile(module, fullgraph=True)
    wanted = step(module, x)
    for _ in range(3):
        assert all(map(torch.equal, step(compiled, x), wanted))
    with torch.no_grad():
        assert torch.equal(compiled(x)[0], module(x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("chunk", [1, 16], ids=["one-launch", "chunks"])
@pytest.mark.parametrize("masks", [(), ("lengths", "reset")], ids=str)
def test_with_recompute_forward_runs_layers_at_the_same_time(
    monkeypatch, masks, chunk, kept, dtype
):
    """Results are near those of layer by layer; in 16 bits and chunks they have their bits."""
    if chunk == 1 and kept > 1:
        pytest.skip("one launch keeps no states between chunks")
    monkeypatch.setattr(chunks, "for_recompute", lambda *_: kept)
    memo.clear()
    masks = masks_of(masks)
    module, x = given(hidden=256, dtype=dtype, wavefront=chunk, recompute="gates")
    lines = str(openrnn.explain(module, x, schedule=True, quiet=True))
    at_once = "forward of 3 layers in one launch" if chunk == 1 else "forward as a wavefront"
    assert at_once in lines
    assert ("backward with forward again as a wavefront" in lines) == (kept > 1)
    plain = openrnn.LSTM(
        WIDTH, 256, 3, device="cuda", dtype=dtype, backend="fused", wavefront=0, recompute="gates"
    )
    plain.load_state_dict(module.state_dict())
    wanted = step(plain, x, **masks)
    first = step(module, x, **masks)
    for want, found in zip(wanted, first):
        error = (found - want).float().norm() / want.float().norm()
        assert error < (1e-3 if dtype == torch.float32 else 1e-2)
    if dtype != torch.float32 and chunk != 1:
        assert all(map(torch.equal, first[:3], wanted))
    for _ in range(3):
        assert all(map(torch.equal, step(module, x, **masks), first))
    memo.clear()


@pytest.mark.parametrize("masks", [(), ("lengths", "reset")], ids=str)
@pytest.mark.parametrize("layers", [2, 3, 11])
@pytest.mark.parametrize(
    ("kind", "hidden", "dtype", "batch"),
    [
        *[("LSTM", hidden, dtype, B) for hidden in (37, 256) for dtype in DTYPES],
        ("GRU", 256, torch.bfloat16, B), *GRIDS,
    ],
    ids=str,
)  # fmt: skip
def test_gate_gradients_of_one_chunk_at_a_time(
    monkeypatch, kind, hidden, dtype, batch, layers, masks
):
    """The bits of a wavefront that holds those of all steps, but for sums over steps."""
    if layers == 11 and hidden > 256:
        pytest.skip("grids of many layers are the same as of three")
    masks = masks_of(masks, batch)
    module, _ = given(kind, hidden=hidden, dtype=dtype, num_layers=layers, wavefront=20)
    x = torch.randn(T, batch, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    if "as a wavefront" not in str(openrnn.explain(module, x, quiet=True)):
        pytest.skip("this device runs the stack layer by layer")
    wanted = step(module, x, **masks)
    memo.clear()
    row = len(module.spec.gates) * hidden * x.element_size()
    monkeypatch.setattr(chunks, "LARGEST_WAVEFRONT", layers * 30 * batch * row)  # of 30 steps
    found = step(module, x, **masks)
    kept = len(wanted) - len(list(module.parameters()))
    assert all(map(torch.equal, found[:kept], wanted))
    assert not all(map(torch.equal, found, wanted))  # so the sums were made of chunks
    for want, one in zip(wanted, found):
        assert (one - want).double().norm() <= 1e-2 * want.double().norm()
    for _ in range(3):
        assert all(map(torch.equal, step(module, x, **masks), found))
    memo.clear()


# forward is cut into three chunks of 100 steps, as backward is by `three_chunks`
RECOMPUTE = {"recompute": "gates", "wavefront": 40}


@pytest.fixture
def three_chunks(monkeypatch):
    """Backward with recompute has three chunks, whatever its size."""
    monkeypatch.setattr(chunks, "for_recompute", lambda *_: 3)
    memo.clear()
    yield
    memo.clear()


def runs_again_as_a_wavefront(module, x):
    lines = str(openrnn.explain(module, x, schedule=True, quiet=True))
    return "backward with forward again as a wavefront" in lines


@pytest.mark.usefixtures("three_chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [37, 128, 256])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_with_recompute_all_bits_are_those_of_layer_by_layer(
    monkeypatch, masks, kind, hidden, dtype
):
    """Both have the chunks of backward, and the products of each."""
    masks = masks_of(masks)
    module, x = given(kind, hidden=hidden, dtype=dtype, **RECOMPUTE)
    assert runs_again_as_a_wavefront(module, x)
    wanted = in_turn(monkeypatch, module, x, **masks)
    for _ in range(4):
        assert all(map(torch.equal, step(module, x, **masks), wanted))


@pytest.mark.usefixtures("three_chunks")
@pytest.mark.parametrize("layers", [2, 11])
def test_with_recompute_and_dropout(monkeypatch, layers):
    module, x = given(dropout=0.5, num_layers=layers, **RECOMPUTE)
    assert runs_again_as_a_wavefront(module, x)
    wanted = in_turn(monkeypatch, module, x)
    for _ in range(4):
        assert all(map(torch.equal, step(module, x), wanted))


@pytest.mark.usefixtures("three_chunks")
def test_with_recompute_in_a_graph():
    module, x = given(num_layers=4, **RECOMPUTE)
    grads = [torch.randn(T, B, 128, device="cuda", dtype=x.dtype)]

    def run():
        y, _ = module(x)
        return [y.detach(), *torch.autograd.grad([y], [x, *module.parameters()], grads)]

    for _ in range(3):
        wanted = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, found, wanted))


def test_with_recompute_a_wavefront_holds_a_chunk_of_each_layer():
    """And dx of all layers, where layer by layer holds two: no more."""
    layers, steps, batch, hidden = 4, 800, 64, 256
    x = torch.randn(steps, batch, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def peak(wavefront):
        module = openrnn.LSTM(
            hidden, hidden, layers, device="cuda", dtype=x.dtype, backend="fused",
            recompute="gates", wavefront=wavefront,
        )  # fmt: skip
        assert runs_again_as_a_wavefront(module, x) == bool(wavefront)
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y, _ = module(x)
            torch.autograd.grad([y], [x, *module.parameters()], [torch.ones_like(y)])
        return torch.cuda.max_memory_allocated() - before

    one = steps * batch * hidden * x.element_size()  # bytes of y, or of dx, of a layer
    # of six; a row of a step has 14 times the bytes of its y: docs/kernels.md
    chunk = one * 14 // 6
    more = peak(200) - peak(0)
    assert more <= (layers - 1) * chunk + (layers - 2) * one + (8 << 20)
