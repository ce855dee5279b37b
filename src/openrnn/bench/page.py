"""`docs/benchmarks.md`, made of result files and of nothing else."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from openrnn.bench import charts, glossary, markdown, overview
from openrnn.bench.cases import CUT, sized
from openrnn.bench.check import RULE
from openrnn.bench.ratios import TIES, lines_of, summaries
from openrnn.bench.record import SCHEMA, ResultFile
from openrnn.bench.suites import SUITES, rows_of
from openrnn.bench.tables import (
    COUNTED,
    COUNTED_NUMBERS,
    Sheet,
    TableCell,
    filled,
    results_sheet,
    summary_cells,
)
from openrnn.bench.training import NOTE
from openrnn.bench.training import sheet as jobs_sheet

COMMAND = "openrnn bench --show benchmarks/results --page docs/benchmarks.md"
Records = Sequence[tuple[Path, ResultFile]]

INTRODUCTION = f"""# Benchmarks

<!-- generated: {COMMAND} -->

Made of the files under `benchmarks/results` by `{COMMAND}`; a test compares the two. Every number
is one machine's; `openrnn bench` measures yours. Ratios are the other's time over ours: above 1 we
are faster, and where we are slower a table says so."""

OVERVIEW = """Each line is a kind of work: rows of one suite, explained below.
The dot is the geometric mean of its rows, the line reaches from the least to the most, and a red
dot is a row in which we are slower. Each row is compared with the way in which its users run it
today, both as called. The sections below also compare calls from CUDA graphs and cuDNN's best
algorithm, and list every loss. Suites that compare something else, `scaling`, `int8`,
`bf16-weights` and `host`, are not in this chart, nor is `cpu-bf16`, whose rows are those of
`cpu`."""

NAMES = f"""## What the names mean

A row is one network and one call; a suite is a group of rows. `openrnn bench --list` prints all of
this, and the rows of any suite. Sizes are T x B x I x H:
{glossary.NAMED}."""

METHOD = f"""## How it is measured

- **Right first.** {RULE[0].upper() + RULE[1:]}. A wrong engine is shown as wrong and not timed.
- **In turn.** All engines of a row are sampled one after the other, round by round, after a
  warm-up: CUDA events around a few calls on a GPU, the clock around them on a CPU. Times are
  medians, with quartiles in the files; they hold everything between the user's call and its end,
  Python included.
- **Ties.** {TIES[0].upper() + TIES[1:]}.
  Files keep quartiles, not single repeats; what others disturbed is shown and not counted.
- **torch.nn** is timed as called and from a CUDA graph, so that the host's part of a call and the
  device's part can be told apart. Rows that torch.nn cannot run are compared with what users run
  instead: PackedSequence for lengths, a loop of steps for resets, a Python loop over the cell for
  custom cells (its step by torch.compile as well). In bfloat16 torch.nn's own
  `flatten_parameters` does nothing, so its weights are gathered in each call, as its users have it.
- **First call** is the first one in its process, with the disk cache as it was found. **Memory**
  is what a call adds at its peak: to the device's allocated memory or, on a CPU with Linux and
  since schema 2, to what the process holds.
- **A CPU run** has the same rows: {CUT}. It is repeated up to three times while other processes
  take more than 5% of a core, and marked where they did so to the end."""

SCHEMA_TEXT = f"""## The files

JSON lines, schema {SCHEMA}: first a line of kind `machine`, then one of kind `result` for each
row, precision, mode and engine, or of kind `training`. The fields are those of
`Measurement`, `BenchRow` and `Trained` in `openrnn.bench.record` and `openrnn.bench.cases`, where
each is described; a field that has its default is left out. `openrnn bench --show FILE` prints
them, `--compare FILE` holds a new run against them."""


def text(records: Records, page: Path) -> str:
    """The page, for a file at `page`: what stands in the records, and links relative to there."""
    records = _ordered(records)
    parts = [INTRODUCTION, *_overview(records, page), *_names(), *_headlines(records)]
    for path, record in records:
        if record.results:
            parts += _section(path, record, page)
    parts += _trained(records)
    return "\n\n".join([*parts, METHOD, SCHEMA_TEXT]) + "\n"


def write(page: Path, records: Records) -> None:
    """The page, and the charts of each file beside it."""
    for path, record in records:
        if record.results:
            charts.draw(record.results, path.parent, path.stem)
    overview.draw(records)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text(records, page), encoding="utf-8")


def _machine(record: ResultFile) -> str:
    """The name of a machine and, for a CPU, with how many threads it ran."""
    threads = record.machine.get("threads", "").partition(" ")[0]
    return record.machine["name"] + (f", {threads} threads" if threads else "")


def _ordered(records: Records) -> Records:
    """The files machine by machine, each in the order of the suites."""
    machines = list(dict.fromkeys(_machine(record) for _, record in records))
    suites = list(SUITES)

    def order(item: tuple[Path, ResultFile]) -> tuple[int, int]:
        _, record = item
        found = (suites.index(one.row.suite) for one in record.results if one.row.suite in suites)
        return machines.index(_machine(record)), min(found, default=len(suites))

    return sorted(records, key=order)


def _overview(records: Records, page: Path) -> Iterator[str]:
    """The chart of all records, and its numbers."""
    numbers = overview.sheet(records)
    if numbers.rows:
        yield _image(overview.chart_path(records), page)
        yield OVERVIEW
        yield _folded("the numbers of this chart", markdown.table(numbers))


def _names() -> Iterator[str]:
    """What suites, rows, engines and terms mean."""
    yield NAMES
    yield "\n".join(f"- **{term}**: {text}." for term, text in glossary.TERMS.items())
    yield markdown.table(glossary.origins_sheet())
    yield _folded("every suite", markdown.table(glossary.suites_sheet()))
    yield _folded("what is compared with", markdown.table(glossary.engines_sheet()))


def _image(path: Path, page: Path) -> str:
    link = Path(os.path.relpath(path, page.parent)).as_posix()
    return f"![{path.stem}]({link})"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _headlines(records: Records) -> Iterator[str]:
    tables: dict[str, list[tuple[TableCell, ...]]] = {}
    for _, record in records:
        lines = lines_of(record.results)
        for suite in dict.fromkeys(line.row.suite for line in lines):
            mine = [line for line in lines if line.row.suite == suite]
            found = sorted(summaries(mine), key=lambda one: one.precision)
            rows = [(TableCell(suite), *summary_cells(summary)) for summary in found]
            tables.setdefault(_machine(record), []).extend(rows)
    if any(tables.values()):
        yield "## All together"
        yield "Geometric means, with the least and the most of the rows beside them."
    for machine, rows in tables.items():
        if rows:
            yield f"### {machine}"
            heads, numbers = ("suite", *COUNTED), (False, *COUNTED_NUMBERS)
            sheet = filled(Sheet("", heads, numbers, tuple(rows)))
            yield _folded("every suite, precision and mode", markdown.table(sheet))
        missing = list(_missing([one for _, one in records if _machine(one) == machine]))
        if missing:
            yield "Not all rows were measured, and means are of those that were:\n" + "\n".join(
                missing
            )


def _missing(records: Iterable[ResultFile]) -> Iterator[str]:
    """The suites of which a file has some rows only."""
    for record in records:
        names: dict[tuple[str, str], set[str]] = {}
        for result in record.results:
            names.setdefault((result.row.suite, result.precision), set()).add(result.row.name)
        for (suite, precision), found in names.items():
            rows = rows_of(suite) if suite in SUITES else ()
            whole = len(sized(rows, record.machine["device"]))
            if len(found) < whole:
                yield f"- {suite} in {precision}, {len(found)} of {whole} rows"


def _section(path: Path, record: ResultFile, page: Path) -> Iterator[str]:
    lines = lines_of(record.results)
    suites = " and ".join(dict.fromkeys(line.row.suite for line in lines))
    yield f"## {_machine(record)}: {suites} (`{path.stem}`)"
    yield ", ".join(f"{name} {value}" for name, value in record.machine.items()) + "."
    for name in charts.names(record.results, path.stem):
        yield _image(path.parent / name, page)
    yield from markdown.sections(lines)
    table = markdown.table(results_sheet(lines))
    yield _folded("every row", f"{table}\n\n{markdown.NOTES}")


def _trained(records: Records) -> Iterator[str]:
    for _, record in records:
        if record.trained:
            yield f"## {record.machine['name']}: training a language model"
            yield (
                f"`openrnn train` for a fixed time: {NOTE}. Each GPU has the same share of the "
                "batch; efficiency is the rate over that of one GPU times their number."
            )
            yield markdown.table(jobs_sheet(record.trained))
