"""A run as Markdown."""

from collections.abc import Iterator, Sequence

from openrnn.bench.ratios import TIES, Line, faults, lines_of
from openrnn.bench.record import Machine, Measurement
from openrnn.bench.tables import (
    DISTURBED_NOTE,
    Sheet,
    TableCell,
    errors_sheet,
    fault_line,
    losses_sheet,
    losses_title,
    refusal_lines,
    results_sheet,
    summary_sheet,
)

NOTES = f"Bold: we are slower. `=`: {TIES}. `~`: {DISTURBED_NOTE}."


def document(results: Sequence[Measurement], machine: Machine) -> str:
    """A run, whole."""
    lines = lines_of(results)
    about = ", ".join(f"{name} {text}" for name, text in machine.items())
    parts = [f"# openrnn bench: {machine.get('name', 'unknown')}", about]
    return "\n\n".join([*parts, *sections(lines), table(results_sheet(lines)), NOTES]) + "\n"


def sections(lines: Sequence[Line]) -> Iterator[str]:
    """Means, losses, faults and refusals, each where there is any."""
    errors = errors_sheet(lines)
    if errors.rows:
        yield table(errors)
    summary = summary_sheet(lines)
    if summary.rows:
        yield table(summary)
    lost = losses_sheet(lines)
    if lost.rows:
        yield f"{losses_title(lines)}:"
        yield table(lost)
    elif summary.rows:
        yield f"{losses_title(lines)}."
    found = [fault_line(result) for result in faults(lines)]
    found += [f"refused: {text}" for text in refusal_lines(lines)]
    if found:
        yield "\n".join(f"- {escaped(text)}" for text in found)


def table(sheet: Sheet) -> str:
    """A sheet as a table."""
    rules = ["---:" if number else "---" for number in sheet.numbers]
    rows = [[_word(cell) for cell in row] for row in sheet.rows]
    every = [list(sheet.heads), rules, *rows]
    return "\n".join(f"| {' | '.join(words)} |" for words in every)


def _word(cell: TableCell) -> str:
    text = escaped(cell.text)
    return f"**{text}**" if cell.means in ("loss", "fault") else text


def escaped(text: str) -> str:
    """Text that Markdown leaves alone."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
