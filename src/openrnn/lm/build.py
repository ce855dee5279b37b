"""From a config to the model that it describes."""

from itertools import pairwise

import torch
from torch import nn

from openrnn.lm.config import Config, own_cell
from openrnn.lm.model import LanguageModel, Stack, find, layer, torch_layer
from openrnn.lm.word_model import WordModel

BYTES = 256


def build(config: Config, vocabulary: tuple[str, ...] = ()) -> LanguageModel:
    """The model of a config, of bytes or of a vocabulary, drawn from torch's default generator.

    Raises:
        CellError: there is no such cell.
    """
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    if config.task == "bytes":
        sizes = config.embed, config.hidden, config.layers
        (rnn,) = _stacks(config, [sizes], config.dropout)
        embedding = nn.Embedding(BYTES, config.embed)
        return LanguageModel(rnn, embedding, nn.Linear(config.hidden, BYTES)).to(dtype)
    rnns = _stacks(config, [(*ends, 1) for ends in widths(config)], 0.0)
    embedding = nn.Embedding(len(vocabulary), config.embed)
    return WordModel(rnns, embedding, config, vocabulary).to(dtype)


def widths(config: Config) -> list[tuple[int, int]]:
    """The features of the input and the output of each layer of a model of words."""
    last = config.embed if config.tied else config.hidden
    edges = [config.embed, *[config.hidden] * (config.layers - 1), last]
    return list(pairwise(edges))


def _stacks(config: Config, sizes: list[tuple[int, int, int]], dropout: float) -> list[Stack]:
    if config.model == "torch":
        return [torch_layer(config.cell, *size, dropout=dropout) for size in sizes]
    # the file of a cell of the user's own runs once
    cell = find(config.cell) if own_cell(config.cell) else config.cell
    return [layer(cell, *size, dropout=dropout, backend=config.backend) for size in sizes]
