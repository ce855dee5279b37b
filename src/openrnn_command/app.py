"""All commands together, and what a user reads where one fails."""

import io
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from openrnn_command import INTERRUPTED, bench, inspect, lm, tune
from openrnn_command.options import say

app = typer.Typer(
    help="OpenRNN: recurrent layers for PyTorch. Each command has a help of its own: openrnn "
    "explain --help.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
)
# torch's words for sizes that no CPU has the memory for, of its RuntimeErrors
NO_MEMORY = ("DefaultCPUAllocator", "Storage size calculation overflowed")
SMALLER = "try a smaller --batch, --bptt or --hidden"

app.command()(inspect.info)
app.command()(inspect.explain)
app.command()(bench.bench)
app.command()(lm.train)
app.command()(lm.sample)
app.command()(inspect.convert)
app.command()(bench.soak)
app.add_typer(tune.app, name="tune")


def _version(asked: bool) -> None:
    if not asked:
        return
    try:
        typer.echo(f"openrnn {version('openrnn')}")
    except PackageNotFoundError:
        typer.echo("openrnn, run from sources that are not installed")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version of OpenRNN.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """What stands before the name of a command."""


def _sentence(error: Exception) -> str | None:
    """What a foreseen error says to a user; None for one that nobody foresaw."""
    if hasattr(error, "format_message"):  # what typer raises on wrong options
        return _wrong_use(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    import torch

    from openrnn.errors import OpenRNNError

    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU has not enough memory: {SMALLER}"
    if isinstance(error, MemoryError) or any(word in str(error) for word in NO_MEMORY):
        return f"there is not enough memory: {SMALLER}"
    return str(error) if isinstance(error, OpenRNNError) else None


def _wrong_use(error: Any) -> str:
    """What is wrong with the options, what was given, and where the right ones stand."""
    text = str(error.format_message()).rstrip(".")
    if not text:  # the help was asked for by giving nothing
        return ""
    for found in getattr(error.__cause__, "errors", list)():  # typer leaves out what was given
        text += f", got {found['input']!r}"
    return f"{text}; see {getattr(error.ctx, 'command_path', 'openrnn')} --help"


@cache
def _command() -> Any:
    """What typer makes of `app`, in ten milliseconds."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 2 for any error that was foreseen."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"openrnn: {message}")
        try:
            code = _command().main(arguments, prog_name="openrnn", standalone_mode=False)
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except Exception as error:
            sentence = _sentence(error)
            if sentence is None:
                raise
            if sentence:
                say(f"openrnn: {sentence}")
            return 2
    return int(code or 0)
