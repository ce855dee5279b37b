"""The command `openrnn`: train, sample, info, explain, convert, bench, soak, tune."""

import io
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from openrnn import cells, dispatch, request
from openrnn.bench import command as benchmark
from openrnn.bench.engines import PEERS
from openrnn.bench.interrupt import INTERRUPTED
from openrnn.bench.options import Options, device_of
from openrnn.bench.soak import Soak
from openrnn.bench.soak import execute as run_soak
from openrnn.convert import command as conversion
from openrnn.errors import OpenRNNError
from openrnn.explain import explain as explain_problem
from openrnn.info import report
from openrnn.lm import workers
from openrnn.lm.config import MINUTES, Config, refusing
from openrnn.lm.job import OUT, Job, execute
from openrnn.lm.model import find
from openrnn.lm.sample import load
from openrnn.lm.sample import sample as sample_text
from openrnn.request import Request
from openrnn.spec import clip_bounds, precision_of
from openrnn.tune.command import app as tune

app = typer.Typer(
    help="Recurrent layers of any cell at fused speed.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
)

# torch's words for sizes that no CPU has the memory for, of its RuntimeErrors
NO_MEMORY = ("DefaultCPUAllocator", "Storage size calculation overflowed")
CELLS = "lstm, gru, rnn_tanh, rnn_relu, another of openrnn.cells, or path.py:name"
Cell = Annotated[str | None, typer.Option(help=CELLS, show_default=Config.cell)]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Backend = Annotated[str, typer.Option(help=f"auto, {', '.join(dispatch.BACKENDS)}")]


def _option(text: str, default: object = None) -> Any:
    """An option that, where it is not given, leaves the matter to the run or to its default."""
    return typer.Option(help=text, show_default=str(default) if default is not None else False)


app.add_typer(tune, name="tune")


@app.command()
def train(
    *,
    corpus: Annotated[
        Path | None, _option("file or folder to train on", "Python's standard library")
    ] = None,
    cell: Cell = None,
    model: Annotated[
        str | None, _option("whose layers, openrnn or torch (to compare)", Config.model)
    ] = None,
    layers: Annotated[int | None, _option("recurrent layers", Config.layers)] = None,
    hidden: Annotated[int | None, _option("units of a layer", Config.hidden)] = None,
    embed: Annotated[int | None, _option("width of a byte's embedding", Config.embed)] = None,
    bptt: Annotated[int | None, _option("bytes of a step, in each stream", Config.bptt)] = None,
    batch: Annotated[int | None, _option("streams, over all processes", Config.batch)] = None,
    steps: Annotated[int | None, _option("the budget in steps, or")] = None,
    minutes: Annotated[float | None, _option("the budget in time", MINUTES)] = None,
    lr: Annotated[float | None, _option("highest learning rate", Config.lr)] = None,
    dropout: Annotated[float | None, _option("between layers", Config.dropout)] = None,
    dtype: Annotated[
        str | None, _option("float32, bfloat16 (autocast) or float64", Config.dtype)
    ] = None,
    device: Annotated[str | None, _option("auto, cpu or cuda", Config.device)] = None,
    backend: Annotated[
        str | None, _option(f"auto, {', '.join(dispatch.BACKENDS)}", Config.backend)
    ] = None,
    seed: Annotated[int | None, _option("of everything drawn", Config.seed)] = None,
    out: Annotated[Path | None, _option("folder of the checkpoint", OUT)] = None,
    resume: Annotated[Path | None, _option("folder of a run to go on with")] = None,
    tensorboard: Annotated[Path | None, _option("folder of scalars", "OUT/tensorboard")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print nothing but errors")] = False,
) -> int:
    """Train a byte-level language model; Ctrl-C saves, --resume goes on bit for bit.

    About 5% of the files are held out, chosen by their paths. Of a folder are read all regular
    files that are not hidden, not binary and not under `__pycache__`. Under torchrun the processes
    share the streams of the batch.
    """
    named = {
        "corpus": None if corpus is None else str(corpus.resolve()),
        "cell": cell, "model": model, "layers": layers, "hidden": hidden, "embed": embed,
        "bptt": bptt, "batch": batch, "steps": steps, "minutes": minutes, "lr": lr,
        "dropout": dropout, "dtype": dtype, "device": device, "backend": backend, "seed": seed,
    }  # fmt: skip
    given = {name: value for name, value in named.items() if value is not None}
    job = Job(given, out, resume, tensorboard, quiet)
    number = execute(job)
    if not number:
        return 0
    _say(f"stopped and saved: go on with openrnn train --resume {job.folder}")
    return 128 + number


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(help="folder of a checkpoint", metavar="DIR")],
    *,
    prompt: Annotated[str, typer.Option(help="what the text begins with")] = "",
    length: Annotated[int, typer.Option(help="bytes to add")] = 400,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte")] = 0.8,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
    device: Device = "auto",
    backend: Backend = "auto",
    cell: Annotated[str | None, _option("where a cell of your own is, path.py:name")] = None,
) -> int:
    """Write text with a trained model."""
    with refusing():
        model = load(folder, device, backend, cell)
        first = prompt.encode("utf-8", "surrogateescape")
        text = sample_text(model, first, length, temperature, seed)
    for part in text:
        sys.stdout.write(part)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


@app.command()
def info() -> int:
    """Show versions, devices, and each backend or the reason why it is absent."""
    rows = list(report())
    width = max(len(what) for what, _ in rows)
    for what, text in rows:
        typer.echo(f"{what:<{width}}  {text}")
    return 0


@app.command()
def explain(
    *,
    cell: Annotated[str, typer.Option(help=CELLS)] = "lstm",
    input: Annotated[int, typer.Option(help="features of an input step, I")] = 128,
    hidden: Annotated[int, typer.Option(help="units of a layer, H")] = 128,
    layers: Annotated[int, typer.Option(help="layers, L")] = 1,
    bidirectional: Annotated[bool, typer.Option("--bidirectional", help="two directions")] = False,
    proj: Annotated[int, typer.Option(help="width of a projection, P, or 0")] = 0,
    dropout: Annotated[float, typer.Option(help="between layers")] = 0.0,
    bias_mode: Annotated[str, typer.Option(help="double, input, recurrent or none")] = "double",
    clip: Annotated[float | None, _option("bound of the cell state")] = None,
    steps: Annotated[int | None, _option("T, if it is to be shown")] = None,
    batch: Annotated[int | None, _option("B, if it is to be shown")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, here or not")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64")] = "float32",
    capability: Annotated[str | None, _option("of a CUDA device, such as 9.0")] = None,
    training: Annotated[
        bool, typer.Option("--training/--inference", help="gradients and dropout or not")
    ] = True,
    lengths: Annotated[bool, typer.Option("--lengths", help="a length for each sequence")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="resets inside sequences")] = False,
    backend: Backend = "auto",
    schedule: Annotated[
        bool, typer.Option("--schedule", help="list its operations; needs --steps and --batch")
    ] = False,
) -> int:
    """Show which backend would run a problem, and why each other one would not; runs nothing."""
    with refusing():
        spec = find(cell).spec(
            input, hidden, num_layers=layers, bidirectional=bidirectional, proj_size=proj,
            dropout=dropout, bias_mode=bias_mode, cell_clip=clip_bounds(clip),
        )  # fmt: skip
        cells.check(spec)
        where = _choice("device", device, ("cpu", "cuda"))
        kind = _dtype(dtype)
        asked = Request(
            spec.text, kind, torch.device(where), precision_of(spec, kind, where), grad=training,
            training=training, lengths=lengths, reset=reset, batch=batch, steps=steps,
            capability=_capability(capability),
        )  # fmt: skip
        problem = request.problem(asked)
        table = explain_problem(problem, backend=backend, schedule=schedule)
    gone = {name: backend.absent() for name, backend in dispatch.BACKENDS.items()}
    # what refuses for nothing but its own absence, before what would run here
    there = next((row.backend for row in table.rows if row.reasons == (gone[row.backend],)), None)
    if there:
        typer.echo(f"{there} would take this, were it not absent here")
    elif table.chosen is None:
        typer.echo("no backend takes this")
    return 0 if there or table.chosen else 1


@app.command()
def convert(
    given: Annotated[Path, typer.Argument(help="file to read", metavar="IN")],
    out: Annotated[Path, typer.Argument(help="file to write", metavar="OUT")],
    *,
    source: Annotated[str, typer.Option("--from", help=conversion.NAMES)],
    target: Annotated[str, typer.Option("--to", help="as --from")],
    cell: Annotated[str | None, _option("key of our cell, if the arrays fit several")] = None,
    prefix: Annotated[str, typer.Option(help="only arrays whose names begin so")] = "",
    bidirectional: Annotated[
        bool | None, typer.Option(help="if neither names nor shapes say it", show_default=False)
    ] = None,
    hidden: Annotated[int | None, _option("units of a layer, of a flat buffer")] = None,
    layers: Annotated[int, typer.Option(help="layers of a flat buffer")] = 1,
    proj: Annotated[int, typer.Option(help="width of its projection, or 0")] = 0,
    sum_biases: Annotated[bool, typer.Option("--sum-biases", help="two biases into one")] = False,
    heads: Annotated[int, typer.Option(help="to write, of xlstm and flashrnn")] = 1,
) -> int:
    """Turn a file of one library's weights into one of another's.

    By the ending of its name, IN is .safetensors, .npz, .pt, .h5 or .keras, OUT one of the first
    three.
    """
    asked = conversion.Options(
        source, target, cell, prefix, bidirectional, hidden, layers, proj, sum_biases, heads
    )
    with refusing():
        typer.echo(conversion.execute(given, out, asked))
    return 0


@app.command()
def bench(
    *,
    suite: Annotated[
        str, typer.Option(help=f"{', '.join(benchmark.SUITE_NAMES)}; several with commas")
    ] = "users",
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        _option(
            "bfloat16, float16, tf32, float32, float64, int8, several with commas, or auto: each "
            "row's",
            "the suite's",
        ),
    ] = None,
    rows: Annotated[list[str] | None, _option("rows by pattern, as 'lm-*'; again for more")] = None,
    against: Annotated[
        str | None, _option(f"of {', '.join(PEERS)}; with commas, or none", "the suite's")
    ] = None,
    backend: Annotated[
        str | None, _option(f"ours: auto, {', '.join(dispatch.BACKENDS)}", "the suite's")
    ] = None,
    seconds: Annotated[float, typer.Option(help="of sampling, for an engine in a mode")] = 0.2,
    minutes: Annotated[float | None, _option("begin no row after; of suite train: a run's")] = None,
    gpus: Annotated[str, typer.Option(help="of suite train: GPU counts, with commas")] = "1",
    json: Annotated[Path | None, _option("file of results to write, JSON lines")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the file of --json")] = False,
    markdown: Annotated[Path | None, _option("file of tables to write")] = None,
    charts: Annotated[Path | None, _option("folder of PNG charts to write")] = None,
    compare: Annotated[Path | None, _option("older file of results: what moved since")] = None,
    baseline: Annotated[
        str | None, _option("commit, or folder of sources, that is timed in turn with these")
    ] = None,
    workers: Annotated[
        int, typer.Option(help="processes that first compile the rows' CUDA kernels")
    ] = 0,
    profile: Annotated[str | None, _option("rows to trace instead: kernels and gaps")] = None,
    tensorboard: Annotated[Path | None, _option("folder of results for TensorBoard")] = None,
    show: Annotated[list[Path] | None, _option("written file or folder: measure nothing")] = None,
    page: Annotated[Path | None, _option("page to make of --show, with charts")] = None,
) -> int:
    """Time every engine on rows named after users: checked first, losses shown.

    A row is timed by openrnn and by what its users run today, in turn, after each result was
    compared with float64. Ctrl-C keeps what was measured.
    """
    peers = None if against is None else _words(against.replace("none", ""))
    try:
        with refusing():
            return benchmark.execute(
                Options(
                    suite, device, None if dtype is None else _words(dtype),
                    _words(",".join(rows or ())), peers, backend, seconds, minutes, json, resume,
                    markdown, charts, compare, baseline, profile, tensorboard, show or (), page,
                    _counts(gpus), workers,
                )
            )  # fmt: skip
    except KeyboardInterrupt:  # of which typer makes a code without a word
        _say("openrnn: interrupted")
        return INTERRUPTED


@app.command()
def soak(
    *,
    minutes: Annotated[float, typer.Option(help="how long")] = Soak.minutes,
    problems: Annotated[int, typer.Option(help="random networks and calls")] = Soak.problems,
    processes: Annotated[int, typer.Option(help="that take turns on the device")] = Soak.processes,
    seed: Annotated[int, typer.Option(help="of the first process")] = Soak.seed,
    device: Device = "auto",
    backend: Annotated[
        str | None, _option(f"of {', '.join(dispatch.BACKENDS)}", "fused; on a CPU auto")
    ] = None,
) -> int:
    """Run random calls for minutes: the same bits, the same memory, no error, no hang.

    Ends with 1 where that fails. Each minute it says how far it is.
    """
    with refusing():
        where = device_of(device)
        ours = backend or ("auto" if where == "cpu" else "fused")
        return run_soak(Soak(minutes, problems, processes, seed, where, ours))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _counts(text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"gpus must be counts, as 1,2, got {text!r}")
    return [int(word) for word in words]


def _choice(name: str, value: str, valid: Sequence[str]) -> str:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
    return value


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, _choice("dtype", name, ("float32", "float16", "bfloat16", "float64")))
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, dot, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and dot):
        raise ValueError(f"capability must look like 9.0, got {text!r}")
    return int(major), int(minor)


def _say(text: str) -> None:
    """One line on stderr, once for all processes of a machine."""
    if not (workers.launched() and dist.get_node_local_rank(0)):
        typer.echo(text, err=True)


def _sentence(error: Exception) -> str | None:
    """What a foreseen error says to a user; None for one that nobody foresaw."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU is out of memory: try a smaller --batch, --bptt or --hidden"
    if isinstance(error, MemoryError) or any(word in str(error) for word in NO_MEMORY):
        return "the memory is too small: try a smaller --batch, --bptt or --hidden"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if hasattr(error, "format_message"):  # what typer raises on wrong options
        return str(error.format_message())
    return str(error) if isinstance(error, OpenRNNError) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 2 for any error that was foreseen."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    command = typer.main.get_command(app)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _say(f"openrnn: {message}")
        try:
            code = command.main(arguments, prog_name="openrnn", standalone_mode=False)
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except Exception as error:
            sentence = _sentence(error)
            if sentence is None:
                raise
            if sentence:  # none where the help was asked for by giving nothing
                _say(f"openrnn: {sentence}")
            return 2
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
