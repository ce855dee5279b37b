"""Exports for another processor: a process that believes to be on it does the work.

Sizes of panels and vectors follow from the processor when modules are imported, so a process of its
own is told what it has. It packs weights, too, so this machine must have all that the other has.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from openrnn.errors import OpenRNNError

_V2 = ("cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# the levels of the x86-64 psABI, https://gitlab.com/x86-psABIs/x86-64-ABI
LEVELS = {"x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}

_BEGIN = """
import sys
import llvmlite.binding as llvm
path, target, block, cpu, *have = sys.argv[1:]
features = type(llvm.get_host_cpu_features())({name: True for name in have})
llvm.get_host_cpu_features, llvm.get_host_cpu_name = (lambda: features), (lambda: cpu)
import torch
from openrnn.embed.export import written
with open(path, "rb") as file:
    layer = torch.load(file, weights_only=False)
for made in written(layer, target, int(block)):
    print(made)
"""


class ExportError(OpenRNNError, RuntimeError):
    """A layer whose code cannot stand alone, a linker that fails, or a process for another CPU."""


def check(cpu: str) -> None:
    """Raises ValueError for a processor that is not known, or that has more than this one."""
    import llvmlite.binding as llvm

    if cpu not in LEVELS:
        raise ValueError(f"cpu must be None or one of {', '.join(LEVELS)}, got {cpu!r}")
    have = llvm.get_host_cpu_features()
    missing = [name for name in LEVELS[cpu] if not have.get(name)]
    if missing:
        raise ValueError(f"this machine has no {', '.join(missing)}, which {cpu} needs")


def elsewhere(layer: Any, path: Path, block: int, cpu: str) -> list[Path]:
    """`export.written` in a process that believes to be on that processor."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "layer"
        torch.save(layer, kept)
        done = subprocess.run(
            [sys.executable, "-c", _BEGIN, str(kept), str(path), str(block), cpu, *LEVELS[cpu]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise ExportError(f"the process for {cpu} failed: {done.stderr.strip().splitlines()[-1]}")
    return [Path(line) for line in done.stdout.splitlines()]
