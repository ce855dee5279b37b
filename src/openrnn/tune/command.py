"""`openrnn tune`: its commands."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from openrnn.bench import command as benchmark
from openrnn.bench import machine, report
from openrnn.bench.options import Options, device_of
from openrnn.bench.record import Writer, files_of, read
from openrnn.codegen.config import SIZES
from openrnn.errors import OpenRNNError
from openrnn.lm.config import refusing
from openrnn.tune import regions as regions_
from openrnn.tune import table as table_
from openrnn.tune.candidates import KINDS
from openrnn.tune.kernels import TuneRequest, measure
from openrnn.tuning import measured

app = typer.Typer(
    help="Measure what CUDA kernels are chosen by: after a change of them, or for another GPU.",
    no_args_is_help=True,
)
Cells = Annotated[str, typer.Option(help="keys of openrnn.cells, with commas")]
Numbers = Annotated[str, typer.Option(help="with commas")]
CELLS, EVERY_KIND = ",".join(TuneRequest.cells), ",".join(KINDS)
HIDDEN, BATCHES = ",".join(map(str, TuneRequest.hidden)), ",".join(map(str, TuneRequest.batches))


@app.command()
def kernels(
    *,
    cell: Cells = CELLS,
    dtype: Annotated[str, typer.Option(help=f"of {', '.join(SIZES)}; with commas")] = "bfloat16",
    kind: Annotated[str, typer.Option(help="with commas")] = EVERY_KIND,
    mask: Annotated[str, typer.Option(help=f"of {', '.join(measured.MASKS)}; with commas")] = (
        measured.PLAIN
    ),
    hidden: Numbers = HIDDEN,
    batch: Numbers = BATCHES,
    most: Annotated[int, typer.Option(help="kernels of a size, grids and others each")] = 8,
    delays: Annotated[
        bool, typer.Option("--delays", help="only the delays of grids that are chosen now")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="file of times to write or add to")] = None,
    table: Annotated[Path | None, typer.Option(help="measured.csv to write with them")] = None,
) -> int:
    """Time CUDA kernels alone: the first of each ranking and variants of the best."""
    with refusing():
        device_of("cuda")
    request = TuneRequest(
        _of("cell", cell), _of("dtype", dtype, tuple(SIZES)), _of("kind", kind, tuple(KINDS)),
        _of("mask", mask, measured.MASKS), _numbers("hidden", hidden), _numbers("batch", batch),
        most, delays,
    )  # fmt: skip
    torch.zeros(1, device="cuda")
    times = measure(request, Writer(json, machine.describe("cuda")), Console(stderr=True))
    report.console().print(report.rendered(table_.sheet(times)))
    if table is not None:
        table.write_text(table_.text_of([times]), encoding="utf-8")
    return 0


@app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="of tune kernels --json; later ones win")],
) -> int:
    """Print the table of fastest kernels, tuning/measured.csv, with files of times."""
    found = [read(path).kernels for path in files_of(files)]
    typer.echo(table_.text_of(found), nl=False)
    return 0


@app.command()
def regions(
    *,
    json: Annotated[Path | None, typer.Option(help="file of results to write")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with that file")] = False,
    minutes: Annotated[float | None, typer.Option(help="begin no row after")] = None,
    workers: Annotated[int, typer.Option(help="processes that first compile kernels")] = 0,
    show: Annotated[
        list[Path] | None, typer.Option(help="files of results: measure nothing")
    ] = None,
) -> int:
    """Print the regions in which cuDNN is faster, from which `auto` chooses.

    Measures the suite fused of openrnn bench, both sides from CUDA graphs, or reads its results.
    """
    code = 0
    if not show:
        if json is None:
            raise OpenRNNError("tune regions needs a file to write, --json, or results, --show")
        options = Options(
            suite="fused", device="cuda", against=regions_.PEERS[::-1], json=json, resume=resume,
            minutes=minutes, workers=workers,
        )  # fmt: skip
        with refusing():
            code = benchmark.execute(options)
    results = [one for path in files_of(show or [json or Path()]) for one in read(path).results]
    for region in regions_.regions_of(results):
        typer.echo(str(region))
    return code


def _of(name: str, text: str, valid: tuple[str, ...] | None = None) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if valid is not None and word not in valid:
            raise OpenRNNError(f"{name} must be of {', '.join(valid)}, got {word!r}")
    return words


def _numbers(name: str, text: str) -> list[int]:
    words = _of(name, text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise OpenRNNError(f"{name} must be sizes, as 64,256, got {text!r}")
    return [int(word) for word in words]
