"""Training and inference loops on a GPU, whose runs become graphs."""

import gc
import threading

import pytest
import torch

import openrnn
from openrnn.native import graphs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """The graphs of a test alone."""
    gc.collect()
    monkeypatch.setattr(graphs, "GRAPHS", graphs.Graphs())


def count():
    return len(graphs.GRAPHS._kept)


def layer(**options):
    torch.manual_seed(0)
    options = {"num_layers": 3, "wavefront": 8, **options}
    return openrnn.LSTM(64, 64, backend="fused", device="cuda", dtype=torch.bfloat16, **options)


def drawn():
    return torch.randn(40, 9, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def step(module, x):
    y, _ = module(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 2),
        ({"wavefront": 0}, 1),  # forward has too few operations
        ({"wavefront": None, "bidirectional": True}, 2),
    ],
    ids=str,
)
def test_a_training_loop_becomes_graphs(options, least):
    """The same bits as of its first step; each step frees what it took, so addresses come again."""
    module, x = layer(**options), drawn()
    first = [one.clone() for one in step(module, x)]
    for _ in range(12):
        found = step(module, x)
        assert all(map(torch.equal, found, first))
        del found
    assert count() >= least
    with torch.no_grad():
        x.mul_(0.5)
    changed = step(module, x)
    module._repeats = type(module._repeats)()
    assert all(map(torch.equal, changed, step(module, x)))
    assert not torch.equal(changed[0], first[0])


def test_on_streams_and_in_captures():
    """A graph is launched on whatever stream is current, and none within a capture of the user."""
    module, x = layer(), drawn()
    first = [one.clone() for one in step(module, x)]
    for stream in [torch.cuda.Stream(), torch.cuda.Stream()] * 6:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step(module, x)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, first))
        del found
    with torch.no_grad():
        for _ in range(6):
            module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = module(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, first[0])


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # parameters are shared
def test_in_threads():
    """Each captures for itself, while others launch, allocate and capture."""
    module, xs = layer(), [drawn() for _ in range(4)]
    wanted = [[one.clone() for one in step(module, x)] for x in xs]
    wrong = []

    def work(place):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(30):
                found = step(module, xs[place])
                stream.synchronize()
                if not all(map(torch.equal, found, wanted[place])):
                    wrong.append(place)
                del found

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_of_many_graphs_is_bounded():
    """Graphs that are no longer kept are freed by the driver."""
    module, before = layer(), None
    with torch.no_grad():
        for number in range(3 * graphs.MOST):
            x = torch.randn(8 + number % 24, 9, 64, device="cuda", dtype=torch.bfloat16)
            for _ in range(5):
                module(x)
            assert count() <= graphs.MOST
            if number == 2 * graphs.MOST:
                torch.cuda.synchronize()
                before = torch.cuda.mem_get_info()[0]
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] > before - (64 << 20)
