"""`openrnn tune`: for those who change our CUDA kernels, or run them on another GPU."""

from pathlib import Path
from typing import Annotated

import typer

from openrnn_command.options import interruptible, option

app = typer.Typer(
    help="For developers: measure CUDA kernels, to choose among them on this GPU.",
    no_args_is_help=True,
)


@app.command()
@interruptible
def kernels(
    *,
    cell: Annotated[
        str, typer.Option(help="Cells, names of openrnn.cells, with commas")
    ] = "lstm,gru",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32; several with commas")
    ] = "bfloat16",
    kind: Annotated[
        str, typer.Option(help="Which kernels; several with commas")
    ] = "inference,forward,backward",
    mask: Annotated[
        str, typer.Option(help="With which masks: none, lengths or reset; several with commas")
    ] = "none",
    hidden: Annotated[str, typer.Option(help="Hidden sizes, with commas")] = "64,128,256,512,1024",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas")] = "1,16,64,256",
    most: Annotated[
        int,
        typer.Option(help="Kernels to time of each size: so many grids, and so many others"),
    ] = 8,
    delays: Annotated[
        bool,
        typer.Option("--delays", help="Time only the delays of the grids that are chosen now"),
    ] = False,
    loops: Annotated[
        int,
        typer.Option(help="Loops that run at the same time: 2 as in both directions of a layer"),
    ] = 1,
    json: Annotated[Path | None, option("File to write the times to, or to add them to")] = None,
    table: Annotated[
        Path | None, option("File to write the table of fastest kernels to, measured.csv")
    ] = None,
) -> int:
    """Time CUDA kernels alone: those ranked first, and variants of the best."""
    from openrnn.tune import command

    return command.kernels(
        cell, dtype, kind, mask, hidden, batch, most, delays, loops, json, table
    )  # fmt: skip


@app.command()
@interruptible
def table(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Files of `tune kernels --json`; of two times of a kernel the later file's counts",
            metavar="FILE",
        ),
    ],
) -> int:
    """Print the table of fastest kernels, tuning/measured.csv, of files of times."""
    from openrnn.tune import command

    return command.table(files)


@app.command()
@interruptible
def regions(
    *,
    json: Annotated[Path | None, option("File to write the results to")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the file of --json: time only what it lacks")
    ] = False,
    minutes: Annotated[float | None, option("Stop after so many minutes", "all rows")] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that compile the CUDA kernels of all rows at the start")
    ] = 0,
    show: Annotated[
        list[Path] | None,
        option("Instead of timing: read these results; may be given again", metavar="PATH"),
    ] = None,
) -> int:
    """Print the regions of sizes in which cuDNN is faster, for backend `auto`.

    Times suite fused of `openrnn bench`, both sides from CUDA graphs, or reads earlier results.
    """
    from openrnn.tune import command

    return command.regions(json, resume, minutes, workers, show or ())
