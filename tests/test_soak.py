"""`openrnn soak`: that it runs, and that it sees what it is there to see."""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace

import forks
import pytest
import torch

from openrnn import cli
from openrnn.bench import soak

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ["--device", "cpu", "--backend", "reference", "--minutes", "0.001", "--problems", "2"]


def test_it_runs_in_several_processes(monkeypatch, capfd):
    started = []
    program = "import runpy; runpy.run_module('openrnn.cli', None, '__main__', alter_sys=True)"

    def popen(words):
        """A process like that of the command, but without an import of torch."""
        started.append(words)
        assert words[:3] == [sys.executable, "-m", "openrnn.cli"]
        running = ThreadPoolExecutor(1).submit(forks.python, program, *words[3:])

        def wait():
            print(running.result().stdout)
            return running.result().returncode

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(soak, "subprocess", SimpleNamespace(Popen=popen))
    assert cli.main(["soak", *QUICK, "--processes", "2", "--seed", "1"]) == 0
    out = capfd.readouterr().out
    assert out.count("calls of 2 problems, memory") == 2
    (other,) = started
    assert " ".join(other[other.index("soak") :]) == (
        "soak --minutes 0.001 --problems 2 --processes 1 --seed 2 --device cpu --backend reference"
    )


def test_a_problem_is_the_same_each_time():
    first, second = (soak.problem(random.Random(5), "cpu", "reference") for _ in range(2))
    assert [one.shape for one in first()] == [one.shape for one in second()]
    assert not list(soak.differences(first(), first()))


def test_other_bits_are_found_and_placed(monkeypatch, capsys):
    def problem(*_):
        calls = count()
        return lambda: [torch.ones(2, 3), torch.eye(3) * (1 if next(calls) < 7 else 1.5)]

    monkeypatch.setattr(soak, "problem", problem)
    assert soak.run(soak.Soak(0.01, problems=1, device="cpu")) == 1
    out = capsys.readouterr().out
    assert "problem 0 gave other bits after 4 calls:" in out
    assert "  tensor 1 (3, 3): 3 elements from [0, 0] to [2, 2], by up to 0.5\n" in out


def test_memory_that_grows_is_a_fault(monkeypatch):
    monkeypatch.setattr(soak, "problem", lambda *_: lambda: [torch.ones(1)])
    grown = count(start=1, step=2**27)
    monkeypatch.setattr(soak, "memory", lambda _: next(grown))
    monkeypatch.setattr(soak, "SETTLE", 0.05)
    assert soak.run(soak.Soak(0.002, problems=1, device="cpu")) == 1


def test_memory_that_is_freed_a_little_later_is_no_fault(monkeypatch):
    """Autograd's thread frees the graph of a call after the call has returned."""
    monkeypatch.setattr(soak, "problem", lambda *_: lambda: [torch.ones(1)])
    begin = time.monotonic()

    def freed_at_last(_):
        return 2**29 if 0.03 < time.monotonic() - begin < 0.5 else 2**20

    monkeypatch.setattr(soak, "memory", freed_at_last)
    assert soak.run(soak.Soak(0.005, problems=1, device="cpu")) == 0


def test_a_fault_of_any_process_counts(monkeypatch):
    codes = iter([1, 0])
    waiter = type("Waiter", (), {"wait": lambda _: next(codes)})
    monkeypatch.setattr(soak.subprocess, "Popen", lambda _: waiter())
    monkeypatch.setattr(soak, "run", lambda _: 0)
    assert soak.execute(soak.Soak(1.0, processes=3, device="cpu")) == 1
    assert soak.execute(soak.Soak(1.0, device="cpu")) == 0

    def pressed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(soak, "run", pressed)
    assert soak.execute(soak.Soak(1.0, device="cpu")) == 130


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--minutes 0", "minutes must be positive, got 0.0"),
        ("--problems 0", "problems must be 1 or more, got 0"),
        ("--processes 0", "processes must be 1 or more, got 0"),
        ("--device tpu", "device must be one of auto, cpu, cuda, got 'tpu'"),
    ],
)
def test_mistakes_in_options(words, says, capsys):
    assert cli.main(["soak", "--device", "cpu", *words.split()]) == 2
    assert capsys.readouterr().err == f"openrnn: {says}\n"
