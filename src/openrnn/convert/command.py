"""`openrnn convert`: a file of one library's weights into one of another's."""

from dataclasses import dataclass
from pathlib import Path

from openrnn.convert import files
from openrnn.convert.flat import FlatSizes
from openrnn.convert.libraries import LIBRARIES, library
from openrnn.convert.weights import read, tensors

NAMES = ", ".join(LIBRARIES)
# how messages name the arguments of `from_weights` and `to_weights`: the options of the command
FLAGS = {
    "sum_biases=True": "--sum-biases", "hidden_size=": "--hidden", "num_layers=": "--layers",
    "bidirectional=": "--bidirectional or --no-bidirectional", "prefix=": "--prefix",
    "cell=": "--cell", "hidden_size, num_layers and proj_size": "--hidden, --layers and --proj",
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


def execute(given: Path, out: Path, asked: Options) -> str:
    """Converts a file; returns what it was and what was written, in one line.

    Raises:
        ValueError: the file is not of the library, or the target cannot hold it.
        OSError: a file cannot be read or written.
    """
    try:
        return _execute(given, out, asked)
    except ValueError as error:
        text = str(error)
        for argument, flag in FLAGS.items():
            text = text.replace(argument, flag)
        raise ValueError(text) from error


def _execute(given: Path, out: Path, asked: Options) -> str:
    library("--from", asked.source), library("--to", asked.target)
    files.check_written(out)
    arrays, cell = files.read(given)
    sizes = FlatSizes(
        asked.hidden_size, asked.num_layers, bool(asked.bidirectional), asked.proj_size
    )
    layer = read(
        arrays, asked.source, sizes, asked.cell or cell, asked.prefix, asked.bidirectional, {},
        in_order=False,
    )  # fmt: skip
    made = tensors(layer, asked.target, asked.sum_biases, asked.heads)
    files.write(out, made)
    return f"{layer}: {len(made)} arrays of {asked.target} in {out}"
