"""What a run leaves: JSON lines, one a result, and what they hold.

The first line of a run is `{"schema": 2, "kind": "machine", ...}`: names and text of what a reader
of the numbers must know. Each other line is `{"schema": 2, "kind": "result", ...}` with the fields
of `Measurement` (its `row` with those of `cases.BenchRow`), `"kind": "training"` with those of
`Trained`, `"kind": "profile"` with those of `Profiled`, or `"kind": "kernel"` with those of
`KernelTime`; a field that has its default is left out. A run that was resumed has several lines on
its machine; where they differ, as in the commit, each distinct value is listed.
"""

import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from openrnn.bench.cases import BenchRow
from openrnn.errors import OpenRNNError

SCHEMA = 2
READ = (1, 2)  # schemas; rows of the first have no `states` and no `full`
STATUSES = ("ok", "wrong", "refused", "failed")
Machine = Mapping[str, str]
_BETWEEN = "; "  # the values of several lines


@dataclass(frozen=True)
class Measurement:
    """One engine on one row, in one precision and mode.

    Args:
        status: ok; wrong (compared with float64 and not timed); refused (it cannot run the row);
            failed (it raised). `reason` says more.
        chosen: the backend or algorithm that ran.
        us, low, high: median and quartiles of a call, in microseconds, over `repeats` samples.
        error: the largest relative error of y and, in training, of any gradient; compared at
            `checked` steps and rows of the batch.
        first_s: the first call, in seconds: compiling or loading what it needs included.
        memory_mib: what a call adds to the device's memory at its peak; None where not measured.
        others: cores that other processes took meanwhile, of those of this process (CPU).
        sm_mhz: the GPU's clock just after.
    """

    row: BenchRow
    precision: str
    mode: str
    engine: str
    status: str
    reason: str | None = None
    chosen: str | None = None
    us: float | None = None
    low: float | None = None
    high: float | None = None
    repeats: int = 0
    error: float | None = None
    checked: tuple[int, int] | None = None
    first_s: float | None = None
    memory_mib: float | None = None
    others: float | None = None
    sm_mhz: int | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is a result of, but for the engine."""
        return *self.row.key, self.precision, self.mode


@dataclass(frozen=True)
class Trained:
    """One run of `openrnn train`: bytes a second and bits a byte after a fixed budget."""

    name: str
    model: str
    gpus: int
    layers: int
    hidden: int
    batch: int
    bptt: int
    dtype: str
    device: str
    minutes: float
    steps: int
    bytes_per_s: float
    bits_per_byte: float
    backend: str


@dataclass(frozen=True)
class Profiled:
    """What a kernel or operator takes in a call of ours, by torch's profiler.

    Args:
        us: microseconds in a call; count: how often it runs in one.
    """

    row: BenchRow
    precision: str
    mode: str
    name: str
    us: float
    count: float


@dataclass(frozen=True)
class KernelTime:
    """What a step of one CUDA kernel takes alone, by `openrnn tune kernels`.

    Args:
        kernel: forward (with what training saves), inference or backward; mask: none, or its own.
        config: the kernel's configuration; operand_bytes: of a value as its products read it.
        loops: that ran at the same time.
        commit, date: of the sources and the day, where they are not those of the file.
    """

    cell: str
    dtype: str
    hidden: int
    batch: int
    kernel: str
    us: float
    config: dict[str, int]
    mask: str = "none"
    operand_bytes: int | None = None
    commit: str | None = None
    date: str | None = None
    loops: int = 1


Line = Measurement | Trained | Profiled | KernelTime
_KINDS: dict[str, type] = {
    "result": Measurement, "training": Trained, "profile": Profiled, "kernel": KernelTime,
}  # fmt: skip


@dataclass(frozen=True)
class ResultFile:
    """The runs of one file, under its last machine."""

    machine: Machine
    results: tuple[Measurement, ...]
    trained: tuple[Trained, ...] = ()
    profiled: tuple[Profiled, ...] = ()
    kernels: tuple[KernelTime, ...] = ()


def line(kind: str, values: Mapping[str, Any]) -> str:
    """One line of a file, without its end."""
    return json.dumps({"schema": SCHEMA, "kind": kind, **_short(dict(values))}, ensure_ascii=False)


def written(value: Line) -> str:
    """A result as its line."""
    kind = next(name for name, made in _KINDS.items() if isinstance(value, made))
    return line(kind, _spoken(value))


def result_line(result: Measurement) -> str:
    """A result as its line, with all digits, for another process."""
    return json.dumps(_spoken(result))


def result_of(text: str) -> Measurement:
    """A result of such a line."""
    found: Measurement = _build(Measurement, json.loads(text), "a result of another process")
    return found


def _spoken(value: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    made = {}
    for field in fields(value):
        given = getattr(value, field.name)
        if given != field.default:
            made[field.name] = _spoken(given) if is_dataclass(given) else given
    return made


def _short(value: Any) -> Any:
    """Floats to five digits: more are noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    return value


def read(path: Path) -> ResultFile:
    """What a file holds; of results measured twice, the last.

    Raises:
        OpenRNNError: it cannot be read or is not of this format; the line is named.
    """
    machine: Machine = {}
    found: dict[object, Measurement] = {}
    trained: dict[object, Trained] = {}
    profiled: dict[object, Profiled] = {}
    kernels: list[KernelTime] = []
    for number, text in enumerate(_text(path).splitlines(), 1):
        where = f"{path} line {number}"
        kind, values = _parse(text, where)
        if kind == "machine":
            machine = _joined(machine, values)
            continue
        made = _build(_KINDS[kind], values, where)
        if isinstance(made, Measurement):
            found[made.key, made.engine] = made
        elif isinstance(made, KernelTime):
            kernels.append(made)
        elif isinstance(made, Profiled):
            profiled[made.row.key, made.precision, made.mode, made.name] = made
        else:
            trained[made.name, made.model, made.gpus] = made
    if not machine:
        raise OpenRNNError(f"{path} has no line on its machine: it is no file of openrnn bench")
    return ResultFile(
        machine, tuple(found.values()), tuple(trained.values()), tuple(profiled.values()),
        tuple(kernels),
    )  # fmt: skip


def values_of(machine: Machine, name: str) -> list[str]:
    """The values of a name in the lines on a machine, each once; empty where none has it."""
    return machine[name].split(_BETWEEN) if name in machine else []


def _joined(before: Machine, now: Mapping[str, Any]) -> Machine:
    """What several lines say of the machine."""
    joined = dict(before)
    for name, value in now.items():
        joined[name] = _BETWEEN.join(dict.fromkeys([*values_of(before, name), str(value)]))
    return joined


def _text(path: Path) -> str:
    """The whole lines of a file: the last one of a run that was killed may be half written."""
    try:
        text = path.read_text(encoding="utf-8")
        return text[: text.rfind("\n") + 1]
    except UnicodeDecodeError:
        raise OpenRNNError(f"{path} is not text: it is no file of openrnn bench") from None


def _parse(text: str, where: str) -> tuple[str, dict[str, Any]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise OpenRNNError(f"{where} is not JSON: {error.msg}") from None
    if not isinstance(values, dict) or "schema" not in values:
        raise OpenRNNError(f"{where} has no schema: it is no line of openrnn bench")
    if values.pop("schema") not in READ:
        known = " and ".join(map(str, READ))
        raise OpenRNNError(f"{where} is of another schema, this openrnn reads {known}")
    kind = values.pop("kind", None)
    if kind != "machine" and kind not in _KINDS:
        raise OpenRNNError(f"{where} is of kind {kind!r}, needs machine, {', '.join(_KINDS)}")
    return kind, values


def _build(kind: type, values: dict[str, Any], where: str) -> Any:
    """A dataclass of a line's values, each of the type that it declares."""
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    odd = needed - set(values) | set(values) - {field.name for field in fields(kind)}
    if odd:
        raise OpenRNNError(
            f"{where} has other fields than a {kind.__name__}: {', '.join(sorted(odd))}"
        )
    hints = get_type_hints(kind)
    made = {name: _typed(hints[name], value, f"{where}, {name}") for name, value in values.items()}
    if kind is Measurement and made["status"] not in STATUSES:
        raise OpenRNNError(f"{where}, status, needs one of {', '.join(STATUSES)}")
    return kind(**made)


def _typed(hint: Any, value: Any, where: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):  # with None, which is never written
        hint = next(part for part in get_args(hint) if part is not type(None))
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return _build(hint, value, where)
    if get_origin(hint) is dict and isinstance(value, dict):
        return value
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(hint, type) or type(value) is not hint:
        raise OpenRNNError(f"{where}, needs {getattr(hint, '__name__', hint)}, got {value!r}")
    return value


class Writer:
    """Appends lines to a file as they come, so that what is measured is kept; or to none."""

    def __init__(self, path: Path | None, machine: Machine) -> None:
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._append([line("machine", machine)])

    def add(self, values: Iterable[Line]) -> None:
        self._append(map(written, values))

    def _append(self, lines: Iterable[str]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(f"{text}\n" for text in lines)


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """The files themselves, and those of the folders, *.jsonl below them, in order of names.

    Raises:
        OpenRNNError: there is none at a path.
    """
    for path in paths:
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise OpenRNNError(f"there are no results at {path}: give a file of --json or a folder")
        yield from found
