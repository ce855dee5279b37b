"""A row: one network and one call, named after who runs it; how rows are chosen and cut to size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from openrnn.bench import own_cells
from openrnn.bench.modes import USUAL_MODES
from openrnn.cells import Cell, lookup

TORCH_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
OWN_CELL = own_cells.light_gru.key  # of a user's own

MANY, NEAR = 12, 5  # names that a message lists; of more the nearest

# what a CPU run is cut to: multiplications of one forward pass, and the fewest steps of a cut row
PRODUCTS, FEWEST = 2e9, 16
CUT = (
    f"on a CPU, T is halved while it stays at {FEWEST} or more, then B, until the matrix products "
    f"of a forward pass are {PRODUCTS:.0e} multiplications or fewer; I, H and layers stay"
)
WHOLE = ("cpu", "cpu-bf16")  # suites of rows for CPUs: not cut, and in their own dtype


@dataclass(frozen=True)
class BenchRow:
    """One network and call.

    Args:
        cell: a key of `openrnn.cells`.
        lengths: sequences end anywhere, as in a padded batch of speech or text.
        resets: the share of (t, b) at which an episode starts, as in reinforcement learning.
        dtype: what its users run where it is not float32; `--dtype auto` follows it on a GPU, and
            on a CPU in suites of `WHOLE`.
        states: first states, and those of a reset, are normal numbers times this; else 0.
        full: values are any that float32 holds, and not ones of bfloat16 alone.
        modes: what is timed, of `bench.modes`: forward without gradients, training (forward and
            backward), or a part of the host's.
    """

    name: str
    cell: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int = 1
    bidirectional: bool = False
    lengths: bool = False
    resets: float = 0.0
    dtype: str | None = None
    modes: tuple[str, ...] = USUAL_MODES
    suite: str = ""
    states: float = 0.0
    full: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.suite, self.name

    @property
    def definition(self) -> Cell:
        """The cell itself."""
        return lookup(self.cell)

    @property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @property
    def products(self) -> float:
        """Multiplications in the matrix products of one forward pass."""
        above = (self.layers - 1) * (self.hidden * self.directions + self.hidden)
        rows = len(self.definition.gates) * self.hidden * self.directions
        return self.steps * self.batch * rows * (self.inputs + self.hidden + above)

    @property
    def shape(self) -> str:
        """The sizes in a word: T x B x I x H, then layers, directions and what is special."""
        words = [f"{self.steps}x{self.batch}x{self.inputs}x{self.hidden}"]
        words += [f"{self.layers} layers"] if self.layers > 1 else []
        words += ["both ways"] if self.bidirectional else []
        words += ["lengths"] if self.lengths else []
        words += [f"{100 * self.resets:g}% resets"] if self.resets else []
        words += [f"states of {self.states:g}"] if self.states else []
        return ", ".join(words)


def cut(row: BenchRow) -> BenchRow:
    """The row as a CPU runs it; see `CUT`."""
    if row.suite in WHOLE:
        return row
    while row.products > PRODUCTS and row.steps // 2 >= FEWEST:
        row = replace(row, steps=row.steps // 2)
    while row.products > PRODUCTS and row.batch > 1:
        row = replace(row, batch=row.batch // 2)
    return row


def sized(rows: Sequence[BenchRow], device: str) -> list[BenchRow]:
    """The rows as the device runs them; of rows of a suite that a cut makes equal, the first."""
    if device != "cpu":
        return list(rows)
    seen: set[BenchRow] = set()
    kept = []
    for row in map(cut, rows):
        same = replace(row, name="")
        if same not in seen:
            seen.add(same)
            kept.append(row)
    return kept


def select(rows: Sequence[BenchRow], globs: Sequence[str], listing: bool = False) -> list[BenchRow]:
    """The rows whose name matches one of the patterns; all where there is none.

    Args:
        listing: `bench --list` asks, so an error does not point there.

    Raises:
        ValueError: a pattern matches nothing.
    """
    for glob in globs:
        if not any(fnmatchcase(row.name, glob) for row in rows):
            names = list(dict.fromkeys(row.name for row in rows))
            alike = get_close_matches(glob, names, NEAR)
            alike = alike or [name for name in names if name[:2] == glob[:2]][:NEAR]
            near = alike if len(names) > MANY else names
            there = f"there are: {', '.join(near)}" if near else "none has a name like it"
            there += f", and {len(names) - len(near)} others" if near and near != names else ""
            there += "" if listing else "; see openrnn bench --list --suite all"
            raise ValueError(f"no row matches {glob!r}; {there}")
    return [row for row in rows if not globs or _matches(row.name, globs)]


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def doubled(low: int, high: int) -> Iterator[int]:
    """low, 2 low, 4 low, ... up to high."""
    while low <= high:
        yield low
        low *= 2
