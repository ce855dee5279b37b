"""The sources of another commit: from this repository, or from a folder."""

import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openrnn.errors import OpenRNNError

HERE = Path(__file__).parent


def commit_of(ref: str) -> str:
    """The commit that a name means.

    Raises:
        OpenRNNError: the package is not in a git repository, or there is no such commit.
    """
    if _git("rev-parse", "--show-toplevel").returncode:
        raise OpenRNNError(
            f"--baseline {ref} is no folder, and a commit needs the package in its git repository"
        )
    found = _git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if found.returncode:
        raise OpenRNNError(f"--baseline: the repository has no commit {ref!r}")
    return found.stdout.decode().strip()


def folder_of(path: Path) -> Path:
    """Where the package `openrnn` lies in a folder of sources.

    Raises:
        OpenRNNError: it has none.
    """
    for folder in (path, path / "src"):
        if (folder / "openrnn" / "__init__.py").is_file():
            return folder.resolve()
    raise OpenRNNError(f"--baseline {path} holds neither openrnn/ nor src/openrnn/")


def named(name: str) -> str:
    """What the sources are, in a record of results: the folder, or the commit's number.

    Raises:
        OpenRNNError: there are no such sources.
    """
    if Path(name).is_dir():
        folder_of(Path(name))
        return name
    return commit_of(name)[:7]


@contextmanager
def sources(name: str) -> Iterator[Path]:
    """The folder that holds the package `openrnn` of a commit, or of a folder of sources.

    Raises:
        OpenRNNError: there is no such folder and no such commit, or git cannot read it.
    """
    if Path(name).is_dir():
        yield folder_of(Path(name))
        return
    commit = commit_of(name)
    packed = _git("archive", "--format=tar", commit, "src")
    if packed.returncode:
        raise OpenRNNError(f"--baseline: git archive: {packed.stderr.decode().strip()}")
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
            # the first releases of Python 3.10 and 3.11 have no filters
            safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            files.extractall(folder, **safe)
        yield folder_of(Path(folder))


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(HERE.parents[2]), *words]
    try:
        return subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        raise OpenRNNError(f"--baseline needs git: {error.strerror}") from None
