"""Exports for another processor: a process that believes to be on it does the work.

Sizes of panels and vectors follow from the processor when modules are imported, so a process of its
own is told what it has. It packs weights, too, so this machine must have all that the other has.
For another architecture the process believes to have no feature at all, so vectors are of 16 bytes
and nothing is written for one architecture alone; LLVM makes the other's code of that.
"""

import json
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from openrnn.embed.compiled import Compiled, Job, Machine
from openrnn.errors import ExportError

_V2 = ("cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# the levels of the x86-64 psABI, https://gitlab.com/x86-psABIs/x86-64-ABI
LEVELS = {"x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}
# other architectures, with the vectors that every processor of them has
FOREIGN = {"aarch64": Machine("aarch64-linux-gnu", "generic", "+neon")}

_BEGIN = """
import json, sys
folder, path, cpu, *have = sys.argv[1:]
sys.path[:] = json.loads(path)
import llvmlite.binding as llvm
features = type(llvm.get_host_cpu_features())({name: True for name in have})
llvm.get_host_cpu_features, llvm.get_host_cpu_name = (lambda: features), (lambda: cpu)
import pickle
from openrnn.embed.compiled import Job, compiled
with open(folder + "/job", "rb") as file:
    job = Job(*pickle.load(file))
with open(folder + "/made", "wb") as file:
    pickle.dump(tuple(compiled(job)), file)
"""


def check(cpu: str) -> None:
    """Raises ValueError for a processor that is not known, or that has more than this one."""
    import llvmlite.binding as llvm

    if cpu in FOREIGN:
        return
    if cpu not in LEVELS:
        names = ", ".join((*LEVELS, *FOREIGN))
        raise ValueError(f"cpu must be None or one of {names}, got {cpu!r}")
    have = llvm.get_host_cpu_features()
    missing = [name for name in LEVELS[cpu] if not have.get(name)]
    if missing:
        raise ValueError(f"this machine has no {', '.join(missing)}, which {cpu} needs")


def elsewhere(job: Job, cpu: str) -> Compiled:
    """`compiled` in a process that believes to be on that processor.

    Raises:
        ExportError: no such process starts, or it fails: it cannot load a cell that only a script
            defines.
    """
    if not re.match(r"python[\w.-]*$", Path(sys.executable or "").name):
        raise ExportError(f"cpu={cpu!r} needs a Python process of its own, and none can be started")
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    name = cpu if cpu in LEVELS else "generic"
    with tempfile.TemporaryDirectory() as folder:
        try:
            job = job._replace(machine=FOREIGN.get(cpu))
            (Path(folder) / "job").write_bytes(pickle.dumps(tuple(job)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ExportError(
                f"the cell cannot be taken to a process for {cpu}: {error}"
            ) from error
        done = subprocess.run(
            [sys.executable, "-I", "-c", _BEGIN, folder, path, name, *LEVELS.get(cpu, ())],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise ExportError(f"the process for {cpu} failed: {words[-1]}")
        header, code = pickle.loads((Path(folder) / "made").read_bytes())
    return Compiled(header, code)
