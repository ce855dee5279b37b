"""The names of a cell's gates, states and vectors: which are taken, and how a cell reads them."""

import keyword
import unicodedata
from collections.abc import Iterator, Sequence

from torch import Tensor

from openrnn.errors import CellError


class Names:
    """What a cell reads as x, r, s and p: attributes, by the names of gates, states and vectors."""

    def __init__(self, names: Sequence[str], values: Sequence[Tensor]) -> None:
        for name, value in zip(names, values):
            setattr(self, name, value)

    def __call__(self, *_: object, **__: object) -> object:
        raise NotCalledError(self, "calls {}(...)")

    def __getitem__(self, _: object) -> object:
        raise NotCalledError(self, "indexes {}[...]")

    def __iter__(self) -> Iterator[object]:
        raise NotCalledError(self, "iterates over {}")


class NotCalledError(TypeError):
    """A cell does something else with x, r, s or p than to read their attributes."""

    def __init__(self, names: Names, how: str) -> None:
        super().__init__(how)
        self.obj = names


def words_of(kind: str, names: object) -> list[str]:
    """The names that a user gave as one string or as several.

    Raises:
        CellError: they are no distinct identifiers.
    """
    words = names.split() if isinstance(names, str) else names
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise CellError(f"{kind} must be names, as 'f n' or ['f', 'n'], got {names!r}")
    if len(set(words)) != len(words) or not all(map(str.isidentifier, words)):
        raise CellError(f"{kind} must be distinct identifiers, got {' '.join(words)!r}")
    for word in words:
        if keyword.iskeyword(word) or word.startswith("__"):
            raise CellError(f"{kind} must not be words of Python itself, got {word!r}")
        if unicodedata.normalize("NFKC", word) != word:  # as Python reads attributes
            raise CellError(f"{kind} must be in Unicode's form NFKC, got {word!r}")
    return list(words)
