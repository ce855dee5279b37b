"""The corpus: the bytes of files, split by file into a part to train on and a held-out part."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from openrnn.errors import CorpusError

HELD_OUT = 0.05
LOPSIDED = (0.01, 0.2)
FOREIGN = {"site-packages", "dist-packages", "__pycache__"}
SNIFF = 8192  # a file with a zero among its first bytes is not text


def mix(*values: object) -> int:
    """A seed in [0, 2**63) from any values, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class Part:
    """Files one after the other: `data` (N,), and where each begins, `starts` (F,) int64.

    The data are uint8 for bytes, int32 for words; `units` names what they are.
    """

    data: Tensor
    starts: Tensor
    units: str = "bytes"

    def shuffled(self, seed: int) -> "Part":
        """The same files in another order."""
        order = torch.randperm(len(self.starts), generator=torch.Generator().manual_seed(seed))
        ends = torch.cat((self.starts[1:], torch.tensor([len(self.data)])))
        spans = zip(self.starts[order].tolist(), ends[order].tolist())
        sizes = (ends - self.starts)[order]
        data = torch.cat([self.data[start:end] for start, end in spans])
        return replace(self, data=data, starts=sizes.cumsum(0) - sizes)

    def head(self, count: int) -> "Part":
        """The first symbols, at most `count`."""
        return replace(self, data=self.data[:count], starts=self.starts[self.starts < count])


@dataclass(frozen=True)
class Corpus:
    """What to train on and what to be judged by; equal fingerprints mean equal symbols.

    Of words, `vocabulary` has one for each number, and `test` is what only the end is judged by.
    """

    train: Part
    held_out: Part
    fingerprint: str
    files: int
    test: Part | None = None
    vocabulary: tuple[str, ...] = ()


def read(path: str | None) -> Corpus:
    """The corpus at a path: a file, or the files of a folder.

    Of a folder: every regular file but hidden ones (a name that begins with a dot), those under
    `__pycache__`, and binary ones (a zero byte near the beginning); folders behind symbolic links
    are not entered. By default, the `.py` files of the running Python's standard library.

    About 5% of the files are held out, by a hash of their relative path, so that adding a file
    moves no other. Where this leaves less than 1% or more than 20% of the bytes, as with a single
    file, the last 5% of the bytes are held out instead.

    Raises:
        CorpusError: the path is missing, unreadable, or holds no bytes.
    """
    return _split(read_files(path))


def read_files(path: str | None) -> list[tuple[str, bytes]]:
    """The files that `read` takes, in the order of their relative paths, which stand before them.

    Raises:
        CorpusError: as of `read`.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    try:
        if root.is_dir():
            found = _library(root) if path is None else _folder(root)
            files = sorted((file.relative_to(root).as_posix(), file) for file in found)
        elif root.is_file():
            files = [(root.name, root)]
        elif root.exists():  # a device or a pipe, which may have no end
            raise CorpusError(f"the corpus {named(root)} is neither a file nor a folder")
        else:
            raise CorpusError(f"the corpus {named(root)} does not exist")
        blobs = [(name, file.read_bytes()) for name, file in files]
    except OSError as error:
        where = named(error.filename or root)
        raise CorpusError(f"cannot read the corpus at {where}: {error.strerror}") from None
    if path is not None and root.is_dir():
        blobs = [(name, blob) for name, blob in blobs if b"\0" not in blob[:SNIFF]]
    blobs = [(name, blob) for name, blob in blobs if blob]
    if not blobs:
        what = "holds no text" if root.is_dir() else "is empty"
        raise CorpusError(f"the corpus {named(root)} {what}")
    return blobs


def named(path: object) -> str:
    """A path in a message: as it is, or escaped where it would not be one line."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _walk(root: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name not in FOREIGN]
        yield from (Path(folder, name) for name in files)


def _library(root: Path) -> Iterator[Path]:
    return (file for file in _walk(root) if file.suffix == ".py" and file.is_file())


def _folder(root: Path) -> Iterator[Path]:
    for file in _walk(root):
        parts = file.relative_to(root).parts
        if file.is_file() and not any(part.startswith(".") for part in parts):
            yield file


def drawn(name: str) -> float:
    """A number in [0, 1) that follows from a file's relative path alone."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def _split(blobs: list[tuple[str, bytes]]) -> Corpus:
    kept: list[bytes] = []
    held: list[bytes] = []
    for name, blob in blobs:
        (held if drawn(name) < HELD_OUT else kept).append(blob)
    sizes = [sum(map(len, side)) for side in (kept, held)]
    low, high = LOPSIDED
    if not low <= sizes[1] / sum(sizes) <= high:
        everything = _join([blob for _, blob in blobs])
        cut = len(everything.data) - round(HELD_OUT * len(everything.data))
        later = everything.starts[everything.starts > cut] - cut
        first = torch.zeros(1, dtype=torch.int64)
        train, held_out = (
            everything.head(cut),
            Part(everything.data[cut:], torch.cat((first, later))),
        )
    else:
        train, held_out = _join(kept), _join(held)
    return Corpus(train, held_out, fingerprint(train, held_out), len(blobs))


def _join(blobs: list[bytes]) -> Part:
    sizes = torch.tensor([len(blob) for blob in blobs])
    data = torch.frombuffer(bytearray().join(blobs), dtype=torch.uint8)
    return Part(data, sizes.cumsum(0) - sizes)


def fingerprint(*parts: Part, words: tuple[str, ...] = ()) -> str:
    """A hash of the data of parts, of where their files begin, and of a vocabulary."""
    digest = hashlib.sha256("\n".join(words).encode())
    for part in parts:
        digest.update(part.starts.numpy().tobytes())
        digest.update(part.data.numpy().data)
    return digest.hexdigest()
