"""`openrnn bench` and `openrnn soak`: what takes time, and whether it stays right."""

from pathlib import Path
from typing import Annotated

import typer

from openrnn_command.options import BACKENDS, Device, interruptible, option, words

SUITES = (
    "users, deepbench, latency, scaling, resets-and-lengths, custom, fused, cudnn, cpu, cells, "
    "host, precision, loops, stacks, widths, int8, bf16-weights, cpu-bf16, higher, steps, "
    "train or all"
)
PEERS = (
    "torch, graph, cudnn, cudnn-graph, packed, loop, eager, compiled, flashrnn, torchrl, "
    "onnxruntime, float32, recompute, reference, cudnn-standard, cudnn-persist-static, "
    "cudnn-persist-dynamic, cudnn-persist-static-small-h, no-overlap, two-chunks, or none"
)
OF_SUITE = "that of the suite"


@interruptible
def bench(
    *,
    listed: Annotated[
        bool,
        typer.Option(
            "--list",
            help="Instead of timing: explain suites, rows, engines and the terms of tables",
        ),
    ] = False,
    suite: Annotated[
        str,
        typer.Option(
            help="Groups of rows to time, explained by --list; several with commas: " + SUITES
        ),
    ] = "users",
    rows: Annotated[
        list[str] | None,
        option(
            "Only the rows of this name, such as lm-650 or 'lm-*'; may be given several times",
            metavar="NAME",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        option(
            "Precisions, with commas: bfloat16, float16, tf32, float32, float64, int8, "
            "bf16-weights, or auto: each row in the precision that its users run",
            OF_SUITE,
        ),
    ] = None,
    against: Annotated[
        str | None,
        option(f"What to compare with, explained by --list; with commas: {PEERS}", OF_SUITE),
    ] = None,
    backend: Annotated[str | None, option(f"Our backend: {BACKENDS}", OF_SUITE)] = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds of timing for each engine in each mode of a row")
    ] = 0.2,
    minutes: Annotated[
        float | None,
        option(
            "Stop after this time; a row that is not complete by then is left out. For suite "
            "train: time of each training run",
            "all rows; 1 for suite train",
        ),
    ] = None,
    gpus: Annotated[
        str, typer.Option(help="For suite train: numbers of GPUs to train on, with commas")
    ] = "1",
    json: Annotated[
        Path | None, option("File to write the results to, one JSON object a line")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the file of --json: time only what it lacks"),
    ] = False,
    markdown: Annotated[Path | None, option("File to write the tables to, in Markdown")] = None,
    charts: Annotated[Path | None, option("Folder to write charts to, as PNG files")] = None,
    tensorboard: Annotated[
        Path | None, option("Folder to write the results to, for TensorBoard")
    ] = None,
    compare: Annotated[
        Path | None, option("An older file of results: also show what became faster or slower")
    ] = None,
    baseline: Annotated[
        str | None,
        option("A commit of this repository, or a folder of sources, to time in turn with ours"),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that compile the CUDA kernels of all rows at the start")
    ] = 0,
    profile: Annotated[
        str | None,
        option(
            "Instead of timing: list the kernels and gaps of calls of these rows", metavar="NAME"
        ),
    ] = None,
    show: Annotated[
        list[Path] | None,
        option(
            "Instead of timing: show a file or folder of results; may be given again",
            metavar="PATH",
        ),
    ] = None,
    page: Annotated[
        Path | None, option("Markdown page to write from the results of --show, with charts")
    ] = None,
) -> int:
    """Compare OpenRNN with what its users run today, on this machine.

    A row is one network and one call. Those of the default suite have the sizes of projects that
    are in use, and their names: --list explains them. All engines first compute the row, and their
    results are compared with float64; then they are timed in turn. Ctrl-C keeps what was measured.
    """
    from openrnn.bench import command
    from openrnn.bench.options import Options
    from openrnn.lm.config import refusing

    peers = None if against is None else words(against.replace("none", ""))
    with refusing():
        return command.execute(
            Options(
                suite, device, None if dtype is None else words(dtype),
                words(",".join(rows or ())), peers, backend, seconds, minutes, json, resume,
                markdown, charts, compare, baseline, profile, tensorboard, show or (), page,
                _counts(gpus), workers, listed,
            )
        )  # fmt: skip


@interruptible
def soak(
    *,
    minutes: Annotated[float, typer.Option(help="How long to run")] = 10.0,
    problems: Annotated[int, typer.Option(help="Number of random networks and calls")] = 40,
    processes: Annotated[
        int, typer.Option(help="Processes that run at the same time and share the device")
    ] = 1,
    seed: Annotated[
        int, typer.Option(help="Seed of the first process; each next one has the next number")
    ] = 0,
    device: Device = "auto",
    backend: Annotated[
        str | None, option(f"The backend: {BACKENDS}", "fused on a GPU, auto on a CPU")
    ] = None,
) -> int:
    """Run random calls again and again, and check that nothing changes.

    Each call must give the same bits every time, and the memory in use must not grow. A line is
    printed every minute. The exit code is 1 where a check fails.
    """
    from openrnn.bench import soak as soaking
    from openrnn.bench.options import device_of
    from openrnn.lm.config import refusing

    with refusing():
        where = device_of(device)
        ours = backend or ("auto" if where == "cpu" else "fused")
        return soaking.execute(soaking.Soak(minutes, problems, processes, seed, where, ours))


def _counts(text: str) -> list[int]:
    counts = words(text)
    if not counts or not all(word.isdecimal() and int(word) for word in counts):
        raise ValueError(f"--gpus must be numbers of GPUs, such as 1,2, got {text!r}")
    return [int(word) for word in counts]
