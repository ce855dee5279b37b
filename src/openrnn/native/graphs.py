"""What a program or a call of cuDNN gives its streams, captured as a CUDA graph and launched again.

A launch, product or wait costs its host 3 to 7 us; a graph of all of them is one launch. Its nodes
hold addresses, so it serves runs with the same ones alone. Training and inference loops have them:
torch's allocator gives the same memory to calls that take and free the same sizes in turn.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from threading import Lock, local
from typing import Any

import torch

from openrnn.errors import OpenRNNError
from openrnn.memo import resource
from openrnn.native.nvrtc import LaunchError
from openrnn.native.side_stream import Streams

LEAST = 8  # operations of a program that pays for looking
SEEN = 3  # the run with the same addresses that is captured
MOST = 64  # graphs that a process keeps: those launched last
MOST_NODES = 1 << 16  # and nodes of all of them, which take about 4 KB each of the GPU's memory
COUNTED = 16  # sets of addresses of a program that are counted

Key = tuple[int, ...]
Give = Callable[[Streams], None]  # gives streams, of which the main one is ours, what a run is

_numbers = count()


class Graph:
    """A captured graph, ready to be launched by one thread at a time.

    Attributes:
        nodes: how many it has.

    Raises:
        LaunchError: the driver refuses the capture.
    """

    def __init__(self, streams: Streams, give: Give) -> None:
        from cuda.bindings import driver

        main, modes = streams.handle(0), driver.CUstreamCaptureMode
        # else the capture of another thread forbids what we ask the driver for
        _, before = driver.cuThreadExchangeStreamCaptureMode(
            modes.CU_STREAM_CAPTURE_MODE_RELAXED
        )  # fmt: skip
        try:
            _check("cuStreamBeginCapture", driver.cuStreamBeginCapture(
                main, modes.CU_STREAM_CAPTURE_MODE_RELAXED))  # fmt: skip
            try:
                give(streams)
            finally:
                ended = driver.cuStreamEndCapture(main)
            (graph,) = _check("cuStreamEndCapture", ended)
            try:
                _, self.nodes = _check("cuGraphGetNodes", driver.cuGraphGetNodes(graph, 0))
                (self._exec,) = _check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
            finally:
                driver.cuGraphDestroy(graph)
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)
        self._launch, self._destroy = driver.cuGraphLaunch, driver.cuGraphExecDestroy

    def launch(self, stream: int) -> None:
        """Launches it on a stream."""
        _check("cuGraphLaunch", self._launch(self._exec, stream))

    def __del__(self) -> None:
        if hasattr(self, "_exec"):  # one that runs is freed at its end
            self._destroy(self._exec)


def _check(name: str, answer: Sequence[Any]) -> Sequence[Any]:
    """What the driver answers besides its status."""
    status, *found = answer
    if status:
        raise LaunchError(f"{name}: {status.name}")
    return found


class Graphs:
    """The graphs of a process that were launched last: `MOST` of them, of `MOST_NODES`."""

    def __init__(self) -> None:
        self._lock, self._kept = Lock(), OrderedDict[tuple[int, Key], Graph]()
        self._nodes = 0

    def find(self, owner: int, key: Key) -> Graph | None:
        """The graph of an owner."""
        with self._lock:
            found = self._kept.get((owner, key))
            if found is not None:
                self._kept.move_to_end((owner, key))
            return found

    def keep(self, owner: int, key: Key, graph: Graph) -> None:
        """Keeps a graph, and lets those go that were launched longest ago."""
        gone = list[Graph]()
        with self._lock:
            self._kept[owner, key] = graph
            self._nodes += graph.nodes
            while len(self._kept) > MOST or self._nodes > MOST_NODES:
                _, oldest = self._kept.popitem(last=False)
                self._nodes -= oldest.nodes
                gone.append(oldest)
        gone.clear()  # outside of the lock: freeing them asks the driver


GRAPHS = Graphs()


class _OfThread(local):
    def __init__(self) -> None:
        self.number, self.seen, self.refused = next(_numbers), dict[Key, int](), False


class Replays:
    """The graphs of one program or plan, of each thread its own."""

    def __init__(self) -> None:
        self._local = _OfThread()

    def graph(self, device: int, values: Sequence[int], give: Give) -> Graph | None:
        """The graph of a run with these addresses, from the third one on; None before.

        One that gave way to others counts anew. None also during a capture of torch's, and where
        a capture has failed.
        """
        here, key = self._local, tuple(values)
        if here.refused or torch.cuda.is_current_stream_capturing():
            return None
        found = GRAPHS.find(here.number, key)
        if found is not None:
            return found
        number = here.seen.pop(key, 0) + 1
        if number < SEEN:
            if len(here.seen) >= COUNTED:
                here.seen.clear()
            here.seen[key] = number
            return None
        try:
            graph = Graph(_capturing(device), give)
        except OpenRNNError:
            here.refused = True
            return None
        GRAPHS.keep(here.number, key, graph)
        return graph


class _Capturing(local):
    def __init__(self) -> None:
        self.streams = dict[int, Streams]()


@resource
def _of_threads() -> _Capturing:
    return _Capturing()


def _capturing(device: int) -> Streams:
    """Streams of this thread that nothing else is given to, in whose place a graph is captured."""
    known = _of_threads().streams
    if device not in known:
        known[device] = Streams.apart(device)
    return known[device]
