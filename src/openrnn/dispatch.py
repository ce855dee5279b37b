"""Which backend runs a problem, and why each other one does not."""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from openrnn import cells
from openrnn.backends.base import Backend
from openrnn.backends.cpu import Cpu
from openrnn.backends.cudnn import Cudnn
from openrnn.backends.fused import Fused
from openrnn.cells import lookup
from openrnn.codegen.check import check_elementwise
from openrnn.errors import NoBackendError, OpenRNNError, warn_user
from openrnn.memo import memo
from openrnn.printed import Printed
from openrnn.reference import Reference
from openrnn.spec import Problem

DeviceInfo = tuple[tuple[int, int] | None, int | None]  # compute capability, multiprocessors

# in order of preference
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Cpu(), Fused(), Cudnn(), Reference())
}

# state updates (T * B * L * D * H) of a call from which the reference is worth a warning
WORTH_A_WARNING = 100_000


@dataclass(frozen=True)
class Row:
    """One backend's answer to a problem.

    Args:
        backend: its name.
        reasons: why it does not run the problem; empty where it can.
        passed_over: why `auto` takes another one though this one can, or None.
        chosen: whether it is the one that runs.
        details: how it would run, where somebody asked.
    """

    backend: str
    reasons: tuple[str, ...]
    passed_over: str | None
    chosen: bool
    details: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        if self.reasons:
            return "; ".join(self.reasons)
        if self.chosen:
            return "runs"
        return self.passed_over or "could run, comes later in the order of preference"


@dataclass(frozen=True, repr=False)
class Table(Printed):
    """Every backend's answer to a problem; `text` is a table of them, one reason a line.

    Args:
        elsewhere: the backend that would run it on a machine that has all of them, where it is
            absent here; None, too, before `with_elsewhere`.
    """

    problem: Problem
    rows: tuple[Row, ...]
    elsewhere: str | None = None

    @property
    def chosen(self) -> str | None:
        """The backend that runs it; None where none does."""
        return next((row.backend for row in self.rows if row.chosen), None)

    @property
    def refused(self) -> dict[str, list[str]]:
        """The backends that do not run it, each with its reasons."""
        return {row.backend: list(row.reasons) for row in self.rows if row.reasons}

    def __repr__(self) -> str:
        return f"<openrnn.dispatch.Table: {self.chosen or 'nothing'} runs it>"

    @property
    def text(self) -> str:
        width = max(len(row.backend) for row in self.rows)
        lines = []
        for row in self.rows:
            first, *more = (*(row.reasons or (row.verdict,)), *row.details)
            lines.append(f"{'>' if row.chosen else ' '} {row.backend:<{width}}  {first}")
            lines += [f"  {'':<{width}}  {line}" for line in more]
        if self.elsewhere:
            lines.append(f"on a machine that has backend {self.elsewhere}, it would run this")
        return "\n".join([str(self.problem), *lines])


def device_info(device: torch.device) -> DeviceInfo:
    """What a problem says of a device: compute capability and multiprocessors; None where none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None, None
    about = torch.cuda.get_device_properties(device)
    return (about.major, about.minor), about.multi_processor_count


def check_name(name: str) -> None:
    """Raises ValueError for a backend that does not exist."""
    if not isinstance(name, str) or (name != "auto" and name not in BACKENDS):
        raise ValueError(f"backend must be auto or one of {', '.join(BACKENDS)}, got {name!r}")


def seed_device(name: str, device: torch.device) -> torch.device:
    """Where a backend reads the seed of dropout: the device of the call, but for cuDNN's own."""
    return torch.device("cpu") if BACKENDS[name].own_masks else device


@memo(256)
def _absent(name: str) -> str | None:
    return BACKENDS[name].absent()


def _overtaken(backend: Backend, problem: Problem, everywhere: bool = False) -> str | None:
    """Why `auto` takes another backend that can run the problem, too; or None.

    Args:
        everywhere: no backend is absent.
    """
    faster = backend.preferred_backend(problem)
    other = BACKENDS.get(faster.backend) if faster else None
    if other is None or other.refusals(problem) or (_absent(other.name) and not everywhere):
        return None
    return str(faster)


def explain(problem: Problem, name: str = "auto") -> Table:
    """The answers of all backends, or of the named one.

    Raises:
        CellError: the cell is not elementwise, so that no backend may run it.
        ValueError: no such backend.
    """
    check_name(name)
    cell = lookup(problem.spec.cell)
    if cell.function.__module__ != cells.__name__:
        check_elementwise(cell)
    rows: list[Row] = []
    chosen = False
    for backend in BACKENDS.values():
        if name not in ("auto", backend.name):
            continue
        gone = _absent(backend.name)
        reasons = ([gone] if gone else []) + backend.refusals(problem)
        over = None if reasons or name != "auto" else _overtaken(backend, problem)
        runs = not reasons and over is None and not chosen
        chosen = chosen or runs
        rows.append(Row(backend.name, tuple(reasons), over, runs))
    return Table(problem, tuple(rows))


def with_elsewhere(table: Table, name: str = "auto") -> Table:
    """The table with the backend that would run the problem if none were absent, if another one."""
    asked = [backend for backend in BACKENDS.values() if name in ("auto", backend.name)]
    for backend in asked:
        if backend.refusals(table.problem):
            continue
        if name != "auto" or not _overtaken(backend, table.problem, everywhere=True):
            found = None if backend.name == table.chosen else backend.name
            return replace(table, elsewhere=found)
    return table


def described(table: Table, *more: str) -> Table:
    """The table with how the chosen backend would run, and more lines.

    And how that of `Table.elsewhere` would, as far as it can be told without its device.
    """
    rows = []
    for row in table.rows:
        lines: tuple[str, ...] = ()
        backend = BACKENDS[row.backend]
        if row.backend == table.elsewhere:
            with suppress(OpenRNNError):  # as where a compiler does not know the device
                lines = tuple(backend.describe(table.problem))
        if row.chosen:
            lines = (*backend.describe(table.problem), *more)
            if table.problem.spec.reverse and not backend.reverses:
                lines = (*lines, "sequences are turned before it and y after it: it runs forward")
            asks = table.problem.grad and table.problem.spec.recompute != "none"
            if asks and not backend.recomputes:
                lines = (*lines, "recompute without effect: it keeps all that backward reads")
            stacked = table.problem.spec.num_layers > 1 and table.problem.spec.wavefront
            if stacked and not backend.has_wavefronts:
                lines = (*lines, "wavefront without effect: it orders the layers itself")
        rows.append(replace(row, details=lines))
    return replace(table, rows=tuple(rows))


@memo(4096)
def select(problem: Problem, name: str = "auto") -> str:
    """The backend that runs the problem: the named one, or the first that takes it.

    Raises:
        NoBackendError: none takes it; the error lists each backend's reasons.
        ValueError: no such backend.
    """
    table = explain(problem, name)
    if table.chosen is None:
        other = None if name == "auto" else explain(problem).chosen
        advice = f'with backend "auto" it would run on backend {other}' if other else ""
        raise NoBackendError(str(problem), table.refused, advice)
    return table.chosen


_warned: set[str] = set()


def warn_if_large(problem: Problem, steps: int, batch: int) -> None:
    """Says once for each reason that `auto` runs a large problem on the reference."""
    spec = problem.spec
    if steps * batch * spec.chains * spec.hidden_size < WORTH_A_WARNING:
        return
    rows = [row for row in explain(problem).rows if not row.chosen]
    why = "; ".join(f"{row.backend}: {row.verdict}" for row in rows)
    if why not in _warned:
        _warned.add(why)
        warn_user(f"OpenRNN runs this on the slow reference, because {why} (said once)")
