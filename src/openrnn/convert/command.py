"""`openrnn convert`: a file of one library's weights into one of another's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from openrnn.convert import files
from openrnn.convert.advice import AdviceError, Argument
from openrnn.convert.flat import FlatSizes
from openrnn.convert.libraries import LIBRARIES, library
from openrnn.convert.weights import read, tensors
from openrnn.nn import Layer

NAMES = ", ".join(LIBRARIES)
# the options of the command for the arguments of `from_weights` and `to_weights`
FLAGS = {
    "cell": "--cell", "prefix": "--prefix", "sum_biases": "--sum-biases",
    "bidirectional": "--bidirectional or --no-bidirectional",
    "hidden_size": "--hidden", "num_layers": "--layers", "proj_size": "--proj",
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a user asks: as the arguments of `from_weights` and `to_weights`."""

    source: str
    target: str
    cell: str | None = None
    prefix: str = ""
    bidirectional: bool | None = None
    hidden_size: int | None = None
    num_layers: int = 1
    proj_size: int = 0
    sum_biases: bool = False
    heads: int = 1


def read_layer(given: Path, asked: Options) -> Layer:
    """The layer of a file of arrays.

    Raises:
        ValueError: the file is not of the library.
        OSError: it cannot be read.
    """
    arrays, said = files.read(given)
    sizes = FlatSizes(
        asked.hidden_size, asked.num_layers, bool(asked.bidirectional), asked.proj_size
    )
    return read(
        arrays, asked.source, sizes, asked.cell or said.cell, asked.prefix, asked.bidirectional,
        {"reverse": True} if said.reverse else {}, in_order=False,
    )  # fmt: skip


Reader = Callable[[Path, Options], Layer]
ARRAYS: dict[str, Reader] = dict.fromkeys(files.READERS, read_layer)


def execute(given: Path, out: Path, asked: Options, readers: Mapping[str, Reader] = ARRAYS) -> str:
    """Converts a file; returns what it was and what was written, in one line.

    Args:
        given, out: the files.
        asked: how to read and write them.
        readers: by the endings of names, what makes the layer of a file and what is asked.

    Raises:
        ValueError: the file is not of the library, or the target cannot hold it.
        OSError: a file cannot be read or written.
    """
    try:
        library("--from", asked.source), library("--to", asked.target)
        files.check_written(out)
        layer = files.by_ending(given, readers)(given, asked)
        made = tensors(layer, asked.target, asked.sum_biases, asked.heads)
    except AdviceError as error:
        parts = [FLAGS[part.name] if isinstance(part, Argument) else part for part in error.args]
        raise ValueError("".join(parts)) from error
    files.write(out, made)
    return f"{layer}: {len(made)} arrays of {asked.target} in {out}"
