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
    options = {"num_layers": 3, "wavefront": 8, "backend": "fused", **options}
    return openrnn.LSTM(64, 64, device="cuda", dtype=torch.bfloat16, **options)


def drawn():
    return torch.randn(40, 9, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def step(module, x):
    y, _ = module(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 2),
        ({"wavefront": 0}, 2),
        ({"wavefront": None, "bidirectional": True}, 2),
        ({"wavefront": None, "backend": "cudnn"}, 2),
        ({"wavefront": None, "backend": "cudnn", "algorithm": "persist_static"}, 2),
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
    module._call_cache = type(module._call_cache)()
    assert all(map(torch.equal, changed, step(module, x)))
    assert not torch.equal(changed[0], first[0])


@pytest.mark.parametrize("options", [{}, {"wavefront": None, "backend": "cudnn"}], ids=str)
def test_on_streams_and_in_captures(options):
    """A graph is launched on whatever stream is current, and none within a capture of the user."""
    module, x = layer(**options), drawn()
    first = [one.clone() for one in step(module, x)]
    for stream in [torch.cuda.Stream(), torch.cuda.Stream()] * 6:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step(module, x)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, first))
        del found
    assert count() >= 2
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
@pytest.mark.parametrize("options", [{}, {"wavefront": None, "backend": "cudnn"}], ids=str)
def test_in_threads(options):
    """Each captures for itself, while others launch, allocate and capture."""
    module, xs, most = layer(**options), [drawn() for _ in range(4)], []
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
            most.append(count())

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert max(most) >= 2


def test_cudnn_with_dropout_is_no_graph():
    """Its random states go on from call to call: no two masks are the same."""
    module, x = layer(backend="cudnn", wavefront=None, dropout=0.5), drawn()
    found = [step(module, x)[0] for _ in range(6)]
    assert count() == 0
    assert not any(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("options", [{}, {"wavefront": None, "backend": "cudnn"}], ids=str)
def test_graphs_that_are_no_longer_kept_are_freed(monkeypatch, options):
    """Other processes use the GPU, so that its memory says nothing: graphs are counted."""
    made, freed, begin, end = [], [], graphs.Graph.__init__, graphs.Graph.__del__
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 8)
    monkeypatch.setattr(graphs.Graph, "__init__", lambda *of: begin(*of) or made.append(1))
    monkeypatch.setattr(graphs.Graph, "__del__", lambda one: end(one) or freed.append(1))
    module = layer(**options)
    with torch.no_grad():
        for number in range(72):
            x = torch.randn(8 + number % 24, 9, 64, device="cuda", dtype=torch.bfloat16)
            for _ in range(5):
                module(x)
            assert len(made) - len(freed) == count() <= graphs.MOST_GRAPHS
    torch.cuda.synchronize()
    assert len(made) >= 24


def test_a_graph_of_too_many_nodes_is_none(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_NODES", 1)
    module, x = layer(), drawn()
    found = [step(module, x) for _ in range(6)]
    assert count() == 0
    assert all(map(torch.equal, found[0], found[-1]))
