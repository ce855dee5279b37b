"""What moved between two runs, beyond their noise."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from openrnn.bench.ratios import ERRORS, GRAPHED, OURS, quiet, same
from openrnn.bench.record import Machine, Measurement

# the spread of one run does not hold what changes from run to run
BETWEEN = 0.05
NOISE = (
    f"noise: up to {100 * BETWEEN:.0f}%, from run to run, or {ERRORS} standard errors of the ratio"
)
DRIFT = "ours alone are told, where they moved more than their row's peers, whose machine it is too"
MINE = (OURS, GRAPHED)
ALIKE = ("device", "name", "threads", "torch", "cudnn", "driver_version")


@dataclass(frozen=True)
class Moved:
    """One engine's time before and now; `drift` is by how much its peers became faster."""

    before: Measurement
    now: Measurement
    drift: float = 1.0

    @property
    def ratio(self) -> float:
        """Above 1 it became faster."""
        return (self.before.us or 0.0) / (self.now.us or 1.0)

    @property
    def beyond(self) -> bool:
        """Whether that is more than noise, as it stands and beside what its peers did."""
        alone, beside = self._noticed(1.0), self._noticed(self.drift)
        return alone == beside != 0

    def _noticed(self, drift: float) -> int:
        """1 where it became faster than by this factor, beyond noise, -1 where slower, else 0."""
        us, low, high = (
            (t or 0.0) / drift for t in (self.before.us, self.before.low, self.before.high)
        )
        ratio = self.ratio / drift
        scaled = replace(self.before, us=us, low=low, high=high)
        if abs(ratio - 1) <= BETWEEN or same(scaled, self.now):
            return 0
        return 1 if ratio > 1 else -1


def moved(
    before: Iterable[Measurement], now: Sequence[Measurement], steady: bool
) -> tuple[list[Moved], int]:
    """What moved, most first, and how many times were compared: disturbed ones are not.

    Args:
        steady: both runs had one machine and one torch. Then only ours are compared, and where the
            peers of a row moved, their machine did: ours must have moved more.
    """
    old = {(result.key, result.engine): result for result in before if quiet(result)}
    pairs = [
        Moved(old[result.key, result.engine], result)
        for result in now
        if quiet(result) and (result.key, result.engine) in old
        and old[result.key, result.engine].row == result.row
    ]  # fmt: skip
    if steady:
        drifts: dict[object, list[float]] = {}
        for pair in pairs:
            if pair.now.engine not in MINE:
                drifts.setdefault(pair.now.key, []).append(pair.ratio)
        pairs = [
            replace(pair, drift=statistics.median(drifts.get(pair.now.key, [1.0])))
            for pair in pairs
            if pair.now.engine in MINE
        ]
    found = [pair for pair in pairs if pair.beyond]
    return sorted(found, key=lambda pair: max(pair.ratio, 1 / pair.ratio), reverse=True), len(pairs)


def differences(before: Machine, now: Machine) -> list[str]:
    """In what the machines of two runs differ, where that can move a time."""
    return [
        f"{name} {before.get(name, 'unknown')}, now {now.get(name, 'unknown')}"
        for name in ALIKE
        if before.get(name) != now.get(name)
    ]
