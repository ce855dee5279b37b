"""Any engine replayed from a CUDA graph, without what a call in Python takes."""

from collections.abc import Iterator
from copy import copy

import torch
from torch import Tensor

from openrnn.bench.engines.base import Engine, Ready
from openrnn.bench.modes import MODES
from openrnn.bench.task import Task


class Replayed(Ready):
    """Another engine's calls, captured at their first run in each mode."""

    def __init__(self, inner: Ready) -> None:
        super().__init__(inner.task, inner.call, inner.leaves, inner.chosen)
        self.inner = inner
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}

    def run(self, mode: str) -> list[Tensor]:
        if mode not in self.graphs:
            self.graphs[mode] = _capture(self.inner, mode)
        graph, outputs = self.graphs[mode]
        graph.replay()
        return outputs

    def done(self, mode: str) -> None:
        self.graphs.pop(mode, None)  # whose memory is its own
        self.inner.done(mode)


class GraphReplay(Engine):
    """Another engine from a CUDA graph."""

    graphed = True

    def __init__(self, name: str, inner: Engine) -> None:
        self.name, self.inner = name, inner
        self.title = f"{inner.title}, CUDA graph"

    def concerns(self, task: Task) -> bool:
        host = any(MODES[mode].host for mode in task.row.modes)  # a replay is no call of a layer
        return task.device != "cpu" and not host and self.inner.concerns(task)

    def refuses(self, task: Task) -> str | None:
        return self.inner.refuses(task)

    def candidates(self, task: Task) -> Iterator[Ready]:
        lengths = task.lengths
        if lengths is not None:  # a capture reads nothing from the host
            task = copy(task)
            task.lengths = lengths.to(task.device)
        for ready in self.inner.candidates(task):
            yield Replayed(ready)


def _capture(inner: Ready, mode: str) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made once must not be made in the capture
        for _ in range(2):
            inner.run(mode)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = inner.run(mode)
    return graph, outputs
