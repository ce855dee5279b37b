"""`openrnn bench` from its options to its last line."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.console import Console

from openrnn.bench import (
    baseline,
    charts,
    glossary,
    machine,
    markdown,
    page,
    profile,
    remote,
    report,
    tensorboard,
    training,
)
from openrnn.bench.cases import CUT, BenchRow, select, sized
from openrnn.bench.engines import WAYS, engines_of, peers_of
from openrnn.bench.engines.base import Engine
from openrnn.bench.interrupt import INTERRUPTED
from openrnn.bench.options import Choice, Options, check, check_places, choice_of, device_of
from openrnn.bench.record import (
    Machine,
    Measurement,
    ResultFile,
    Writer,
    files_of,
    read,
    values_of,
)
from openrnn.bench.session import Session, Todo
from openrnn.bench.suites import SUITES, rows_of
from openrnn.bench.task import precision_of
from openrnn.errors import OpenRNNError


def execute(options: Options) -> int:
    """Runs the command; returns 0, 130 after Ctrl-C, or 1 where the GPU was lost.

    Raises:
        ValueError, OpenRNNError: in one sentence, what was asked for and cannot be.
    """
    check(options)
    if options.listed:
        return _list(options)
    old = read(options.compare) if options.compare else None
    if options.show:
        return _show(options, old)
    device = device_of(options.device)
    if options.profile is not None:
        return _profile(options, options.profile, device)
    about = machine.describe(device)
    if options.suite == "train":
        if device == "cpu" and tuple(options.gpus) != Options.gpus:
            raise ValueError("--gpus needs a CUDA device")
        check_places(options)
        _begun(options, about)
        return training.execute(options.json, about, device, options.minutes or 1.0, options.gpus)
    choice = choice_of(options, options.suite, device)
    about["seconds"] = f"{options.seconds:g} for each engine in each mode"
    about["against"], about["backend"] = ",".join(choice.against) or "none", choice.backend
    if options.baseline:
        about["baseline"] = baseline.named(options.baseline)
    return _measure(options, choice, device, about, old)


def _list(options: Options) -> int:
    """Prints what there is to time, and what the words mean."""
    rows = (
        ()
        if options.suite == "train"
        else select(rows_of(options.suite), options.rows, listing=True)
    )
    out = report.console()
    chosen = [glossary.rows_sheet(rows)] if rows else []
    engines, terms = glossary.engines_sheet(), glossary.terms_sheet()
    for sheet in (glossary.suites_sheet(), *chosen, engines, terms):
        out.print(report.rendered(sheet))
    return 0


def _profile(options: Options, glob: str, device: str) -> int:
    """Profiles every row of a pattern; what it found goes to the file that was asked for."""
    suite = "all" if options.suite == Options.suite else options.suite
    choice = choice_of(options, suite, device)
    todo = _todo(suite, choice.dtype, [glob], device)
    check_places(options)
    about = {**machine.describe(device), "backend": choice.backend}
    _begun(options, about)
    writer = Writer(options.json, about)
    for row, precision in todo:
        writer.add(profile.run(row, precision, device, choice.backend, report.console()))
    return 0


def _todo(suite: str, dtypes: Sequence[str], globs: Sequence[str], device: str) -> list[Todo]:
    """The rows asked for, sized for the device, in every precision asked for."""
    rows = sized(select(rows_of(suite), globs), device)
    found: list[tuple[BenchRow, str]] = []
    for dtype in dtypes:
        found += [(row, precision_of(dtype, row, device)) for row in rows]
    return list(dict.fromkeys(found))


@contextmanager
def _engines(
    options: Options, choice: Choice, device: str, todo: Sequence[Todo]
) -> Iterator[list[Engine]]:
    """Ours and its peers; with a baseline, or other ways of ours, each in a process of its own.

    On a CPU with several threads peers have processes of their own too: idle threads of an engine
    spin for a while, and in one process they take the cores from the next one.
    """
    workers = options.workers if device == "cuda" else 0
    peers, others = choice.against, list[remote.Other]()
    if device == "cuda":
        others = [remote.Other(name, settings=WAYS[name]) for name in peers if name in WAYS]
    elif torch.get_num_threads() > 1:  # none of `WAYS`: on a CPU nothing overlaps
        others = [remote.Other(peer.name, peer=True) for peer in peers_of(peers, choice.backend)]
        peers = ()
    with ExitStack() as stack:
        if options.baseline:
            sources = stack.enter_context(baseline.sources(options.baseline))
            others.insert(0, remote.Other("baseline", sources))
        for folder in dict.fromkeys((remote.SOURCES, *(other.sources for other in others))):
            remote.compile_ahead(folder, todo, workers)
        if others:
            ours = stack.enter_context(remote.in_turn(others, choice.backend, device))
            yield [*ours, *peers_of(peers, choice.backend)]
        else:
            yield engines_of(choice.against, choice.backend)


def _measure(
    options: Options, choice: Choice, device: str, about: Machine, old: ResultFile | None
) -> int:
    """Measures, prints and writes all that was asked for; what was measured before Ctrl-C, too."""
    todo = _todo(options.suite, choice.dtype, options.rows, device)
    session = Session(device, options.seconds, options.minutes)
    peers_of(choice.against, choice.backend)  # before anything is made
    check_places(options)
    session.results = _begun(options, about)
    events = tensorboard.writer_of(options.tensorboard) if options.tensorboard else None
    screen = Console(stderr=True, highlight=False)
    writer = Writer(options.json, about)
    code = 0
    told = _cut(options, device)
    if told:
        screen.print(told, markup=False, soft_wrap=True)
    try:
        left = session.left(todo)
        with _engines(options, choice, device, left) as engines:
            session.run(left, engines, writer, screen)
    except KeyboardInterrupt:
        code = INTERRUPTED
        session.ended = session.ended or "interrupted"
    _report(session.results, about, options, old)
    if events is not None:
        tensorboard.write(session.results, about, events)
    if session.ended:
        screen.print(session.ended, markup=False, soft_wrap=True)
        code = code or (0 if session.planned else 1)
    return code


def _cut(options: Options, device: str) -> str:
    """What of the rows asked for is cut to the device's size; nothing where none is."""
    asked = select(rows_of(options.suite), options.rows)
    kept = sized(asked, device)
    changed, left = len(set(kept) - set(asked)), len(asked) - len(kept)
    if not changed and not left:
        return ""
    alike = f", {left} more became like another one and are left out" if left else ""
    return f"{changed} of {len(asked)} rows are cut to size{alike}: {CUT}"


# options that a file's results depend on
OPTIONS = ("seconds", "against", "backend", "baseline")


def _begun(options: Options, about: Machine) -> list[Measurement]:
    """The results that the file has already, where the run goes on with it."""
    path = options.json
    if path is None or not path.exists():
        return []
    if not options.resume:
        raise OpenRNNError(f"{path} is there already: go on with it by --resume, or choose another")
    before = read(path)
    if before.machine.get("name") != about["name"]:
        raise OpenRNNError(
            f"{path} is of another machine, {before.machine.get('name')}, this is {about['name']}"
        )
    for option in OPTIONS:
        was, now = values_of(before.machine, option), about.get(option)
        if was and now not in was:
            had = before.machine[option]
            raise OpenRNNError(f"{path} was measured with {option} {had}, --resume with {now}")
    return list(before.results)


def _report(
    results: Sequence[Measurement], about: Machine, options: Options, old: ResultFile | None
) -> None:
    out = report.console()
    report.show(results, about, out)
    if old is not None:
        report.show_moved(old, results, about, out)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown.document(results, about), encoding="utf-8")
    if options.charts and results:
        stem = options.json.stem if options.json else "bench"
        charts.draw(results, options.charts, stem)


def _show(options: Options, old: ResultFile | None) -> int:
    """What written files say: tables, charts, the page."""
    paths = list(files_of(options.show))
    records = [(path, read(path)) for path in paths]
    _check_shown(options, paths)
    check_places(options)
    if options.page:
        page.write(options.page, records)
        return 0
    for path, record in records:
        named = Options(
            json=path, markdown=options.markdown, charts=options.charts, compare=options.compare
        )
        if record.results:
            _report(record.results, record.machine, named, old)
        if record.trained:
            report.console().print(report.rendered(training.sheet(record.trained)))
    return 0


def _check_shown(options: Options, paths: Sequence[Path]) -> None:
    """Refuses to write what several files say over each other."""
    if options.markdown and len(paths) > 1:
        raise ValueError(f"--markdown is of one file of results, --show names {len(paths)}")
    if options.charts and len({path.stem for path in paths}) < len(paths):
        raise ValueError("--charts are named after their files, of which --show has two of a name")


SUITE_NAMES = (*SUITES, "train", "all")
