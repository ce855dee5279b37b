"""Dropout on a CUDA device: seeds that no host reads, so that each replay of a graph draws anew."""

import pytest
import torch

import openrnn
from openrnn import ops, philox

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # a refused call
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

SIZES = {"input_size": 16, "hidden_size": 32, "num_layers": 3, "dropout": 0.5}


def spec_and_flat(kind="lstm", **options):
    spec = ops.spec(kind, SIZES["input_size"], SIZES["hidden_size"], 3, dropout=0.5, **options)
    torch.manual_seed(0)
    return spec, torch.randn(ops.params_size(spec), device="cuda") / 6


@pytest.fixture
def seeds(monkeypatch):
    """Every seed that a call draws."""
    drawn = []
    plain = philox.draw

    def draw(*args):
        drawn.append(plain(*args))
        return drawn[-1]

    monkeypatch.setattr(philox, "draw", draw)
    return drawn


def graph_of(step):
    """A captured step and what it returns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    return graph, lambda: torch.cuda.graph(graph)


def gradients(layer, x):
    y, _ = layer(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the test's own doing
@pytest.mark.parametrize("hidden", [32, 37])
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_each_replay_draws_its_own_masks(backend, hidden, seeds):
    """Forward and backward of one replay share them: as an eager call with that seed gives."""
    torch.manual_seed(0)
    layer = openrnn.LSTM(**SIZES | {"hidden_size": hidden}, device="cuda", backend=backend)
    x = torch.randn(6, 4, 16, device="cuda", requires_grad=True)
    graph, capture = graph_of(lambda: gradients(layer, x))
    with capture():
        captured = gradients(layer, x)
    seed = seeds[-1]
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append((seed.tolist(), [tensor.clone() for tensor in captured]))
    assert len({tuple(numbers) for numbers, _ in seen}) == 3
    for (value, offset), found in seen:
        out = ops.forward(
            x.detach(), layer.weights(), layer.spec, seed=value, backend="reference",
            offset=offset % philox.OFFSETS,
        )  # fmt: skip
        grads = ops.backward(out.reserve, dy=2 * out.y)
        torch.testing.assert_close(found[0], out.y, atol=2e-3, rtol=2e-2)
        torch.testing.assert_close(found[1], grads["x"], atol=4e-3, rtol=2e-2)


def test_a_generator_registered_with_the_graph():
    layer = openrnn.LSTM(**SIZES, device="cuda", backend="fused").requires_grad_(False)
    x = torch.randn(6, 4, 16, device="cuda")
    mine = torch.Generator("cuda").manual_seed(3)
    graph, capture = graph_of(lambda: layer(x, generator=mine))
    graph.register_generator_state(mine)
    torch.manual_seed(1)
    before = torch.cuda.get_rng_state()
    with capture():
        y, _ = layer(x, generator=mine)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(y.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_generator_of_the_host_cannot_be_captured():
    layer = openrnn.LSTM(**SIZES, device="cuda", backend="fused").requires_grad_(False)
    x = torch.randn(6, 4, 16, device="cuda")
    mine = torch.Generator().manual_seed(3)
    _, capture = graph_of(lambda: layer(x, generator=mine))
    with pytest.raises(ValueError, match="generator is on cpu: a call inside a CUDA"), capture():
        layer(x, generator=mine)


@pytest.mark.parametrize("reset", [False, True])
def test_cudnn_begins_no_dropout_in_a_capture(reset):
    """Its states begin from a number of the host: a replay would repeat them."""
    layer = openrnn.LSTM(
        **SIZES, device="cuda", backend="cudnn", reset_dropout_state=reset
    ).requires_grad_(False)
    x = torch.randn(6, 4, 16, device="cuda")
    layer(x)
    with (
        pytest.raises(ValueError, match="every replay of a CUDA graph would draw the same masks"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()),
    ):
        layer(x)


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_the_same_seed_drops_the_same_units_as_on_the_cpu(backend):
    """Masks are a function of (seed, offset): y is zero in the same places of the lower output."""
    spec, flat = spec_and_flat()
    x = torch.randn(6, 4, 16, device="cuda")
    for seed, offset in ((7, 0), (-1, 3), (2**63, 2**24 - 1)):
        y = [
            ops.forward(a, b, spec, seed=seed, offset=offset, backend=name).y.cpu()
            for a, b, name in ((x, flat, backend), (x.cpu(), flat.cpu(), "reference"))
        ]
        torch.testing.assert_close(*y, atol=2e-3, rtol=2e-2)


def test_seeds_follow_from_torchs_generator_of_the_device():
    layer = openrnn.LSTM(**SIZES, device="cuda", backend="fused")
    x = torch.randn(6, 4, 16, device="cuda")
    torch.manual_seed(5)
    first, second = layer(x)[0], layer(x)[0]
    torch.manual_seed(5)
    assert torch.equal(layer(x)[0], first)
    assert not torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_device():
    layer = openrnn.LSTM(**SIZES, device="cuda", backend="fused")
    x = torch.randn(6, 4, 16, device="cuda", requires_grad=True)
    gradients(layer, x)
    try:
        torch.cuda.set_sync_debug_mode("error")
        gradients(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
