"""A corpus of words: the user's train, valid and test files, or any text split into words."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from openrnn.errors import CorpusError
from openrnn.lm.corpus import Corpus, Part, drawn, fingerprint, named, read_files
from openrnn.lm.docstrings import docstrings

UNKNOWN, END = "<unk>", "<eos>"
PARTS = ("train", "valid", "test")
ENDINGS = (".txt", ".tokens", ".raw")
RARE = 3  # words of raw text that occur less often are unknown, as in WikiText-2
HELD_OUT = 0.05  # of the files of raw text, and as many again to test
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d+|[^\w\s]|_")
Document = list[str]


def read(path: str | None, most: int | None = None) -> Corpus:
    """The corpus at a path, as numbers of words; `<eos>` ends each line.

    A folder with files `train`, `valid` and `test`, such as `train.txt`, `ptb.train.txt` or
    `wiki.train.tokens`, is taken as it is: words are what stands between blanks. Files of single
    characters beside them, as `ptb.char.train.txt` of PTB's archive, are left. Of any other
    folder or file words, numbers and signs are cut apart and written small; of its files about 5%
    are held out and 5% are for the test, by a hash of their relative paths; where that leaves one
    of the three empty, the last tenth of all words is split between them. By default, the
    documentation strings of the running Python's standard library.

    The vocabulary is that of the part to train on, the most frequent first and at most `most`.
    Where that part has no `<unk>` of its own, words that occur less than 3 times there are left
    out. What is not in the vocabulary is `<unk>`.

    Raises:
        CorpusError: the path is missing, unreadable or no UTF-8, or holds no words.
    """
    given = None if path is None else _given(Path(path))
    if given is not None:
        parts = [[_tokens(file)] for file in given]
        files = len(given)
    else:
        blobs = docstrings() if path is None else read_files(path)
        named_texts = [(name, _cut(_text(name, blob))) for name, blob in blobs]
        parts = _split([(name, words) for name, words in named_texts if words])
        files = len(blobs)
    if not all(any(part) for part in parts):
        where = "the standard library's documentation" if path is None else named(path)
        raise CorpusError(f"the corpus {where} has too few words to train on, hold out and test")
    vocabulary = _vocabulary(parts[0], most)
    numbers = {word: number for number, word in enumerate(vocabulary)}
    train, held_out, test = (_part(part, numbers) for part in parts)
    seal = fingerprint(train, held_out, test, words=vocabulary)
    return Corpus(train, held_out, seal, files, test, vocabulary)


def _given(folder: Path) -> list[Path] | None:
    """The files of train, valid and test; None for what is no folder with any of them."""
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.iterdir() if file.suffix in ENDINGS)
    whole = [file for file in files if "char" not in file.name.split(".")]
    found = [[file for file in whole or files if part in file.name.split(".")] for part in PARTS]
    if not any(found):
        return None
    for part, several in zip(PARTS, found):
        if len(several) != 1:
            names = ", ".join(file.name for file in several) or "none"
            raise CorpusError(
                f"the corpus {named(folder)} needs one file {part}.txt or *.{part}.txt or "
                f"*.{part}.tokens or *.{part}.raw, got {named(names)}"
            )
    return [file for (file,) in found]


def _tokens(file: Path) -> Document:
    try:
        blob = file.read_bytes()
    except OSError as error:
        raise CorpusError(f"cannot read the corpus at {named(file)}: {error.strerror}") from None
    lines = _text(str(file), blob).split("\n")
    if lines[-1] == "":
        lines.pop()
    return [word for line in lines for word in (*line.split(), END)]


def _text(name: str, blob: bytes) -> str:
    try:
        return blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"the corpus's file {named(name)} is not UTF-8 text: byte {error.start} cannot be read"
        ) from None


def _cut(text: str) -> Document:
    """Words, numbers and signs of raw text; lines without any do not count."""
    lines = (WORD.findall(line.lower()) for line in text.splitlines())
    return [word for line in lines if line for word in (*line, END)]


def _split(texts: list[tuple[str, Document]]) -> list[list[Document]]:
    """Files to train on, held out and to test."""
    parts: list[list[Document]] = [[], [], []]
    for name, words in texts:
        number = drawn(name)
        parts[1 if number < HELD_OUT else 2 if number < 2 * HELD_OUT else 0].append(words)
    if not all(parts):
        every = [word for _, words in texts for word in words]
        last = round(HELD_OUT * len(every))
        cuts = len(every) - 2 * last, len(every) - last
        parts = [[every[: cuts[0]]], [every[cuts[0] : cuts[1]]], [every[cuts[1] :]]]
    return parts


def _vocabulary(train: Iterable[Document], most: int | None) -> tuple[str, ...]:
    counts = Counter(word for document in train for word in document)
    least = 1 if UNKNOWN in counts else RARE
    own = (UNKNOWN, END)
    words = sorted(
        (word for word, count in counts.items() if count >= least and word not in own),
        key=lambda word: (-counts[word], word),
    )
    return (*own, *words)[:most]


def _part(documents: list[Document], numbers: dict[str, int]) -> Part:
    sizes = torch.tensor([len(document) for document in documents])
    data = [numbers.get(word, 0) for document in documents for word in document]
    return Part(torch.tensor(data, dtype=torch.int32), sizes.cumsum(0) - sizes, "words")
