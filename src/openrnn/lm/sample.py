"""Text from a trained model, a byte or a word at a time, through steps that keep their states."""

import codecs
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from openrnn.errors import CheckpointError, OpenRNNError
from openrnn.lm import checkpoint, vocabulary
from openrnn.lm.build import build
from openrnn.lm.config import own_cell, short
from openrnn.lm.contents import Record, check_model
from openrnn.lm.model import LanguageModel
from openrnn.lm.run import parameters
from openrnn.lm.words import END
from openrnn.lm.workers import gpus

# what stands before a text that begins with nothing: the end of the file before it
NOTHING = b"\n"


def load(folder: Path, device: str, backend: str, cell: str | None = None) -> LanguageModel:
    """The model of a checkpoint, in the type of its parameters.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, holds what no run of it would
            leave, or has a cell of the user's own, which is never loaded from where it says.
    """
    path = checkpoint.path_in(folder)
    tensors, fields = checkpoint.read(path)
    with checkpoint.naming(path):
        config = Record.parse(fields).config
    if own_cell(config.cell) and cell is None:
        raise CheckpointError(
            f"{path} has a cell of its own: "
            f"say where it is with --cell path/to/{short(config.cell)}"
        )
    config = replace(config, device=device, backend=backend, cell=cell or config.cell, dropout=0.0)
    with checkpoint.naming(path):
        check_model(config, tensors)
    words = vocabulary.of_tensors(tensors) if config.task == "words" else ()
    model = build(config, words)
    model.load_state_dict(parameters(tensors))
    return model.to("cuda" if gpus(device) else "cpu").eval()


def sample(
    model: LanguageModel, prompt: bytes, length: int, temperature: float, seed: int
) -> Iterator[str]:
    """Yields the prompt and `length` bytes that follow it, as UTF-8 text; what is none is U+FFFD.

    A model of words is given the prompt's words, which stand between blanks, and yields as many
    words; `<eos>` is the end of a line, and a word that it does not know is `<unk>`.

    Temperature 0 always takes the likeliest symbol; 1 draws as the model says.

    Raises:
        ValueError: a negative length or seed, or a temperature that is negative or no number.
    """
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be a number, 0 or greater, got {temperature}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {seed}")
    if model.vocabulary:
        return _words(model, prompt.decode(errors="replace"), length, temperature, seed)
    return _bytes(model, prompt, length, temperature, seed)


def _bytes(
    model: LanguageModel, prompt: bytes, length: int, temperature: float, seed: int
) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    yield decoder.decode(prompt)
    for byte in _draws(model, list(prompt or NOTHING), length, temperature, seed):
        yield decoder.decode(bytes([byte]))
    yield decoder.decode(b"", final=True)


def _words(
    model: LanguageModel, prompt: str, length: int, temperature: float, seed: int
) -> Iterator[str]:
    numbers = {word: number for number, word in enumerate(model.vocabulary)}
    lines = [line.split() for line in prompt.split("\n")]
    words = [word for line in lines for word in (*line, END)][:-1]  # no end after the last line
    symbols = [numbers.get(word, 0) for word in words]
    yield "\n".join(map(" ".join, lines))
    between = " " if lines[-1] else ""
    for number in _draws(model, symbols or [numbers[END]], length, temperature, seed):
        word = model.vocabulary[number]
        if word == END:
            between = "\n"
            continue
        yield between + (word if word.isprintable() else ascii(word)[1:-1])
        between = " "


@torch.no_grad()
def _draws(
    model: LanguageModel, prompt: list[int], length: int, temperature: float, seed: int
) -> Iterator[int]:
    """The symbols after a prompt of at least one."""
    generator = torch.Generator().manual_seed(seed)
    read, device = model.stepper(1), model.embedding.weight.device
    logits = torch.zeros(())
    for symbol in prompt:
        logits = read(torch.tensor([symbol], device=device))
    for _ in range(length):
        symbol = _draw(logits[0].double().cpu(), temperature, generator)
        yield symbol
        logits = read(torch.tensor([symbol], device=device))


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise OpenRNNError(
            "the model's scores of what comes next are nan or infinite: its training diverged, or "
            "its file was changed"
        )
    if temperature == 0:
        return int(logits.argmax())
    # the largest is 0, so that no temperature overflows
    chances = ((logits - logits.max()) / temperature).softmax(0)
    return int(chances.multinomial(1, generator=generator))
