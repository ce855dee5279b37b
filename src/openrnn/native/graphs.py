"""What a program or a call of cuDNN gives its streams, captured as a CUDA graph and launched again.

A launch, product or wait costs its host 3 to 7 us; a graph of all of them is one launch. Its nodes
hold addresses, so it serves runs with the same ones alone. Training and inference loops have them:
torch's allocator gives the same memory to calls that take and free the same sizes in turn.
"""

import os
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import RLock, local
from typing import Any

import torch

from openrnn.errors import OpenRNNError
from openrnn.memo import resource
from openrnn.native.nvrtc import DriverError
from openrnn.native.side_stream import Streams

LEAST_OPERATIONS = 2  # of a program that pays for looking
CAPTURED_RUN = 3  # the run with the same addresses that is captured
MOST_GRAPHS = 256  # that a process keeps: those launched last
MOST_COUNTED = 256  # sets of addresses that a program counts in each thread
MOST_NODES = 1 << 16  # of all these graphs; a node takes about 4 KB of the GPU's memory
# after so many runs that looked for a graph and found none, one after the other, only one in
# PASSED + 1 looks: that costs it up to 7 us, for nothing where no addresses come again
PATIENCE, PASSED = CAPTURED_RUN * MOST_COUNTED, 16

Key = tuple[int, ...]
Give = Callable[[Streams], None]  # gives streams, of which the main one is ours, what a run is

_numbers = count()


class Graph:
    """A captured graph, ready to be launched by one thread at a time.

    Attributes:
        nodes: how many it has.

    Raises:
        DriverError: the driver refuses the capture, or there are more than MOST_NODES.
    """

    def __init__(self, streams: Streams, give: Give) -> None:
        from cuda.bindings import driver

        self._launch, self._destroy = driver.cuGraphLaunch, driver.cuGraphExecDestroy
        self._process = os.getpid()
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
            except BaseException:
                status, graph = driver.cuStreamEndCapture(main)
                if not status:
                    driver.cuGraphDestroy(graph)
                raise
            (graph,) = _check("cuStreamEndCapture", driver.cuStreamEndCapture(main))
            try:
                _, self.nodes = _check("cuGraphGetNodes", driver.cuGraphGetNodes(graph, 0))
                if self.nodes > MOST_NODES:
                    raise DriverError(f"a graph of {self.nodes} nodes, at most {MOST_NODES}")
                (self._exec,) = _check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
            finally:
                driver.cuGraphDestroy(graph)
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)

    def launch(self, stream: int) -> None:
        """Launches it on a stream."""
        _check("cuGraphLaunch", self._launch(self._exec, stream))

    def __del__(
        self, process: Callable[[], int] = os.getpid, ending: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        # one that runs is freed at its end; a forked child leaves its parent's alone. Of a process
        # that ends the driver frees all, and modules, `os` among them, are gone already
        if hasattr(self, "_exec") and not ending() and self._process == process():
            self._destroy(self._exec)


def _check(name: str, answer: Sequence[Any]) -> Sequence[Any]:
    """What the driver answers besides its status."""
    status, *found = answer
    if status:
        raise DriverError(f"{name}: {status.name}")
    return found


class Graphs:
    """The graphs of a process that were launched last, by their owners and keys."""

    def __init__(self) -> None:
        # a finalizer or a signal handler may call a layer within the lock
        self._lock, self._kept = RLock(), OrderedDict[tuple[int, Key], Graph]()
        self._nodes, self._ended = 0, deque[int]()

    def find(self, owner: int, key: Key) -> Graph | None:
        """The graph of an owner."""
        with self._lock:
            found = self._kept.get((owner, key))
            if found is not None:
                self._kept.move_to_end((owner, key))
            return found

    def keep(self, owner: int, key: Key, graph: Graph) -> None:
        """Keeps a graph, and lets those go that were launched longest ago."""
        with self._lock:
            gone = self._of_ended()
            self._kept[owner, key] = graph
            self._nodes += graph.nodes
            while len(self._kept) > MOST_GRAPHS or self._nodes > MOST_NODES:
                gone += self._pop(next(iter(self._kept)))
        gone.clear()  # outside of the lock: freeing them asks the driver

    def end(self, owner: int) -> None:
        """Lets the graphs of an owner go; with the next kept one, if another has the lock."""
        self._ended.append(owner)
        if self._lock.acquire(blocking=False):
            try:
                gone = self._of_ended()
            finally:
                self._lock.release()
            gone.clear()

    def _of_ended(self) -> list[Graph]:
        owners = {self._ended.popleft() for _ in range(len(self._ended))}
        keys = [key for key in [*self._kept] if key[0] in owners]
        return [graph for key in keys for graph in self._pop(key)]

    def _pop(self, key: tuple[int, Key]) -> list[Graph]:
        """The graph there; [] where it has gone meanwhile."""
        graph = self._kept.pop(key, None)
        self._nodes -= 0 if graph is None else graph.nodes
        return [] if graph is None else [graph]


GRAPHS = Graphs()


class _Owner:
    """Whose graphs they are: they go with it."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        weakref.finalize(self, _end, self.number).atexit = False


def _end(owner: int) -> None:
    GRAPHS.end(owner)


class _Runs(local):
    """The runs of one program or plan in one thread.

    Attributes:
        seen: how often each set of addresses came that has no graph, the latest last.
        captured: how often each had one; those that gave way must come ever more often.
        misses: runs that looked and found no graph, since the last one that found one; passing: the
            next runs that will not look.
        refused: no more graphs.
    """

    def __init__(self) -> None:
        self.owner, self.refused = _Owner(), False
        self.misses, self.passing = 0, 0
        self.seen, self.captured = dict[Key, int](), dict[Key, int]()


class Replays:
    """The graphs of one program or plan, of each thread its own."""

    def __init__(self) -> None:
        self._runs = _Runs()

    def launch(self, device: int, values: Sequence[int], give: Give, stream: int) -> bool:
        """Launches the graph of a run with these addresses, from the third one on.

        Returns:
            whether it did. Not before that run, during a capture of torch's, after a capture or
            launch has failed, and mostly not where addresses do not come again: then the caller
            runs it the long way.
        """
        runs = self._runs
        if runs.passing:
            runs.passing -= 1
            return False
        if runs.refused or torch.cuda.is_current_stream_capturing():
            return False
        key = tuple(values)
        graph = GRAPHS.find(runs.owner.number, key)
        if graph is not None:
            runs.misses = 0
        else:
            runs.misses += 1
            runs.passing = PASSED if runs.misses > PATIENCE else 0
            number = runs.seen.pop(key, 0) + 1
            again = runs.captured.get(key, 0)  # it gave way so often: more are in use than are kept
            if number < CAPTURED_RUN << max(0, again - 1):
                runs.seen[key] = number
                if len(runs.seen) > MOST_COUNTED:
                    runs.seen.pop(next(iter(runs.seen)))
                return False
            graph = _captured(runs, device, key, give)
        try:
            if graph is not None:
                graph.launch(stream)
        except DriverError:  # such as no memory for it outside of torch's allocator
            graph = None
        if graph is None:
            runs.refused = True
            GRAPHS.end(runs.owner.number)
        return graph is not None


def _captured(runs: _Runs, device: int, key: Key, give: Give) -> Graph | None:
    """A new graph, which is kept; None where the capture fails."""
    try:
        with _streams(device) as own:
            graph = Graph(own, give)
    except OpenRNNError:
        return None
    if key in runs.captured or len(runs.captured) < 4 * MOST_GRAPHS:
        runs.captured[key] = runs.captured.get(key, 0) + 1
    GRAPHS.keep(runs.owner.number, key, graph)
    return graph


@resource
def _spare(device: int) -> list[Streams]:
    return []


@contextmanager
def _streams(device: int) -> Iterator[Streams]:
    """Streams that nothing else is given to, in whose place a graph is captured."""
    spare = _spare(device)
    try:
        own = spare.pop()
    except IndexError:
        own = Streams.apart(device)
    try:
        yield own
    finally:
        spare.append(own)
