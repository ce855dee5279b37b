"""What runs in a process of its own, over the sources of any commit: an engine, on request.

Requests come as JSON lines on standard input, the first one says what to do; each has an answer, a
JSON line as well. The modules of `openrnn.bench` here are today's, the rest of the package is
that of the other commit: what this module imports may use nothing but layers and `openrnn.explain`.
Peers are asked of this commit alone.
"""

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TextIO

import torch

from openrnn.bench.cases import BenchRow
from openrnn.bench.engines.base import Engine
from openrnn.bench.engines.graph import GraphReplay
from openrnn.bench.engines.ours import Ours
from openrnn.bench.modes import MODES
from openrnn.bench.record import result_line
from openrnn.bench.sides import DeviceLostError, Ground, Local, SampleError, reason_of, side_of
from openrnn.bench.task import PRECISIONS, layer_of, products
from openrnn.bench.timer import LONG, quiet
from openrnn.errors import OpenRNNError

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
# seconds of calls before a sample on a CPU: threads that were stopped may have come back two to a
# core, where one spins and the other waits until the scheduler moves it
SETTLE = 0.03
Request = Mapping[str, Any]
Answer = dict[str, Any]


def main() -> None:
    """Answers until standard input ends; what the sources print goes to standard error.

    So does where Python was when compiled code crashed.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()
    first: Request = json.loads(sys.stdin.readline())
    torch.set_num_threads(first["threads"])
    _end_with_parent()
    if first["do"] == "compile":
        compile_rows(first)
        return
    for path, value in first["settings"].items():
        change(path, value)
    handle = Server(**first["about"]).handle
    serve(sys.stdin, answers, handle)


def _end_with_parent() -> None:
    """On Linux ends with the thread that started it, as a stopped process would read no end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def change(path: str, value: float) -> None:
    """Gives a module's constant another value.

    Raises:
        AttributeError: the module has no such constant.
    """
    name, _, constant = path.rpartition(".")
    module = import_module(name)
    getattr(module, constant)
    setattr(module, constant, value)


def serve(requests: TextIO, answers: TextIO, handle: Callable[[Request], Answer]) -> None:
    """One answer a request, an error's words where that fails."""
    with quiet():  # as the process that asks is, whose timer does it
        for line in requests:
            try:
                answer = handle(json.loads(line))
            except DeviceLostError as error:
                answer = {"lost": str(error)}
            except Exception as error:
                answer = {"error": reason_of(error)}
            answers.write(json.dumps({**answer, "busy": time.process_time()}) + "\n")
            answers.flush()


@dataclass
class Server:
    """One engine on one row at a time; ours as called and from CUDA graphs.

    Args:
        name: of the engine in results; from graphs it has `-graph` at its end.
        peer: it is the peer of that name, and not ours.
    """

    name: str
    backend: str
    device: str
    peer: bool = False
    engines: dict[str, Engine] = field(default_factory=dict)
    sides: dict[str, Local] = field(default_factory=dict)
    ground: Ground | None = None

    def __post_init__(self) -> None:
        if self.peer:
            from openrnn.bench.engines import peers_of  # sources of other commits lack parts

            self.engines = {one.name: one for one in peers_of((self.name,), self.backend, True)}
            return
        ours = Ours(self.backend, self.name)
        graph = f"{self.name}-graph"
        self.engines = {self.name: ours, graph: GraphReplay(graph, ours)}

    def handle(self, request: Request) -> Answer:
        """Does what is asked: open, prepare, sample, done with a mode, or close."""
        name: str = request["engine"]
        if request["ask"] == "open":
            return self._open(name, row_of(request["row"]), request["precision"])
        if request["ask"] == "close":
            self.sides.pop(name).close()
            if not self.sides:
                self.ground = None
                gc.collect()
                if self.device != "cpu":
                    torch.cuda.empty_cache()
            return {}
        side, mode = self.sides[name], request["mode"]
        if request["ask"] == "done":
            side.done(mode)
            return {}
        with products(PRECISIONS[side.ground.precision].products):
            if request["ask"] == "prepare":
                ready = side.prepare(mode)
                return {"ready": ready, "known": result_line(side.known[mode])}
            try:
                return {"us": self._sample(side, mode, request["count"])}
            except SampleError as error:
                return {"failed": error.reason}

    def _open(self, name: str, row: BenchRow, precision: str) -> Answer:
        if self.ground is None or (self.ground.row, self.ground.precision) != (row, precision):
            self.ground = Ground(row, precision, self.device)
        with products(PRECISIONS[precision].products):
            side = side_of(self.engines[name], self.ground)
        if side is None:
            return {"known": None}
        self.sides[name] = side
        return {"known": {mode: result_line(one) for mode, one in side.known.items()}}

    def _sample(self, side: Local, mode: str, count: int) -> float:
        """A sample after calls that are not counted: another process had the device meanwhile."""
        begin = time.perf_counter()
        first = side.sample(mode, 1)
        if count == 1 and first > 1e6 * LONG:
            return first
        while self.device == "cpu" and time.perf_counter() - begin < SETTLE:
            side.sample(mode, 1)
        return side.sample(mode, count)


def row_of(values: Mapping[str, Any]) -> BenchRow:
    """A row of its fields."""
    return BenchRow(**{**values, "modes": tuple(values["modes"])})


def compile_rows(request: Request) -> None:
    """Compiles the CUDA kernels of some rows into the cache; what does not compile is left out."""
    capability = tuple(request["capability"])
    package: Any = sys.modules["openrnn"]  # by its public name, in sources of any commit
    for values, precision in request["rows"]:
        row = row_of(values)
        for grad in {MODES[mode].gradients for mode in row.modes}:
            try:
                package.compile_kernels(
                    layer_of(row, device="meta"), PRECISIONS[precision].dtype,
                    batches=(row.batch,), grad=grad, lengths=row.lengths, reset=row.resets > 0,
                    capability=capability,
                )  # fmt: skip
            except (OpenRNNError, ValueError):
                continue  # the row itself says why
