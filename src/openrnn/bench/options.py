"""What `openrnn bench` is asked for, and what of that cannot be, said before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryFile

import torch

from openrnn import dispatch
from openrnn.bench import baseline, charts
from openrnn.bench.suites import default_of
from openrnn.errors import OpenRNNError


@dataclass(frozen=True)
class Options:
    """What `openrnn bench` was asked for; see its help. None is what the suite has by default."""

    suite: str = "users"
    device: str = "auto"
    dtype: Sequence[str] | None = None
    rows: Sequence[str] = ()
    against: Sequence[str] | None = None
    backend: str | None = None
    seconds: float = 0.2
    minutes: float | None = None
    json: Path | None = None
    resume: bool = False
    markdown: Path | None = None
    charts: Path | None = None
    compare: Path | None = None
    baseline: str | None = None
    profile: str | None = None
    tensorboard: Path | None = None
    show: Sequence[Path] = ()
    page: Path | None = None
    gpus: Sequence[int] = (1,)
    workers: int = 0
    listed: bool = False


# of what measures nothing, or something else: the only options that it takes
TAKES = {
    "--list": "listed suite rows",
    "--page": "show page",
    "--show": "show markdown charts compare",
    "--profile": "profile suite device dtype backend json resume",
    "--suite train": "suite device minutes gpus json resume",
}
FILES, FOLDERS = ("json", "markdown", "page"), ("charts", "tensorboard")


def check(options: Options) -> None:
    """Refuses what cannot be, and what would be without effect.

    Raises:
        ValueError, OpenRNNError: in one sentence.
    """
    dispatch.check_name(options.backend or "auto")
    if not options.seconds > 0:
        raise ValueError(f"seconds must be positive, got {options.seconds}")
    if options.minutes is not None and not options.minutes >= 0:
        raise ValueError(f"minutes must be 0 or more, got {options.minutes}")
    if options.workers < 0:
        raise ValueError(f"workers must be 0 or more, got {options.workers}")
    if options.charts or options.page:
        charts.need()
    if options.page and not options.show:
        raise ValueError("--page needs files of results to show: name them with --show")
    _check_together(options)
    if options.baseline:
        baseline.named(options.baseline)


@dataclass(frozen=True)
class Choice:
    """The precisions, peers and backend of a run: those asked for, else those of its suites."""

    dtype: Sequence[str]
    against: Sequence[str]
    backend: str


def choice_of(options: Options, suite: str, device: str) -> Choice:
    """What is run on a device; with a baseline no peers unless they are named.

    Raises:
        ValueError: several suites have different defaults.
    """
    dtype, against, backend = options.dtype, options.against, options.backend
    if dtype is None:
        dtype = ("auto",) if device == "cpu" else default_of(suite, "dtypes")
    if against is None:
        against = () if options.baseline else default_of(suite, "against")
    if backend is None:
        backend = "auto" if device == "cpu" else default_of(suite, "backend")
    return Choice(dtype, against, backend)


def _check_together(options: Options) -> None:
    """Refuses options that what was asked for does not heed."""
    asked = {
        "--list": options.listed,
        "--page": options.page is not None,
        "--show": bool(options.show),
        "--profile": options.profile is not None,
        "--suite train": options.suite == "train",
    }
    given = _given(options)
    kind = next((name for name, on in asked.items() if on), None)
    if kind:
        ignored = [name for name in given if name not in TAKES[kind].split()]
        if ignored:
            raise ValueError(
                f"{kind} does not go with {', '.join(f'--{name}' for name in ignored)}"
            )
    elif "gpus" in given:
        raise ValueError("--gpus is an option of --suite train alone")
    if options.resume and options.json is None:
        raise ValueError("--resume needs the file of results to go on with: name it with --json")


def _given(options: Options) -> list[str]:
    """The options that are not at their defaults."""

    def plain(value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    return [
        field.name
        for field in fields(options)
        if plain(getattr(options, field.name)) != plain(field.default)
    ]


def device_of(name: str) -> str:
    """The device that a name means, cpu or cuda.

    Raises:
        ValueError: it is none, or not here.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be one of auto, cpu, cuda, got {name!r}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("device cuda: torch finds no CUDA device here")
    return "cuda" if there and name != "cpu" else "cpu"


def check_places(options: Options) -> None:
    """Makes the folders that results go to and tries to write there, so that no result is lost.

    Raises:
        OpenRNNError: the system refuses one.
    """
    paths: Mapping[str, Path | None] = {name: getattr(options, name) for name in (*FILES, *FOLDERS)}
    for name, path in paths.items():
        if path is None:
            continue
        try:
            if name in FOLDERS:
                _try_folder(path)
            else:
                _try_file(path)
        except OSError as error:
            raise OpenRNNError(f"--{name} {path} cannot be written: {error.strerror}") from None


def _try_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=path):
        pass


def _try_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a"):
        pass
    if new:
        path.unlink()
