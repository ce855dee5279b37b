"""What became of each recurrent module of a model: a row for each path, and a table of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from torch import nn

from openrnn.convert.classes import label


@dataclass(frozen=True)
class ConversionRow:
    """What became of one recurrent module: its path in the model, what it was, and the outcome."""

    path: str
    kind: str
    swapped: bool
    note: str


def change_each(
    model: nn.Module,
    wanted: Callable[[nn.Module], bool],
    change: Callable[[nn.Module], tuple[str, bool]],
) -> tuple[ConversionRow, ...]:
    """Changes each wanted module of a model once; a row for each path at which one stands.

    Args:
        change: changes a module in place, or leaves it; returns a note, and whether it did.
    """
    rows: list[ConversionRow] = []
    first: dict[int, ConversionRow] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if not wanted(module):
            continue
        known = first.get(id(module))
        if known is not None:
            note = f"{known.note} (the same module as {known.path})"
            rows.append(ConversionRow(path, known.kind, known.swapped, note))
            continue
        kind = label(type(module))
        note, changed = change(module)
        first[id(module)] = ConversionRow(path, kind, changed, note)
        rows.append(first[id(module)])
    return tuple(rows)


WIDTH = 80  # columns of a table, where no single word is longer


def table(title: str, rows: Sequence[ConversionRow]) -> str:
    """The rows as lines below a title, in columns; a note that does not fit stands below."""
    cells = [(row.path or "(the model itself)", row.kind, row.note) for row in rows]
    widths = [max((len(cell[k]) for cell in cells), default=0) for k in range(2)]
    lines = [title]
    for path, kind, note in cells:
        start = f"  {path:<{widths[0]}}  {kind:<{widths[1]}}"
        if len(start) + 2 + len(note) <= WIDTH:
            lines.append(f"{start}  {note}")
            continue
        lines.append(start.rstrip())
        lines += noted(note, 6)
    return "\n".join(lines)


def noted(note: str, indent: int) -> list[str]:
    """A note in lines of at most `WIDTH` columns, but for longer words."""
    space = " " * indent
    return wrap(
        note, WIDTH, initial_indent=space, subsequent_indent=space, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
