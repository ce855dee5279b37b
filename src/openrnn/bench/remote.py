"""Engines in processes of their own: ours over the sources of any commit, and peers.

All are sampled in turn, under equal conditions, by the same code: that of `bench.server`. On a CPU
a process is stopped while others are asked: its idle threads would spin and take their cores.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from openrnn.bench.cases import BenchRow
from openrnn.bench.engines.base import Engine
from openrnn.bench.record import Measurement, result_of
from openrnn.bench.sides import DeviceLostError, Ground, SampleError, Side
from openrnn.errors import OpenRNNError

HERE = Path(__file__).parent
SOURCES = HERE.parents[1]  # of this commit
# seconds before a sample on a CPU where processes cannot be stopped: their threads fall asleep
PAUSE = 0.005
# other sources first on the path, with this bench put in the place of their own
BOOT = """
import importlib.util, sys
sources, bench = sys.argv[1:]
sys.path.insert(0, sources)
import openrnn
spec = importlib.util.spec_from_file_location(
    "openrnn.bench", bench + "/__init__.py", submodule_search_locations=[bench]
)
openrnn.bench = sys.modules["openrnn.bench"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openrnn.bench)
from openrnn.bench.server import main
main()
"""


def started(sources: Path, **first: Any) -> subprocess.Popen[str]:
    """A process over some sources that has its first request."""
    made = subprocess.Popen(
        [sys.executable, "-c", BOOT, str(sources), str(HERE)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, encoding="utf-8",
        start_new_session=True,  # Ctrl-C is for the process that asks
    )  # fmt: skip
    if made.stdin is None:
        raise OpenRNNError("a process without standard input")
    try:
        made.stdin.write(json.dumps({**first, "threads": torch.get_num_threads()}) + "\n")
        made.stdin.flush()
    except BrokenPipeError:
        pass  # it ended: who reads its answer sees that
    return made


class Other(NamedTuple):
    """Our layer as another peer of itself: the engine's name, sources, and constants of theirs.

    With `peer` the engine of that name instead, one of `engines.PEERS`.
    """

    name: str
    sources: Path = SOURCES
    settings: Mapping[str, float] = MappingProxyType({})
    peer: bool = False


class Process:
    """A running `bench.server`."""

    def __init__(self, other: "Other", backend: str, device: str) -> None:
        self.sources, self.device, self.busy = other.sources, device, 0.0
        about = {
            "name": other.name, "backend": backend, "device": device, "peer": other.peer
        }  # fmt: skip
        self.stops = device == "cpu" and sys.platform == "linux"
        self._process = started(
            other.sources, do="serve", about=about, settings=dict(other.settings)
        )

    def ask(self, what: str, engine: str, **more: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            DeviceLostError: the GPU is lost to the process, or it ended.
            OpenRNNError: it could not do what was asked.
        """
        to, back = self._process.stdin, self._process.stdout
        self._signal("SIGCONT")
        line = ""
        if to is not None and back is not None:
            try:
                to.write(json.dumps({"ask": what, "engine": engine, **more}) + "\n")
                to.flush()
                line = back.readline()
            except BrokenPipeError:
                pass
        self._signal("SIGSTOP")
        if not line:
            raise DeviceLostError(
                f"the process with the sources at {self.sources} ended; its error is above"
            )
        answer: dict[str, Any] = json.loads(line)
        self.busy = answer["busy"]
        if "lost" in answer:
            raise DeviceLostError(answer["lost"])
        if "error" in answer:
            raise OpenRNNError(f"the sources at {self.sources}: {answer['error']}")
        return answer

    def _signal(self, name: str) -> None:
        if self.stops:
            self._process.send_signal(getattr(signal, name))

    def close(self) -> None:
        """Ends the process."""
        self._signal("SIGCONT")
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Remote(Engine):
    """One engine of a process."""

    def __init__(self, process: Process, name: str) -> None:
        self.process, self.name, self.title = process, name, name
        self.graphed = name.endswith("-graph")

    def side(self, ground: Ground) -> "RemoteSide | None":
        """The engine on a row; None where rows of its kind are not what it is for."""
        row = asdict(ground.row)
        answer = self.process.ask("open", self.name, row=row, precision=ground.precision)
        if answer["known"] is None:
            return None
        known = {mode: result_of(line) for mode, line in answer["known"].items()}
        return RemoteSide(self.process, self.name, known)


class RemoteSide(Side):
    """An engine of a process on a row."""

    def __init__(self, process: Process, name: str, known: dict[str, Measurement]) -> None:
        self.process, self.name, self.known = process, name, known

    def prepare(self, mode: str) -> bool:
        answer = self.process.ask("prepare", self.name, mode=mode)
        self.known[mode] = result_of(answer["known"])
        return bool(answer["ready"])

    def sample(self, mode: str, count: int) -> float:
        if self.process.device == "cpu" and not self.process.stops:
            time.sleep(PAUSE)
        answer = self.process.ask("sample", self.name, mode=mode, count=count)
        if "failed" in answer:
            raise SampleError(self.name, answer["failed"])
        return float(answer["us"])

    def done(self, mode: str) -> None:
        self.process.ask("done", self.name, mode=mode)

    def busy(self) -> float:
        return self.process.busy

    def close(self) -> None:
        with suppress(DeviceLostError):  # of a process that ended the row is gone, too
            self.process.ask("close", self.name)


@contextmanager
def in_turn(others: Sequence[Other], backend: str, device: str) -> Iterator[list[Engine]]:
    """Ours as it is, and others, each in a process; on a GPU as called and from CUDA graphs."""
    all_ = (Other("openrnn"), *others)
    with ExitStack() as stack:
        processes = []
        for other in all_:
            processes.append(Process(other, backend, device))
            stack.callback(processes[-1].close)
        ways = ("",) if device == "cpu" else ("", "-graph")
        yield [
            Remote(process, f"{other.name}{way}")
            for way in ways
            for process, other in zip(processes, all_)
        ]


def compile_ahead(sources: Path, todo: Sequence[tuple[BenchRow, str]], workers: int) -> None:
    """Compiles the CUDA kernels of all rows, by so many processes."""
    if not workers or not todo:
        return
    capability = torch.cuda.get_device_capability()
    rows = [(asdict(row), precision) for row, precision in todo]
    running = [
        started(sources, do="compile", rows=rows[index::workers], capability=capability)
        for index in range(min(workers, len(rows)))
    ]
    try:
        for process in running:
            process.communicate()
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
