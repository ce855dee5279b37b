"""The same rows with the sources of another commit, from a git worktree, in a process of its own.

This package's own measuring code runs there over the older kernels, so that both are measured by
one method, beside the same peers. The process follows on the first: pairs of old and new are not
interleaved, and what moved is judged by how the peers moved.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from openrnn.bench.cases import Row
from openrnn.bench.engines import engines_of
from openrnn.bench.record import Result, Writer, read
from openrnn.bench.session import Session, Todo
from openrnn.errors import OpenRNNError

HERE = Path(__file__).parent
# the older package first on the path, with this bench put in the place of its own
BOOT = """
import importlib.util, sys
source, bench, job, out = sys.argv[1:]
sys.path.insert(0, source)
try:
    import openrnn
    spec = importlib.util.spec_from_file_location(
        "openrnn.bench", bench + "/__init__.py", submodule_search_locations=[bench]
    )
    openrnn.bench = sys.modules["openrnn.bench"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(openrnn.bench)
    from openrnn.bench.baseline import main
    main(job, out)
except KeyboardInterrupt:
    sys.exit(130)
"""


def measure_at(
    ref: str,
    todo: Sequence[Todo],
    device: str,
    against: Sequence[str],
    backend: str,
    seconds: float,
) -> list[Result]:
    """The results of all engines, ours with the sources of a commit.

    Raises:
        OpenRNNError: there is no such commit, or its sources cannot run the rows.
    """
    with worktree(ref) as folder, TemporaryDirectory() as place:
        job, out = Path(place, "job.json"), Path(place, "results.jsonl")
        wanted = {
            "todo": [(asdict(row), precision) for row, precision in todo],
            "device": device, "against": list(against), "backend": backend, "seconds": seconds,
        }  # fmt: skip
        job.write_text(json.dumps(wanted), encoding="utf-8")
        command = [sys.executable, "-c", BOOT, folder / "src", HERE, job, out]
        code = subprocess.run(list(map(str, command)), check=False).returncode
        if code or not out.exists():
            raise OpenRNNError(f"the sources of {ref} could not run the rows; their error is above")
        return list(read(out).results)


def main(job: str, out: str) -> None:
    """What runs over the other sources, results to a file."""
    wanted = json.loads(Path(job).read_text(encoding="utf-8"))
    todo = [
        (Row(**{**row, "modes": tuple(row["modes"])}), precision)
        for row, precision in wanted["todo"]
    ]
    engines = engines_of(wanted["against"], wanted["backend"])
    session = Session(wanted["device"], engines, wanted["seconds"])
    session.run(todo, Writer(Path(out), {"sources": "another commit"}), Console(stderr=True))
    if session.ended:
        raise SystemExit(session.ended)


def commit_of(ref: str) -> str:
    """The commit that a name means.

    Raises:
        OpenRNNError: the package is not in a git repository, or there is no such commit.
    """
    if _git("rev-parse", "--show-toplevel").returncode:
        raise OpenRNNError("--baseline needs the package inside its git repository")
    commit = _git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").stdout.strip()
    if not commit:
        raise OpenRNNError(f"--baseline: the repository has no commit {ref!r}")
    return commit


@contextmanager
def worktree(ref: str) -> Iterator[Path]:
    """A folder with the files of a commit of this repository.

    Raises:
        OpenRNNError: there is no such commit, or git cannot make the folder.
    """
    commit = commit_of(ref)
    with TemporaryDirectory() as place:
        folder = Path(place, "tree")
        made = _git("worktree", "add", "--detach", str(folder), commit)
        if made.returncode:
            raise OpenRNNError(f"--baseline: git worktree: {made.stderr.strip()}")
        try:
            yield folder
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(HERE), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise OpenRNNError(f"--baseline needs git: {error.strerror}") from None
