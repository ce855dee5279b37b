"""What is here: versions, devices, threads, and each backend or the reason why it is not."""

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from openrnn import store
from openrnn.cores import usable_cores
from openrnn.dispatch import BACKENDS

PACKAGES = ("torch", "numpy", "numba", "safetensors", "tensorboard", "cuda-core")


def report() -> Iterator[tuple[str, str]]:
    """Yields (what, how it stands here) for everything that a bug report needs."""
    yield "openrnn", f"{_version('openrnn')}, run from {Path(__file__).parent}"
    yield "python", f"{platform.python_version()}, {sys.platform} {platform.machine()}"
    for name in PACKAGES:
        yield name, _version(name)
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    yield "cuda", torch.version.cuda or "not in this torch"
    yield "cudnn", str(cudnn) if cudnn else "not in this torch"
    for name, text in _devices():
        yield name, text
    yield "kernel cache", _cache()
    for name, backend in BACKENDS.items():
        yield f"backend {name}", backend.absent() or "present"


def _cache() -> str:
    folder = store.folder()
    if not folder.is_dir():
        return "none: no folder can be written, so each process compiles its kernels anew"
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return f"{folder}, {size / 2**20:.1f} MiB"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    yield "cpu", f"{usable_cores()} cores for this process, {torch.get_num_threads()} torch threads"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        yield f"cuda:{index}", f"{found.name}, capability {found.major}.{found.minor}, {memory}"
