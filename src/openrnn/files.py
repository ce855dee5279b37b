"""Files that are whole or not there."""

import os
from contextlib import suppress
from pathlib import Path
from threading import get_ident


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file by a rename, however many processes and threads write the same one.

    Raises:
        OSError: the system refuses; nothing is left behind then.
    """
    half = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(data)
        half.replace(path)
    except OSError:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        raise
