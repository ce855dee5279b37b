"""A checkpoint: one safetensors file, a JSON record in its header, sealed by a hash."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from openrnn.errors import CellError, CheckpointError, shown

NAME = "checkpoint.safetensors"
FORMAT, VERSION = "openrnn.lm", 1

# the place of the hash in the header while the file is hashed
BLANK = "0" * 64
SEAL = re.compile("[0-9a-f]{64}")


def path_in(folder: str | Path) -> Path:
    """The path of a run's checkpoint."""
    return Path(folder) / NAME


def write(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Writes a checkpoint in place of the one before, which stays whole until the new one is.

    Raises:
        CheckpointError: the system refuses, as when the disk is full.
    """
    own = {"format": FORMAT, "version": str(VERSION), "sha256": BLANK}
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = save(dense, {**own, "record": json.dumps(record)})
    head, body = _halves(data)
    sealed = head.replace(BLANK.encode(), _digest(head, body).encode(), 1)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(sealed)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        rest = "the one before is intact" if path.exists() else "there was none before"
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error.strerror}; {rest}"
        ) from None
    with suppress(OSError):  # not every system lets a folder be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def version_of(path: Path) -> tuple[int, ...] | None:
    """What changes whenever a checkpoint is written; None where there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around checks of a checkpoint: the messages of their errors begin with the file."""
    try:
        yield
    except (CellError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def read(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the record of a checkpoint, every byte of it as it was written.

    The bytes are those that were sealed, by whomever: `contents` judges what they say.

    Raises:
        CheckpointError: the file is missing, unreadable, foreign, of a later version, or damaged.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"the checkpoint {path} is no regular file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}") from None
    head, body = _halves(data)
    try:
        own = json.loads(head[8:])["__metadata__"]
        form, version, digest = own["format"], own["version"], own["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path} is not a checkpoint of openrnn train, or damaged") from None
    if form != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of openrnn train")
    if version != str(VERSION):
        raise CheckpointError(
            f"{path} has version {shown(version)} of its format, this openrnn reads {VERSION}"
        )
    if not (isinstance(digest, str) and SEAL.fullmatch(digest)):
        raise CheckpointError(f"{path} is damaged: its seal is no SHA-256")
    if _digest(head.replace(digest.encode(), BLANK.encode(), 1), body) != digest:
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written")
    try:
        return load(data), json.loads(own["record"])
    except RecursionError:
        raise CheckpointError(f"{path} is damaged: its record is nested too deeply") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {shown(str(error))}") from None


def _halves(data: bytes) -> tuple[bytes, memoryview]:
    """The header with its length before it, and the tensors."""
    size = 8 + int.from_bytes(data[:8], "little")
    return data[:size], memoryview(data)[size:]


def _digest(head: bytes, body: memoryview) -> str:
    digest = hashlib.sha256(head)
    digest.update(body)
    return digest.hexdigest()
