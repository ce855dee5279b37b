"""One run at a time in a folder: a lock that the system frees when its process ends, however."""

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrnn.errors import CheckpointError

NAME = ".lock"
TAKEN = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Makes the folder where there is none, and holds it: of several processes one has it.

    The lock's file stays, as its removal could take away the lock of the next. Where a file system
    has no locks, a warning says so.

    Raises:
        CheckpointError: another run has the folder, or it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder}: {error.strerror}") from None
    try:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(f"cannot write in the folder {folder}: {error.strerror}") from None
    try:
        try:
            _lock(file)
        except OSError as error:
            if error.errno in TAKEN:
                raise CheckpointError(
                    f"another openrnn train is at work in {folder}: wait for its end, "
                    "or choose another --out"
                ) from None
            if error.errno not in NO_LOCKS:
                raise CheckpointError(
                    f"cannot lock the folder {folder}: {error.strerror}"
                ) from None
            warnings.warn(
                f"the file system of {folder} has no locks: let no other run write there",
                stacklevel=2,
            )
        yield
    finally:
        os.close(file)
