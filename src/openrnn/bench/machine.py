"""What a reader of the numbers must know: versions, devices, clocks, settings."""

import os
import platform
from collections.abc import Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from openrnn import dispatch
from openrnn.bench import gpu

PACKAGES = ("openrnn", "numba", "cuda-core", "flashrnn", "torchrl", "onnxruntime")
QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def describe(device: str) -> dict[str, str]:
    """Names and text, in the order in which they are read."""
    found = {"date": date.today().isoformat(), "device": device, "name": name(device)}
    if device == "cpu":
        found["threads"] = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    else:
        found |= dict(_gpu())
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    absent = {key: backend.absent() for key, backend in dispatch.BACKENDS.items()}
    found["backends"] = ", ".join(key for key, reason in absent.items() if not reason)
    commit = _commit()
    if commit:
        found["commit"] = commit
    return found


def name(device: str) -> str:
    """The device's model."""
    if device != "cpu":
        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _gpu() -> Iterator[tuple[str, str]]:
    yield "cuda", str(torch.version.cuda)
    yield "cudnn", str(torch.backends.cudnn.version())
    yield from zip(QUERY.split(","), gpu.ask(QUERY))


def _commit() -> str:
    """The commit of the sources, with a mark where they were changed since; empty outside git."""
    here = str(Path(__file__).parents[1])
    commit = gpu.output(["git", "-C", here, "rev-parse", "--short", "HEAD"])
    changed = commit and gpu.output(["git", "-C", here, "status", "--porcelain", "."])
    return f"{commit} and changes" if changed else commit
