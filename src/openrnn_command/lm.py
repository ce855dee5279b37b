"""`openrnn train` and `openrnn sample`: a byte-level language model."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from openrnn_command.options import BACKENDS, CELLS, Backend, Device, interruptible, option, say


@interruptible
def train(
    *,
    corpus: Annotated[
        Path | None, option("A file or folder to train on", "Python's standard library")
    ] = None,
    cell: Annotated[str | None, option(CELLS, "lstm")] = None,
    model: Annotated[
        str | None, option("Whose layers to train, openrnn or torch, for comparison", "openrnn")
    ] = None,
    layers: Annotated[int | None, option("Number of recurrent layers", 2)] = None,
    hidden: Annotated[int | None, option("Units of each layer", 256)] = None,
    embed: Annotated[int | None, option("Width of the embedding of a byte", 128)] = None,
    bptt: Annotated[
        int | None, option("Bytes of each stream in a training step; gradients end there", 64)
    ] = None,
    batch: Annotated[
        int | None, option("Streams that are read side by side, over all processes", 32)
    ] = None,
    steps: Annotated[
        int | None, option("Stop after so many training steps; give this or --minutes")
    ] = None,
    minutes: Annotated[float | None, option("Stop after so many minutes", 2.5)] = None,
    lr: Annotated[float | None, option("Highest learning rate of the run", 0.004)] = None,
    dropout: Annotated[
        float | None, option("Probability of dropout between the layers", 0.0)
    ] = None,
    dtype: Annotated[
        str | None, option("float32, float64, or bfloat16 by autocast", "float32")
    ] = None,
    device: Annotated[str | None, option("Where to train: auto, cpu or cuda", "auto")] = None,
    backend: Annotated[str | None, option(f"The backend: {BACKENDS}", "auto")] = None,
    seed: Annotated[
        int | None, option("Seed of the first weights, the order of the text and dropout", 0)
    ] = None,
    out: Annotated[Path | None, option("Folder for the checkpoint", "runs/lm")] = None,
    resume: Annotated[
        Path | None, option("Folder of an earlier run, which goes on where it stopped")
    ] = None,
    tensorboard: Annotated[
        Path | None, option("Folder for TensorBoard scalars", "the folder tensorboard in --out")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors")] = False,
) -> int:
    """Train a byte-level language model and print its score.

    Ctrl-C saves the run; --resume goes on with it, bit for bit as if it had not stopped.

    About 5% of the files, chosen by their paths, are held out and score the model. Of a folder,
    every regular file is read that is not hidden, not binary and not under `__pycache__`. Started
    by torchrun, the processes share the streams of the batch.
    """
    from openrnn.lm.job import Job, execute

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
    say(f"stopped and saved: go on with openrnn train --resume {job.folder}")
    return 128 + number


@interruptible
def sample(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model", metavar="FOLDER")],
    *,
    prompt: Annotated[str, typer.Option(help="What the text begins with")] = "",
    length: Annotated[int, typer.Option(help="Number of bytes to write after the prompt")] = 400,
    temperature: Annotated[
        float, typer.Option(help="How freely bytes are drawn; 0 always takes the likeliest one")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the random draws")] = 0,
    device: Device = "auto",
    backend: Backend = "auto",
    cell: Annotated[
        str | None,
        option("Where to find the cell of a model with a cell of your own: path.py:name"),
    ] = None,
) -> int:
    """Write text with a model that `openrnn train` made."""
    from openrnn.lm.config import refusing
    from openrnn.lm.sample import load
    from openrnn.lm.sample import sample as sample_text

    with refusing():
        model = load(folder, device, backend, cell)
        first = prompt.encode("utf-8", "surrogateescape")
        text = sample_text(model, first, length, temperature, seed)
    for part in text:
        sys.stdout.write(part)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
