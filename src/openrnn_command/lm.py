"""`openrnn train` and `openrnn sample`: language models of bytes and of words."""

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
    task: Annotated[str | None, option("What is modelled: bytes or words", "bytes")] = None,
    cell: Annotated[str | None, option(CELLS, "lstm")] = None,
    model: Annotated[
        str | None, option("Whose layers to train, openrnn or torch, for comparison", "openrnn")
    ] = None,
    layers: Annotated[int | None, option("Number of recurrent layers", 2)] = None,
    hidden: Annotated[int | None, option("Units of each layer", "256; words 200")] = None,
    embed: Annotated[
        int | None, option("Width of the embedding of a byte or word", "128; words 200")
    ] = None,
    bptt: Annotated[
        int | None,
        option(
            "Bytes or words of each stream in a training step; gradients end there",
            "64; words 35",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        option("Streams that are read side by side, over all processes", "32; words 20"),
    ] = None,
    steps: Annotated[
        int | None, option("Stop after so many training steps; give this or --minutes")
    ] = None,
    minutes: Annotated[float | None, option("Stop after so many minutes", 2.5)] = None,
    lr: Annotated[
        float | None, option("Highest learning rate of the run", "0.004; words 20.0")
    ] = None,
    dropout: Annotated[
        float | None, option("Probability of dropout between the layers", "0.0; words 0.2")
    ] = None,
    dropout_input: Annotated[
        float | None, option("Words: dropout below the first layer", "0.0; words 0.2")
    ] = None,
    dropout_output: Annotated[
        float | None, option("Words: dropout above the last layer", "0.0; words 0.2")
    ] = None,
    dropout_embedding: Annotated[
        float | None, option("Words: dropout of whole words of the vocabulary", 0.0)
    ] = None,
    dropout_weight: Annotated[
        float | None, option("Words: dropout of single recurrent weights", 0.0)
    ] = None,
    activation: Annotated[
        float | None, option("Words: weight of the penalty on outputs", 0.0)
    ] = None,
    temporal: Annotated[
        float | None, option("Words: weight of the penalty on changes of outputs in time", 0.0)
    ] = None,
    tied: Annotated[
        bool | None,
        typer.Option(
            "--tied/--no-tied",
            help="Words: score by the matrix of the embedding [default: False; words True]",
            show_default=False,
        ),
    ] = None,
    vocabulary: Annotated[
        int | None, option("Words: keep so many different ones, the most frequent")
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
    """Train a language model of bytes or words and print its score.

    Ctrl-C saves the run; --resume goes on with it, bit for bit as if it had not stopped.

    About 5% of the files, chosen by their paths, are held out and score the model; for words, a
    folder with train, valid and test files is taken as it is. Of any other folder,
    every regular file is read that is not hidden, not binary and not under `__pycache__`. Started
    by torchrun, the processes share the streams of the batch.
    """
    from openrnn.lm.job import Job, execute

    named = {
        "corpus": None if corpus is None else str(corpus.resolve()),
        "task": task, "cell": cell, "model": model, "layers": layers, "hidden": hidden,
        "embed": embed,
        "bptt": bptt, "batch": batch, "steps": steps, "minutes": minutes, "lr": lr,
        "dropout": dropout, "dtype": dtype, "device": device, "backend": backend, "seed": seed,
        "dropout_input": dropout_input, "dropout_output": dropout_output,
        "dropout_embedding": dropout_embedding, "dropout_weight": dropout_weight,
        "activation": activation, "temporal": temporal, "tied": tied, "vocabulary": vocabulary,
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
    length: Annotated[
        int, typer.Option(help="Number of bytes or words to write after the prompt")
    ] = 400,
    temperature: Annotated[
        float, typer.Option(help="How freely they are drawn; 0 always takes the likeliest one")
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
