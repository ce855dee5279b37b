"""A page for each cell that ships: made of its code, of the backends' answers and of results."""

import inspect
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import equations
import torch
from papers import PAPERS

from openrnn import cells, dispatch, params
from openrnn.bench import overview
from openrnn.bench.charts import usual
from openrnn.bench.ratios import Pair, lines_of
from openrnn.bench.record import read
from openrnn.cells import Cell
from openrnn.spec import Problem, dtype_name

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results"
MADE = DOCS / "generated"
WIDTH = 256  # I and H of the numbers of parameters
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HOPPER = (9, 0), 132  # compute capability and multiprocessors of an H100
LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
LISTED = 24  # rows of measured speed that a page lists; of more it has the means alone

LEGEND = r"""$W_g$ and $R_g$ are the rows of `weight_ih` and `weight_hh` that belong to gate g, in
the order of the gates below. $b_g$ is the sum of `bias_ih` and `bias_hh`, whose own parts are
$b^W_g$ and $b^R_g$. $\odot$ multiplies element by element."""

# machine, precision and mode -> suite and name of a row -> ours and theirs
Rows = dict[tuple[str, str, str], dict[tuple[str, str], Pair]]


def shipped() -> dict[str, Cell]:
    """The cells of `openrnn.cells`, in the order in which they stand there."""
    return {name: cell for name, cell in vars(cells).items() if isinstance(cell, Cell)}


def page(cell: Cell, rows: Rows) -> str:
    """The page of a cell, as Markdown."""
    said = inspect.getdoc(cell.function) or ""
    parts = [f"# {cell.name}", _escaped(said), *_papers(cell), *_use(cell)]
    try:
        parts += ["## Equations", f"$$\n{equations.block(cell)}\n$$", LEGEND]
    except equations.NotAnEquationError:
        parts += ["## Equations", "They are more than assignments: see the definition."]
    if cell.takes_clip:
        parts.append("With `cell_clip` a layer bounds the cell state where it is read.")
    parts += ["## Definition", f"```python\n{_source(cell)}```", "## Sizes", _sizes(cell)]
    parts += ["## Backends", *_backends(cell)]
    if rows:
        parts += ["## Measured speed", *_speed(rows)]
    return "\n\n".join(parts) + "\n"


def _papers(cell: Cell) -> Iterator[str]:
    if cell.key in PAPERS:
        yield "\n".join(f"- [{title}]({link})" for title, link in PAPERS[cell.key])


def _use(cell: Cell) -> Iterator[str]:
    face = LAYERS.get(cell.key)
    if face:
        relu = ', nonlinearity="relu"' if cell.key == "rnn_relu" else ""
        yield f"```python\nlayer = openrnn.{face}(128, 256{relu})\n```"
    else:
        yield f"```python\nlayer = openrnn.Recurrent(openrnn.cells.{cell.key}, 128, 256)\n```"


def _source(cell: Cell) -> str:
    """The function as it stands."""
    return textwrap.dedent(inspect.getsource(cell.function))


def _sizes(cell: Cell) -> str:
    gates, vectors = len(cell.gates), len(cell.unit_params)
    formula = f"{gates}H(I + H + 2)" + (f" + {vectors}H" if vectors else "")
    count = params.size(cell.spec(WIDTH, WIDTH))
    return table(
        ("", "names", "each"),
        [
            ("gates", _names(cell.gates), "$H$ rows of `weight_ih` and `weight_hh`"),
            ("states", _names(cell.states), "$(B, H)$; the first is emitted; all begin at 0"),
            ("vectors", _names(cell.unit_params) or "none", "$(H,)$, trained"),
            ("parameters", f"${formula}$", f"{count:,} where I and H are {WIDTH}"),
        ],
    )


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _backends(cell: Cell) -> Iterator[str]:
    """What each backend says, by values alone: of one layer that is trained."""
    spec = cell.spec(WIDTH, WIDTH)
    rows = []
    for name, backend in dispatch.BACKENDS.items():
        runs: dict[str, list[str]] = {}
        reasons: list[str] = []
        for device in ("cpu", "cuda"):
            place = HOPPER if device == "cuda" else (None, None)
            for dtype in DTYPES:
                problem = Problem(
                    spec, dtype, device, place[0], grad=True, training=True, processors=place[1]
                )
                refused = backend.refusals(problem)
                if not refused:
                    runs.setdefault(device, []).append(dtype_name(dtype))
                elif not any(reason.startswith("device ") for reason in refused):
                    reasons = reasons or refused
        where = "; ".join(f"{device}: {', '.join(dtypes)}" for device, dtypes in runs.items())
        rows.append((f"`{name}`", where or f"refuses: {_escaped('; '.join(reasons))}"))
    yield table(("backend", "runs a layer in training on"), rows)
    yield (
        "`auto` takes the first of them that runs a call, and `openrnn.explain` says why. "
        "[How to choose](../../choose.md) says more."
    )


def _speed(rows: Rows) -> Iterator[str]:
    yield (
        "How many times as fast as what the users of each row run today, both as called; "
        "[benchmarks](../../benchmarks.md) has every row."
    )
    means = []
    for (machine, precision, mode), pairs in rows.items():
        ratios = sorted(pair.ratio for pair in pairs.values())
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        words = [f"{mean:.3g}", f"{ratios[0]:.3g}", f"{ratios[-1]:.3g}"]
        means.append((machine, precision, mode, str(len(ratios)), *words))
    yield table(("machine", "precision", "mode", "rows", "mean", "least", "most"), means)
    if sum(map(len, rows.values())) <= LISTED:
        yield table(
            ("row", "T x B x I x H", "precision", "mode", "us a step", "times as fast"),
            [
                (
                    name, pair.ours.row.shape, precision, mode,
                    f"{(pair.ours.us or 0) / pair.ours.row.steps:.3g}", f"{pair.ratio:.3g}",
                )
                for (_, precision, mode), pairs in rows.items()
                for (_, name), pair in pairs.items()
            ],
        )  # fmt: skip


def measured() -> dict[str, Rows]:
    """The pairs of all committed results, by cell; what was disturbed does not count."""
    found: dict[str, Rows] = {}
    for path in sorted(RESULTS.rglob("*.jsonl")):
        record = read(path)
        for line in lines_of(record.results):
            pair = usual(line)
            if pair and not pair.disturbed and line.mode in overview.SHIFT:
                key = (record.machine["name"], line.precision, line.mode)
                rows = found.setdefault(line.row.cell, {}).setdefault(key, {})
                rows[line.row.key] = pair
    return found


def summary() -> str:
    """One line for each cell."""
    rows = []
    for name, cell in shipped().items():
        count = f"{params.size(cell.spec(WIDTH, WIDTH)):,}"
        first = (inspect.getdoc(cell.function) or "").splitlines()[0]
        link = f"[{name}](cells/{name}.md)"
        rows.append((link, _escaped(first), ", ".join(cell.gates), ", ".join(cell.states), count))
    return table(("cell", "what it is", "gates", "states", "parameters"), rows)


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    every = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in every)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _write(app: "Sphinx") -> None:
    """Pages that are as they were are left alone, so that Sphinx does not read them again."""
    rows = measured()
    made = {
        f"cells/{name}.md": page(cell, rows.get(cell.key, {})) for name, cell in shipped().items()
    }
    made["cells.txt"] = summary() + "\n"
    for name, text in made.items():
        path = MADE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in MADE.glob("cells/*.md"):
        if f"cells/{path.name}" not in made:
            path.unlink()


def setup(app: "Sphinx") -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
