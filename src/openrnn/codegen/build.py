"""Generated source -> compiled functions, through modules in the user's cache folder.

The name of a module carries a digest of its text and of the kernels that it imports, so a changed
kernel never meets an old binary. A folder that cannot be written costs time, nothing else.
"""

import hashlib
import importlib.util
import sys
import tempfile
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from openrnn.codegen import numba
from openrnn.codegen.trace import Traced
from openrnn.files import write_whole


@lru_cache(maxsize=1)
def folder() -> Path:
    """Where generated modules and binaries are: `~/.cache/openrnn`, or a temporary place."""
    try:
        place = Path.home() / ".cache" / "openrnn"
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="openrnn-"))


@lru_cache(maxsize=1)
def _kernels_digest() -> bytes:
    digest = hashlib.sha256()
    for entry in sorted(files("openrnn.kernels").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            digest.update(entry.read_bytes())
    return digest.digest()


@lru_cache(maxsize=1024)
def forward(cell: Traced, dtype: str) -> Any:
    """The compiled forward loop of a cell: `forward(job, task)`."""
    return _load(numba.forward_source(cell, dtype), f"{cell.name}_{dtype}_forward").forward


@lru_cache(maxsize=1024)
def backward(cell: Traced, dtype: str) -> Any:
    """The compiled backward loop of a cell: `backward(job, task)`."""
    return _load(numba.backward_source(cell, dtype), f"{cell.name}_{dtype}_backward").backward


def _load(source: str, title: str) -> Any:
    digest = hashlib.sha256(_kernels_digest() + source.encode()).hexdigest()[:16]
    name = f"{title}_{digest}"
    path = folder() / f"{name}.py"
    if not path.exists():
        write_whole(path, source.encode())
    spec = importlib.util.spec_from_file_location(f"openrnn_generated.{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import the generated kernel {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
