"""Programs and calls of cuDNN that repeat with the same addresses: one launch of a graph."""

import gc
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import cache

import pytest
import torch

from openrnn.backends.cudnn.run import CallPlan
from openrnn.backends.fused.program import LaunchOp, Program, SlotRef
from openrnn.errors import LibraryError
from openrnn.memory import TensorFactory, template
from openrnn.native import graphs
from openrnn.native.nvrtc import DriverError

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
        if self.nodes > graphs.MOST_NODES:
            raise DriverError("too many nodes")

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
    monkeypatch.setattr(graphs, "_streams", lambda _: nullcontext(Own()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE, raising=False)
    monkeypatch.setattr("openrnn.backends.fused.program.current_stream", lambda _: MAIN)
    return Kernel()


def program(kernel, count):
    """Some launches, with results that always lie in the same memory."""
    fixed = torch.zeros(4)
    like = template((4,), torch.float32, torch.device("cpu"))
    launches = [
        LaunchOp(kernel, number, (0,), 0, ((0, SlotRef(0, 0)),), signals=False)
        for number in range(count)
    ]
    return Program(launches, [TensorFactory(lambda _: fixed, like)] * 2, DEVICE)


def test_the_third_run_with_the_same_addresses_is_a_graph(kernel):
    run = program(kernel, graphs.LEAST_OPERATIONS)
    one_by_one = [(number, MAIN) for number in range(graphs.LEAST_OPERATIONS)]
    for _ in range(graphs.CAPTURED_RUN - 1):
        run.run([1 << 20])
        assert kernel.given == one_by_one
        kernel.given.clear()
    run.run([1 << 20])
    assert kernel.given == [
        (number, OWN) for number in range(graphs.LEAST_OPERATIONS)
    ]  # in the capture
    kernel.given.clear()
    run.run([1 << 20])
    assert kernel.given == []
    assert Graph.launched == [MAIN] * 2
    run.run([1 << 21])  # other addresses
    assert kernel.given == one_by_one
    assert len(Graph.made) == 1


def test_few_operations_and_captures_are_no_graphs(kernel, monkeypatch):
    short = program(kernel, graphs.LEAST_OPERATIONS - 1)
    for _ in range(graphs.CAPTURED_RUN + 1):
        short.run([1 << 20])
    long = program(kernel, graphs.LEAST_OPERATIONS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(graphs.CAPTURED_RUN + 1):
        long.run([1 << 20])
    assert Graph.made == Graph.launched == []


def test_each_thread_has_graphs_of_its_own(kernel):
    run = program(kernel, graphs.LEAST_OPERATIONS)

    def work():
        for _ in range(graphs.CAPTURED_RUN + 2):
            run.run([1 << 20])

    for thread in [threading.Thread(target=work) for _ in range(2)]:
        thread.start()
        thread.join()
    assert len(Graph.made) == 2
    assert len(Graph.launched) == 6


@pytest.mark.parametrize("limit", [{"MOST_GRAPHS": 2}, {"MOST_NODES": 2 * Graph.nodes}], ids=str)
def test_the_graphs_that_were_launched_last_are_kept(kernel, monkeypatch, limit):
    for name, most in limit.items():
        monkeypatch.setattr(graphs, name, most)
    runs = [program(kernel, graphs.LEAST_OPERATIONS) for _ in range(3)]
    for run in runs[:2]:
        for _ in range(graphs.CAPTURED_RUN):
            run.run([1 << 20])
    runs[0].run([1 << 20])  # so that the other one is the oldest
    for _ in range(graphs.CAPTURED_RUN):
        runs[2].run([1 << 20])
    assert len(Graph.made) == 3
    runs[0].run([1 << 20])
    for _ in range(graphs.CAPTURED_RUN - 1):  # counted anew: capturing it each time would cost more
        runs[1].run([1 << 20])
    assert len(Graph.made) == 3
    runs[1].run([1 << 20])
    assert len(Graph.made) == 4


def test_a_program_that_the_driver_does_not_capture_runs_as_before(kernel, monkeypatch):
    def refuses(*_):
        raise DriverError("cuStreamBeginCapture: CUDA_ERROR_NOT_PERMITTED")

    monkeypatch.setattr(graphs, "Graph", refuses)
    run = program(kernel, graphs.LEAST_OPERATIONS)
    for _ in range(graphs.CAPTURED_RUN + 2):
        run.run([1 << 20])
    assert kernel.given == [(number, MAIN) for number in range(graphs.LEAST_OPERATIONS)] * (
        graphs.CAPTURED_RUN + 2
    )


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
    for _ in range(graphs.CAPTURED_RUN + 2):
        repeated.run(*calls)
    both = [(1, None), (2,)]
    assert [arguments for _, arguments in handle.called] == both * graphs.CAPTURED_RUN
    streams = [stream for stream, _ in handle.called]
    assert streams == [MAIN] * 2 * (graphs.CAPTURED_RUN - 1) + [OWN] * 2  # the last in the capture
    assert Graph.launched == [MAIN] * 3
    assert handle.stream == MAIN
    repeated.run(calls[0])  # without the gradients of weights
    assert handle.called[-1] == (MAIN, (1, None))
    assert len(Graph.made) == 1


def test_a_handle_that_a_capture_left_elsewhere_comes_back(kernel):
    handle = Handle()

    def function(number):
        if handle.stream != MAIN:
            handle.stuck = True
            raise LibraryError("cudnnRNNForward", "NOT_SUPPORTED")
        handle.called.append((handle.stream, number))

    def move(stream):
        if getattr(handle, "stuck", False) and stream == MAIN:
            handle.stuck = False
            raise LibraryError("cudnnSetStream", "INTERNAL_ERROR")
        handle.stream = stream

    handle.move = move
    repeated = plan(handle, graphs.Replays())
    for _ in range(graphs.CAPTURED_RUN + 1):
        repeated.run((function, (1,)))
    assert handle.called == [(MAIN, 1)] * (graphs.CAPTURED_RUN + 1)


def test_calls_of_cudnn_whose_plan_is_not_kept_are_no_graph(kernel):
    """Its descriptors go with the call; and short or very long calls have no graphs."""
    for made in (plan(Handle(), graphs.Replays(), kept=False), plan(Handle(), None)):
        for _ in range(graphs.CAPTURED_RUN + 2):
            made.run((made.handle.function, (1,)))
        assert len(made.handle.called) == graphs.CAPTURED_RUN + 2
    assert Graph.made == []


def test_a_capture_in_which_cudnn_fails_is_not_tried_again(kernel):
    handle, failing = Handle(), []

    def function(number):
        if handle.stream != MAIN:
            failing.append(number)
            raise LibraryError("cudnnRNNForward", "NOT_SUPPORTED")
        handle.called.append(number)

    repeated = plan(handle, graphs.Replays())
    for _ in range(graphs.CAPTURED_RUN + 3):
        repeated.run((function, (1,)))
    assert failing == [1]
    assert handle.called == [1] * (graphs.CAPTURED_RUN + 3)
    assert handle.stream == MAIN


def test_a_set_of_addresses_that_does_not_come_back_is_forgotten(kernel):
    run = program(kernel, graphs.LEAST_OPERATIONS)
    for number in range(3 * graphs.MOST_COUNTED):
        run.run([number << 20])
    assert len(run._replays._runs.seen) == graphs.MOST_COUNTED
    assert Graph.made == []


def test_runs_whose_addresses_never_come_again_seldom_look(kernel, monkeypatch):
    monkeypatch.setattr(graphs, "PATIENCE", 20)
    looked, find = [], graphs.GRAPHS.find
    monkeypatch.setattr(
        graphs.GRAPHS, "find", lambda owner, key: looked.append(key) or find(owner, key)
    )
    run = program(kernel, graphs.LEAST_OPERATIONS)
    rounds = 5
    for number in range(graphs.PATIENCE + rounds * (graphs.PASSED + 1)):
        run.run([number << 20])
    assert len(looked) == graphs.PATIENCE + rounds
    for _ in range((graphs.CAPTURED_RUN + 1) * (graphs.PASSED + 1)):  # now they do
        run.run([1 << 40])
    assert len(Graph.made) == 1
    looked.clear()
    Graph.launched.clear()
    for _ in range(3):
        run.run([1 << 40])
    assert len(looked) == len(Graph.launched) == 3
    looked.clear()
    for number in range(graphs.PATIENCE):  # they were forgiven
        run.run([number << 20])
    assert len(looked) == graphs.PATIENCE


def test_addresses_that_come_three_times_and_never_again_are_no_graphs_for_long(kernel):
    run = program(kernel, graphs.LEAST_OPERATIONS)
    for number in range(2 * graphs.PATIENCE):
        for _ in range(graphs.CAPTURED_RUN):
            run.run([number << 20])
    assert len(Graph.made) <= graphs.PATIENCE / graphs.CAPTURED_RUN


def test_two_operations_are_worth_a_graph(kernel):
    run = program(kernel, 2)
    for _ in range(4):
        run.run([1 << 20])
    assert len(Graph.launched) == 2


def test_as_many_sets_of_addresses_in_turn_as_graphs_are_kept(kernel):
    run = program(kernel, graphs.LEAST_OPERATIONS)
    for _ in range(graphs.CAPTURED_RUN + 2):
        for number in range(1, graphs.MOST_GRAPHS + 1):
            run.run([number << 20])
    assert len(Graph.made) == graphs.MOST_GRAPHS


def test_more_than_are_kept_are_captured_ever_more_seldom(kernel, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 4)
    runs, made = [program(kernel, graphs.LEAST_OPERATIONS) for _ in range(6)], []
    for _ in range(100):
        for run in runs:
            run.run([1 << 20])
        made.append(len(Graph.made))
    assert made[-1] <= 6 * 6  # 3, 6, 12, .. runs for each; without that 6 * 33


def test_graphs_that_gave_way_once_come_back_soon(kernel):
    run, others = program(kernel, graphs.LEAST_OPERATIONS), program(kernel, graphs.LEAST_OPERATIONS)

    def rounds(which, count, sets):
        for _ in range(count):
            for number in range(1, sets + 1):
                which.run([number << 20])

    rounds(run, graphs.CAPTURED_RUN, 30)
    rounds(others, graphs.CAPTURED_RUN, graphs.MOST_GRAPHS)
    del others
    gc.collect()
    rounds(run, graphs.CAPTURED_RUN, 30)
    Graph.launched.clear()
    rounds(run, 4, 30)
    assert len(Graph.launched) == 4 * 30


def test_a_graph_of_too_many_nodes_is_not_kept_and_not_made_again(kernel, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_NODES", Graph.nodes - 1)
    run = program(kernel, graphs.LEAST_OPERATIONS)
    for _ in range(graphs.CAPTURED_RUN + 5):
        run.run([1 << 20])
    assert len(Graph.made) == 1
    assert Graph.launched == []
    assert kernel.given[-1] == (graphs.LEAST_OPERATIONS - 1, MAIN)


def test_a_graph_that_cannot_be_launched_is_run_the_long_way(kernel, monkeypatch):
    """Such as where no memory is left for it outside of torch's allocator."""

    def refuses(*_):
        raise DriverError("cuGraphLaunch: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(Graph, "launch", refuses)
    run = program(kernel, graphs.LEAST_OPERATIONS)
    for number in range(1, graphs.CAPTURED_RUN + 3):
        run.run([1 << 20])
        assert [one for one in kernel.given if one[1] == MAIN] == number * [
            (place, MAIN) for place in range(graphs.LEAST_OPERATIONS)
        ]
    assert len(Graph.made) == 1
    assert not graphs.GRAPHS._kept


def test_graphs_go_with_their_program_and_thread(kernel):
    run = program(kernel, graphs.LEAST_OPERATIONS)

    def work(run):
        for _ in range(graphs.CAPTURED_RUN):
            run.run([1 << 20])

    work(run)
    thread = threading.Thread(target=work, args=(run,))
    thread.start()
    thread.join()
    gc.collect()
    assert len(Graph.made) == 2
    assert len(graphs.GRAPHS._kept) == 1
    del run, thread
    gc.collect()
    assert not graphs.GRAPHS._kept
    assert graphs.GRAPHS._nodes == 0


def test_an_owner_that_ends_while_the_lock_is_held(kernel):
    """As the garbage collector may run anywhere."""
    kept = graphs.GRAPHS
    kept.keep(-1, (1,), Graph(Own(), lambda _: None))
    with kept._lock:
        thread = threading.Thread(target=kept.end, args=(-1,))
        thread.start()
        thread.join()
        assert len(kept._kept) == 1
        kept.end(-3)  # of this thread: it has the lock
        assert not kept._kept
    kept.keep(-2, (1,), Graph(Own(), lambda _: None))
    assert [owner for owner, _ in kept._kept] == [-2]


def test_streams_of_captures_are_used_again(monkeypatch):
    made = []
    monkeypatch.setattr(graphs, "_spare", cache(lambda _: []))
    monkeypatch.setattr(graphs.Streams, "apart", lambda device: made.append(device) or Own())
    with graphs._streams(0) as one, graphs._streams(0) as other:
        assert one is not other
    with pytest.raises(RuntimeError), graphs._streams(0):
        raise RuntimeError
    with graphs._streams(0):
        pass
    assert made == [0, 0]


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
    assert asked[2:] == [
        "cuStreamEndCapture", "cuGraphDestroy", "cuThreadExchangeStreamCaptureMode"
    ]  # fmt: skip


KEPT_TO_THE_END = """
import os
from openrnn.native import graphs

one = graphs.Graph.__new__(graphs.Graph)
one._exec, one._process, one._destroy = 1, os.getpid(), lambda _: print("freed")
graphs.GRAPHS._kept[0, (1,)] = one
other = graphs.Graph.__new__(graphs.Graph)
other._exec, other._process, other._destroy = 2, os.getpid(), lambda number: print(number)
parents = graphs.Graph.__new__(graphs.Graph)
parents._exec, parents._process, parents._destroy = 3, os.getpid() + 1, lambda number: print(number)
del one, other, parents
"""


def test_graphs_of_a_process_that_ends_are_left_to_the_driver():
    """Modules are gone by then, so that an error would be printed at the end of every program."""
    done = subprocess.run(
        [sys.executable, "-c", KEPT_TO_THE_END], capture_output=True, text=True, check=True,
        timeout=600,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("2\n", "")
