"""Programs and calls of cuDNN that repeat with the same addresses: one launch of a graph."""

import threading
from contextlib import nullcontext

import pytest
import torch

from openrnn.backends.cudnn.run import CallPlan
from openrnn.backends.fused.program import Launch, Program, Value
from openrnn.errors import LibraryError
from openrnn.memory import Made, template
from openrnn.native import graphs
from openrnn.native.nvrtc import LaunchError

driver = pytest.importorskip("cuda.bindings.driver")

DEVICE, MAIN, OWN = 0, 11, 99  # a GPU, torch's current stream, the main stream of captures


class Kernel:
    """Notes the streams that it is given, with the addresses."""

    def __init__(self):
        self.given = []

    def enter(self):
        pass

    def launch_at(self, parameter, clusters, stream, launch_event=0):
        self.given.append((clusters, stream))


class Graph:
    """A graph that notes what it is launched on."""

    made, launched, nodes = [], [], 8

    def __init__(self, streams, give):
        give(streams)
        self.made.append(self)

    def launch(self, stream):
        self.launched.append(stream)


class Own:
    """The streams of captures."""

    def handle(self, number):
        return OWN + number


@pytest.fixture
def kernel(monkeypatch):
    """The kernel of `program`, without a device."""
    Graph.made, Graph.launched = [], []
    monkeypatch.setattr(graphs, "Graph", Graph)
    monkeypatch.setattr(graphs, "GRAPHS", graphs.Graphs())
    monkeypatch.setattr(graphs, "_capturing", lambda _: Own())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE, raising=False)
    monkeypatch.setattr("openrnn.backends.fused.program.current_stream", lambda _: MAIN)
    return Kernel()


def program(kernel, count):
    """Some launches, with results that always lie in the same memory."""
    fixed = torch.zeros(4)
    like = template((4,), torch.float32, torch.device("cpu"))
    launches = [
        Launch(kernel, number, (0,), 0, ((0, Value(0, 0)),), signals=False)
        for number in range(count)
    ]
    return Program(launches, [Made(lambda _: fixed, like)] * 2, DEVICE)


def test_the_third_run_with_the_same_addresses_is_a_graph(kernel):
    run = program(kernel, graphs.LEAST)
    one_by_one = [(number, MAIN) for number in range(graphs.LEAST)]
    for _ in range(graphs.SEEN - 1):
        run.run([1 << 20])
        assert kernel.given == one_by_one
        kernel.given.clear()
    run.run([1 << 20])
    assert kernel.given == [(number, OWN) for number in range(graphs.LEAST)]  # in the capture
    kernel.given.clear()
    run.run([1 << 20])
    assert kernel.given == []
    assert Graph.launched == [MAIN] * 2
    run.run([1 << 21])  # other addresses
    assert kernel.given == one_by_one
    assert len(Graph.made) == 1


def test_few_operations_and_captures_are_no_graphs(kernel, monkeypatch):
    short = program(kernel, graphs.LEAST - 1)
    for _ in range(graphs.SEEN + 1):
        short.run([1 << 20])
    long = program(kernel, graphs.LEAST)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(graphs.SEEN + 1):
        long.run([1 << 20])
    assert Graph.made == Graph.launched == []


def test_each_thread_has_graphs_of_its_own(kernel):
    run = program(kernel, graphs.LEAST)

    def work():
        for _ in range(graphs.SEEN + 2):
            run.run([1 << 20])

    for thread in [threading.Thread(target=work) for _ in range(2)]:
        thread.start()
        thread.join()
    assert len(Graph.made) == 2
    assert len(Graph.launched) == 6


@pytest.mark.parametrize("limit", [{"MOST": 2}, {"MOST_NODES": 2 * Graph.nodes}], ids=str)
def test_the_graphs_that_were_launched_last_are_kept(kernel, monkeypatch, limit):
    for name, most in limit.items():
        monkeypatch.setattr(graphs, name, most)
    runs = [program(kernel, graphs.LEAST) for _ in range(3)]
    for run in runs[:2]:
        for _ in range(graphs.SEEN):
            run.run([1 << 20])
    runs[0].run([1 << 20])  # so that the other one is the oldest
    for _ in range(graphs.SEEN):
        runs[2].run([1 << 20])
    assert len(Graph.made) == 3
    runs[0].run([1 << 20])
    for _ in range(graphs.SEEN - 1):  # counted anew: capturing it each time would cost more
        runs[1].run([1 << 20])
    assert len(Graph.made) == 3
    runs[1].run([1 << 20])
    assert len(Graph.made) == 4


def test_a_program_that_the_driver_does_not_capture_runs_as_before(kernel, monkeypatch):
    def refuses(*_):
        raise LaunchError("cuStreamBeginCapture: CUDA_ERROR_NOT_PERMITTED")

    monkeypatch.setattr(graphs, "Graph", refuses)
    run = program(kernel, graphs.LEAST)
    for _ in range(graphs.SEEN + 2):
        run.run([1 << 20])
    assert kernel.given == [(number, MAIN) for number in range(graphs.LEAST)] * (graphs.SEEN + 2)


class Handle:
    """A handle of cuDNN that notes on which stream it was called with what."""

    device, stream = DEVICE, MAIN

    def __init__(self):
        self.called = []

    def move(self, stream):
        self.stream = stream

    def function(self, *arguments):
        self.called.append((self.stream, arguments))


def plan(handle, replays, kept=True):
    made = object.__new__(CallPlan)
    made.handle, made.replays, made.kept = handle, replays, kept
    return made


def test_calls_of_cudnn_become_a_graph(kernel):
    handle = Handle()
    calls = [(handle.function, (1, None)), (handle.function, (2,))]
    repeated = plan(handle, graphs.Replays())
    for _ in range(graphs.SEEN + 2):
        repeated.run(*calls)
    both = [(1, None), (2,)]
    assert [arguments for _, arguments in handle.called] == both * graphs.SEEN
    streams = [stream for stream, _ in handle.called]
    assert streams == [MAIN] * 2 * (graphs.SEEN - 1) + [OWN] * 2  # the last in the capture
    assert Graph.launched == [MAIN] * 3
    assert handle.stream == MAIN
    repeated.run(calls[0])  # without the gradients of weights
    assert handle.called[-1] == (MAIN, (1, None))
    assert len(Graph.made) == 1


def test_calls_of_cudnn_whose_plan_is_not_kept_are_no_graph(kernel):
    """Its descriptors go with the call; and short or very long calls have no graphs."""
    for made in (plan(Handle(), graphs.Replays(), kept=False), plan(Handle(), None)):
        for _ in range(graphs.SEEN + 2):
            made.run((made.handle.function, (1,)))
        assert len(made.handle.called) == graphs.SEEN + 2
    assert Graph.made == []


def test_a_capture_in_which_cudnn_fails_is_not_tried_again(kernel):
    handle, failing = Handle(), []

    def function(number):
        if handle.stream != MAIN:
            failing.append(number)
            raise LibraryError("cudnnRNNForward", "NOT_SUPPORTED")
        handle.called.append(number)

    repeated = plan(handle, graphs.Replays())
    for _ in range(graphs.SEEN + 3):
        repeated.run((function, (1,)))
    assert failing == [1]
    assert handle.called == [1] * (graphs.SEEN + 3)
    assert handle.stream == MAIN


def test_a_set_of_addresses_that_does_not_come_back_is_forgotten(kernel):
    run = program(kernel, graphs.LEAST)
    for number in range(3 * graphs.COUNTED):
        run.run([number << 20])
    assert len(run._replays._local.seen) <= graphs.COUNTED
    assert Graph.made == []


def test_what_a_capture_asks_of_the_driver(monkeypatch):
    """In a mode that no capture of another thread forbids, which is set back; nothing is left."""
    asked = []

    def answers(name, *found, status=0):
        monkeypatch.setattr(driver, name, lambda *of: asked.append(name) or (status, *found))

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    answers("cuThreadExchangeStreamCaptureMode", "before")
    answers("cuStreamBeginCapture")
    answers("cuStreamEndCapture", "graph")
    answers("cuGraphGetNodes", None, 8)
    answers("cuGraphInstantiate", "ready")
    answers("cuGraphDestroy")
    answers("cuGraphLaunch")
    answers("cuGraphExecDestroy")
    graph = graphs.Graph(Own(), lambda streams: asked.append(streams.handle(0)))
    graph.launch(MAIN)
    del graph
    assert asked == [
        "cuThreadExchangeStreamCaptureMode", "cuStreamBeginCapture", OWN, "cuStreamEndCapture",
        "cuGraphGetNodes", "cuGraphInstantiate", "cuGraphDestroy",
        "cuThreadExchangeStreamCaptureMode", "cuGraphLaunch", "cuGraphExecDestroy",
    ]  # fmt: skip
    asked.clear()

    def fails(_):
        raise RuntimeError("no launch")

    with pytest.raises(RuntimeError, match="no launch"):
        graphs.Graph(Own(), fails)
    assert asked[-2:] == ["cuStreamEndCapture", "cuThreadExchangeStreamCaptureMode"]
