"""What results say: ratios, ties, geometric means, losses."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from openrnn.bench.cases import BenchRow
from openrnn.bench.record import Measurement
from openrnn.bench.timer import DISTURBED

OURS, GRAPHED = "openrnn", "openrnn-graph"
# the standard error of a median over the quartile range, of many values that are about normal
SPREAD = 1.253 / 1.349
CLOSE, ERRORS = 0.02, 2
TIES = (
    f"a tie where the medians are within {100 * CLOSE:.0f}% of each other or {ERRORS} standard "
    f"errors of their ratio (of a median: {SPREAD:.2f} quartile ranges / the root of the repeats)"
)


@dataclass(frozen=True)
class Pair:
    """Ours beside a peer, both timed."""

    ours: Measurement
    peer: Measurement

    @property
    def ratio(self) -> float:
        """The peer's time over ours: above 1 we are faster."""
        return _us(self.peer) / _us(self.ours)

    @property
    def tie(self) -> bool:
        return same(self.ours, self.peer)

    @property
    def disturbed(self) -> bool:
        """Whether other processes disturbed either side: then it is shown and not counted."""
        return not (quiet(self.ours) and quiet(self.peer))

    @property
    def verdict(self) -> str:
        if self.disturbed:
            return "disturbed"
        return "tie" if self.tie else "win" if self.ratio > 1 else "loss"


@dataclass(frozen=True)
class Line:
    """All results of a row in one precision and mode."""

    row: BenchRow
    precision: str
    mode: str
    results: dict[str, Measurement]

    @property
    def ours(self) -> Measurement | None:
        return self.results.get(OURS)

    def pair(self, peer: str) -> Pair | None:
        """Ours and a peer; where the peer runs from a CUDA graph, so does ours."""
        ours = self.results.get(GRAPHED if from_graph(peer) else OURS)
        other = self.results.get(peer)
        timed = ours is not None and other is not None and ours.us and other.us
        return Pair(ours, other) if timed and ours and other else None


@dataclass(frozen=True)
class Summary:
    """Ours against a peer over the rows that both ran undisturbed; how many others there are."""

    peer: str
    precision: str
    mode: str
    pairs: tuple[Pair, ...]
    disturbed: int = 0

    @property
    def mean(self) -> float:
        """The geometric mean of the ratios."""
        return math.exp(statistics.fmean(math.log(pair.ratio) for pair in self.pairs))

    @property
    def least(self) -> Pair:
        return min(self.pairs, key=lambda pair: pair.ratio)

    @property
    def most(self) -> Pair:
        return max(self.pairs, key=lambda pair: pair.ratio)

    def count(self, verdict: str) -> int:
        return sum(pair.verdict == verdict for pair in self.pairs)


def from_graph(engine: str) -> bool:
    """Whether an engine is timed from a CUDA graph, so that it is compared with ours from one."""
    return engine == "graph" or engine.endswith("-graph")


def lines_of(results: Iterable[Measurement]) -> list[Line]:
    """The results by row, precision and mode, in the order in which they came."""
    found: dict[object, Line] = {}
    for result in results:
        empty = Line(result.row, result.precision, result.mode, {})
        found.setdefault(result.key, empty).results[result.engine] = result
    return list(found.values())


def peers_of(lines: Sequence[Line]) -> list[str]:
    """The engines that ours is compared with, in the order in which they came."""
    seen = dict.fromkeys(name for line in lines for name in line.results)
    return [name for name in seen if name not in (OURS, GRAPHED)]


def summaries(lines: Sequence[Line]) -> Iterator[Summary]:
    """One for each peer, precision and mode that has a pair."""
    kinds = dict.fromkeys((line.precision, line.mode) for line in lines)
    for peer in peers_of(lines):
        for precision, mode in kinds:
            found = (
                line.pair(peer)
                for line in lines
                if (line.precision, line.mode) == (precision, mode)
            )
            pairs = [pair for pair in found if pair is not None]
            calm = tuple(pair for pair in pairs if not pair.disturbed)
            if pairs:
                yield Summary(peer, precision, mode, calm, len(pairs) - len(calm))


def judged(lines: Sequence[Line], verdict: str) -> list[Pair]:
    """Every pair of a verdict, the least ratio first."""
    pairs = (line.pair(peer) for line in lines for peer in peers_of(lines))
    found = [pair for pair in pairs if pair is not None and pair.verdict == verdict]
    return sorted(found, key=lambda pair: pair.ratio)


def faults(lines: Sequence[Line]) -> list[Measurement]:
    """Every result that is wrong or failed."""
    every = (result for line in lines for result in line.results.values())
    return [result for result in every if result.status in ("wrong", "failed")]


def refusals(lines: Sequence[Line]) -> dict[tuple[str, str], list[str]]:
    """Engine and reason -> the names of the rows that it refused."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for name, result in line.results.items():
            if result.status == "refused":
                rows = found.setdefault((name, result.reason or ""), [])
                if line.row.name not in rows:
                    rows.append(line.row.name)
    return found


def same(one: Measurement, two: Measurement) -> bool:
    """Whether two times are too close to call; see `TIES`."""
    doubt = ERRORS * math.hypot(_error(one), _error(two))
    return abs(math.log(_us(one) / _us(two))) <= max(math.log1p(CLOSE), doubt)


def quiet(result: Measurement) -> bool:
    """Whether it was timed, and no other process disturbed that."""
    return result.us is not None and (result.others or 0.0) <= DISTURBED


def step_us(result: Measurement) -> float:
    """Microseconds a step."""
    return _us(result) / result.row.steps


def _error(result: Measurement) -> float:
    """The standard error of a median, relative to it."""
    width = (result.high or 0.0) - (result.low or 0.0)
    return SPREAD * width / _us(result) / math.sqrt(max(result.repeats, 1))


def _us(result: Measurement) -> float:
    if result.us is None:
        raise ValueError(f"{result.engine} was not timed on {result.row.name}")
    return result.us
