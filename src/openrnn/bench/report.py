"""A run on the terminal: tables with colours, what we lose, who refused."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrnn.bench.compare import DRIFT, NOISE, differences, moved
from openrnn.bench.ratios import TIES, faults, lines_of
from openrnn.bench.record import Machine, Measurement, ResultFile
from openrnn.bench.tables import (
    DISTURBED_NOTE,
    Sheet,
    errors_sheet,
    fault_line,
    losses_sheet,
    moved_sheet,
    refusal_lines,
    results_sheet,
    summary_sheet,
)

STYLES = {
    "win": "green",
    "loss": "bold red",
    "tie": "yellow",
    "disturbed": "dim",
    "fault": "bold red",
    "": "",
}
WIDTH = 140  # of a file or pipe


def console() -> Console:
    """Where tables go: as wide as the terminal, and wide enough where there is none."""
    made = Console(highlight=False, soft_wrap=False)
    return made if made.is_terminal else Console(highlight=False, width=WIDTH)


def show(results: Sequence[Measurement], machine: Machine, out: Console) -> None:
    """Everything that a run says, the losses included."""
    lines = lines_of(results)
    if not lines:
        out.print("nothing was measured")
        return
    out.print(rendered(results_sheet(lines)))
    errors = errors_sheet(lines)
    if errors.rows:
        out.print(rendered(errors))
    summary = summary_sheet(lines)
    if summary.rows:
        out.print(rendered(summary))
    lost = losses_sheet(lines)
    out.print(rendered(lost) if lost.rows else Text(lost.title))
    for result in faults(lines):
        out.print(Text(fault_line(result), style="bold red"))
    for text in refusal_lines(lines):
        out.print(Text(f"refused: {text}", style="dim"))
    out.print(Text(", ".join(f"{name} {text}" for name, text in machine.items()), style="dim"))
    out.print(Text(f"= is {TIES}; ~: {DISTURBED_NOTE}", style="dim"))


def show_moved(
    old: ResultFile, results: Sequence[Measurement], machine: Machine, out: Console
) -> None:
    """What moved since an older file."""
    changes = differences(old.machine, machine)
    found, count = moved(old.results, results, steady=not changes)
    for text in changes:
        out.print(Text(f"another machine than before: {text}", style="yellow"))
    if not count:
        out.print("nothing to compare: none of these rows was measured at these sizes, undisturbed")
        return
    if found:
        out.print(rendered(moved_sheet(found)))
    out.print(f"{len(found)} of {count} times moved beyond noise")
    out.print(Text(NOISE if changes else f"{NOISE}; {DRIFT}", style="dim"))


def rendered(sheet: Sheet) -> Table:
    """A sheet with its colours."""
    made = Table(title=sheet.title, title_justify="left", header_style="bold")
    for head, number in zip(sheet.heads, sheet.numbers):
        # only the widest columns may be folded
        made.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in sheet.rows:
        made.add_row(*(Text(cell.text, style=STYLES[cell.means]) for cell in row))
    return made
