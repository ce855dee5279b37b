"""`export_native`: a layer's kernels and weights as code that a C program links."""

import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from openrnn import dispatch
from openrnn.backends.base import traced
from openrnn.backends.cpu.baked import baked
from openrnn.embed.header import header
from openrnn.embed.source import DATA, LOOP, ROW, functions
from openrnn.embed.targets import ExportError, check, elsewhere
from openrnn.spec import Problem

if TYPE_CHECKING:
    from openrnn.nn.base import Layer

REAL = {torch.float32: "float", torch.float64: "double"}
# what the code may call of the C library: sched_yield is named and never called, and functions of
# <math.h> serve float64 and operators of a user's cell that have no polynomial of ours
MEMORY = frozenset({"memcpy", "memmove", "memset", "sched_yield"})
_MATH = ("acos asin atan atan2 cos cosh erf erfc exp exp2 expm1 fmod log log10 log1p log2 pow sin "
         "sinh tan tanh").split()  # fmt: skip
MATH = frozenset(name + suffix for name in _MATH for suffix in ("", "f"))


def export_native(
    layer: "Layer", path: str | Path, *, block: int = 64, cpu: str | None = None,
    compiler: str = "cc",
) -> list[Path]:  # fmt: skip
    """Writes a layer as an object file and a C header, and links a shared library of them.

    The object holds the kernels that the cpu backend runs and the weights as they are now. The
    header declares the memory of the states, which is the caller's, and

        void NAME_reset(NAME_t *state);
        void NAME_step(NAME_t *state, const float *x, float *y, int64_t n);

    `step` runs n steps of one sequence from the states and leaves those after the last. However a
    sequence is cut into calls, its bits are those of `layer(x, states)` of 48 steps or more on one
    thread. It allocates and locks nothing, so an audio thread may call it. In float32 shipped cells
    call no mathematical library either; the header names what is called.

    Args:
        layer: a layer such as `openrnn.LSTM`, in its forward direction alone; it runs as in eval
            mode.
        path: the files' path without suffix; its name, NAME, begins all names of the header.
        block: steps whose inputs are multiplied at a time; longer calls run in blocks. More need
            more of the caller's memory.
        cpu: the oldest processor that is to run it, "x86-64-v2", "x86-64-v3" (AVX2) or "x86-64-v4"
            (AVX-512); by default this machine's own. This machine must have what it has.
        compiler: the C compiler that links the shared library.

    Returns:
        NAME.h, NAME.o and, where the compiler is found, NAME.so (on macOS NAME.dylib).

    Raises:
        TypeError: it is no layer.
        ValueError: path's name is no C identifier; the layer has another direction or dtype; block
            is below 1; this machine is no such cpu.
        NoBackendError: the cpu backend does not run the layer.
        ExportError: the linker fails; or, with `cpu`, the layer's cell is one of a script's own,
            which another process cannot load.

    Example:
        >>> import openrnn, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> files = openrnn.export_native(openrnn.LSTM(1, 16), folder / "amp")
        >>> [file.name for file in files[:2]]
        ['amp.h', 'amp.o']
    """
    from openrnn.nn.base import Layer

    if not isinstance(layer, Layer):
        raise TypeError(f"export_native needs a layer such as openrnn.LSTM, got {type(layer)}")
    path, spec = Path(path), layer.spec
    name = path.name
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"the name of the files must be a C identifier such as amp, got {name!r}")
    if spec.bidirectional or spec.reverse:
        raise ValueError("export_native needs a layer of the forward direction alone")
    if type(block) is not int or block < 1:
        raise ValueError(f"block must be a number of steps from 1, got {block!r}")
    dtype = layer.weights()[0].dtype
    if dtype not in REAL:
        raise ValueError(f"export_native needs a layer of float32 or float64, got {dtype}")
    dispatch.select(Problem(spec, dtype, "cpu"), "cpu")
    if cpu is not None:
        check(cpu)
        made = elsewhere(layer, path, block, cpu)
    else:
        made = written(layer, path, block)
    return [*made, *_linked(path, compiler)]


def written(layer: "Layer", path: str | Path, block: int) -> list[Path]:
    """The header and the object, for the processor that this process compiles for."""
    from openrnn.codegen import numba
    from openrnn.kernels.cpu import host, objects

    path = Path(path)
    name, spec, weights = path.name, layer.spec, layer.weights()
    dtype = weights[0].dtype
    problem = Problem(spec, dtype, "cpu")
    with torch.no_grad():
        found = functions(baked(problem, block, [each.cpu() for each in weights]), block)
    kind = str(dtype).removeprefix("torch.")
    loop = (files("openrnn.kernels.cpu") / "forward.py").read_text(encoding="utf-8")
    parts = [
        (numba.source(traced(spec), kind), {"step_rows": ROW}),
        (found.text, {"reset": f"{name}_reset", "step": f"{name}_step"}),
    ]
    code, calls = objects.standalone(
        parts, [objects.bitcode(loop.replace("float32", kind), {"forward": LOOP})],
        {DATA: found.data}, [*parts[1][1].values()],
    )  # fmt: skip
    if unknown := ", ".join(sorted({*calls} - MEMORY - MATH)):
        raise ExportError(f"the compiled layer calls {unknown}, which a C program may not have")
    called = sorted({*calls} - {"sched_yield"})
    path.parent.mkdir(parents=True, exist_ok=True)
    text = header(name, repr(layer), spec, REAL[dtype], found.work, host.NAME, called)
    path.with_suffix(".h").write_text(text, encoding="utf-8")
    path.with_suffix(".o").write_bytes(code)
    return [path.with_suffix(".h"), path.with_suffix(".o")]


def _linked(path: Path, compiler: str) -> list[Path]:
    """The shared library; nothing where the compiler is not found."""
    if shutil.which(compiler) is None or sys.platform == "win32":
        return []
    library = path.with_suffix(".dylib" if sys.platform == "darwin" else ".so")
    made = subprocess.run(
        [compiler, "-shared", "-o", str(library), str(path.with_suffix(".o")), "-lm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        raise ExportError(f"{compiler} cannot link {library}: {made.stderr.strip()}")
    return [library]
