"""Results and engines made up for the tests of `openrnn bench`."""

import time

import pytest

from openrnn.bench import timer
from openrnn.bench.cases import BenchRow
from openrnn.bench.engines.base import Engine, Ready
from openrnn.bench.engines.ours import Ours
from openrnn.bench.record import Measurement

TINY = BenchRow("tiny", "lstm", 3, 2, 4, 5, suite="users")
QUICK = 0.001  # seconds
MACHINE = {"name": "a machine", "device": "cpu", "torch": "2", "threads": "2"}


def result(name="tiny", engine="openrnn", us=100.0, **changes):
    """A timed result with quartiles 1% away."""
    row = changes.pop("row", BenchRow(name, "lstm", 10, 2, 4, 5, suite="users"))
    around = (None, None) if us is None else (0.99 * us, 1.01 * us)
    fields = {
        "status": "ok", "us": us, "low": around[0], "high": around[1], "repeats": 5,
        "precision": "float32", "mode": "forward", "error": 1e-7, "checked": (10, 2),
    }  # fmt: skip
    return Measurement(row, engine=engine, **{**fields, **changes})


class Fake(Engine):
    """Our reference, with something done to what it returns or to how it runs."""

    def __init__(self, name, change=lambda y: y, refusal=None):
        self.name = self.title = name
        self.change, self.refusal = change, refusal

    def refuses(self, task):
        return self.refusal

    def candidates(self, task):
        inner = next(iter(Ours("reference").candidates(task)))
        yield Ready(task, lambda: self.change(inner.call()), inner.leaves)


def slow(y):
    time.sleep(0.02)
    return y


def backward_times(factor):
    """A right forward whose gradient is multiplied by a factor."""

    def change(y):
        y = y.clone()
        if y.requires_grad:
            y.register_hook(lambda dy: factor * dy)
        return y

    return change


def fails(y):
    raise RuntimeError("\n  the kernel fell over\nand more")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As if no other process ran, nor memory were told: results would depend on the machine."""
    monkeypatch.setattr(timer, "foreign", lambda _: None)
    monkeypatch.setattr(timer, "_resident_peak", lambda call: call() and None)
