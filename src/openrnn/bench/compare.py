"""What moved between two runs, beyond their noise."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from openrnn.bench.record import Machine, Result
from openrnn.bench.table import same

# quartiles of one run do not hold what changes from run to run: 5% on top of them
BETWEEN = 0.05
ALIKE = ("device", "name", "threads", "torch", "cudnn", "driver_version")


@dataclass(frozen=True)
class Moved:
    """One engine's time before and now."""

    before: Result
    now: Result

    @property
    def ratio(self) -> float:
        """Above 1 it became faster."""
        return (self.before.us or 0.0) / (self.now.us or 1.0)


def moved(before: Iterable[Result], now: Iterable[Result]) -> tuple[list[Moved], int]:
    """The pairs of the same row, engine, precision and mode that moved, and how many there are.

    Most moved first.
    """
    old = {(result.key, result.engine): result for result in before if result.us}
    pairs = [
        Moved(old[key], result)
        for result in now
        if result.us and (key := (result.key, result.engine)) in old
        and old[key].row == result.row
    ]  # fmt: skip
    found = [
        pair for pair in pairs if abs(pair.ratio - 1) > BETWEEN and not same(pair.before, pair.now)
    ]
    return sorted(found, key=lambda pair: max(pair.ratio, 1 / pair.ratio), reverse=True), len(pairs)


def differences(before: Machine, now: Machine) -> list[str]:
    """In what the machines of two runs differ, where that can move a time."""
    return [
        f"{name} {before.get(name, 'unknown')}, now {now.get(name, 'unknown')}"
        for name in ALIKE
        if before.get(name) != now.get(name)
    ]


def as_baseline(results: Iterable[Result]) -> list[Result]:
    """Our results of another commit, as those of a peer."""
    return [replace(result, engine="baseline") for result in results if result.engine == "openrnn"]
