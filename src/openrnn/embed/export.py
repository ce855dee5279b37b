"""`export_native`: a layer's kernels and weights as code that a C program links."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from openrnn import dispatch
from openrnn.embed import names
from openrnn.embed.compiled import REAL, Job, compiled
from openrnn.embed.targets import FOREIGN, check, elsewhere
from openrnn.errors import ExportError, kind_of
from openrnn.spec import Problem, whole

if TYPE_CHECKING:
    from openrnn.nn.base import Layer

MAX_BLOCK_STEPS = 1 << 16  # steps of a block


def export_native(
    layer: "Layer", path: str | Path, *, block: int = 64, cpu: str | None = None,
    compiler: str | None = None,
) -> list[Path]:  # fmt: skip
    """Writes a layer as an object file and a C header, and links a shared library of them.

    The object holds the kernels that the cpu backend runs and the weights as they are now. The
    header declares the memory of the states, which is the caller's, and

        void NAME_reset(NAME_t *state);
        void NAME_step(NAME_t *state, const float *x, float *y, int64_t n);

    `step` runs n steps of one sequence from the states and leaves those after the last. However a
    sequence is cut into calls, its bits are those of `layer(x, states)` on one thread, for x of 96
    steps or more (shorter ones are summed in another order). It allocates and locks nothing, so an
    audio thread may call it. In float32 shipped cells call no mathematical library either; the
    header names what is called.

    Weights are exported as they are, also where `precision="bf16"` permits to round them.

    The layer is exported as in eval mode, parametrizations computed; hooks and what a subclass adds
    to `forward` are not in it.

    Args:
        layer: a layer such as `openrnn.LSTM`, in its forward direction alone.
        path: the files' path without suffix; its name, NAME, begins all names of the header.
        block: steps whose inputs are multiplied at a time, at most 65,536; longer calls run in
            blocks. Above 96, more need more of the caller's memory.
        cpu: the oldest processor that is to run it, "x86-64-v2", "x86-64-v3" (AVX2) or "x86-64-v4"
            (AVX-512), of which this machine must have all; or "aarch64", every 64-bit ARM under
            Linux or Android. By default this machine's own.
        compiler: the C compiler that links the shared library; by default cc, if there is one, and
            none for another architecture.

    Returns:
        NAME.h, NAME.o and, where there is a compiler, NAME.so (on macOS NAME.dylib).

    Raises:
        TypeError: it is no layer, or block no number.
        ValueError: path's name is no C identifier; the layer has another direction or dtype, or no
            values; block is out of range; this machine is no such cpu; there is no such compiler.
        NoBackendError: the cpu backend does not run the layer.
        ExportError: the compiling process or the linker fails; or, with `cpu`, the layer's cell is
            one of a script's own, which another process cannot load.

    Example:
        >>> import openrnn, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> files = openrnn.export_native(openrnn.LSTM(1, 16), folder / "amp")
        >>> [file.name for file in files[:2]]
        ['amp.h', 'amp.o']
    """
    from openrnn.nn.base import Layer

    if not isinstance(layer, Layer):
        raise TypeError(f"export_native needs a layer such as openrnn.LSTM, got {kind_of(layer)}")
    if not str(path) or str(path).endswith(("/", "\\", ".")):
        raise ValueError(
            f"path must end with the files' name, as build/amp does, got {str(path)!r}"
        )
    path = Path(path).expanduser().resolve()
    names.check(path.name)
    spec = layer.spec
    if spec.bidirectional or spec.reverse:
        raise ValueError(
            "export_native needs a layer that runs forward, got a bidirectional or reverse one"
        )
    block = whole("block", block)
    if not 1 <= block <= MAX_BLOCK_STEPS:
        raise ValueError(
            f"block must be a number of steps from 1 to {MAX_BLOCK_STEPS}, got {block}"
        )
    if compiler is not None and shutil.which(compiler) is None:
        raise ValueError(f"the compiler {compiler} is not on the PATH: install it, or name another")
    weights = layer.resting_weights()
    dtype = weights[0].dtype
    if dtype not in REAL or any(weight.is_meta for weight in weights):
        have = "one without values" if weights[0].is_meta else dtype
        raise ValueError(f"export_native needs a layer of float32 or float64, got {have}")
    dispatch.select(Problem(spec, dtype, "cpu"), "cpu")
    job = Job(layer.cell, spec, path.name, repr(layer), [each.cpu() for each in weights], block)
    if cpu is not None:
        check(cpu)
    made = compiled(job) if cpu is None else elsewhere(job, cpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".h").write_text(made.header, encoding="utf-8")
    path.with_suffix(".o").write_bytes(made.code)
    files = [path.with_suffix(".h"), path.with_suffix(".o")]
    if cpu in FOREIGN and compiler is None:
        return files
    return [*files, *_linked(path, compiler or "cc")]


def _linked(path: Path, compiler: str) -> list[Path]:
    """The shared library; nothing where the compiler is not found."""
    mac = sys.platform == "darwin"
    library = path.with_suffix(".dylib" if mac else ".so")
    library.unlink(missing_ok=True)  # of an earlier export, with another struct
    if shutil.which(compiler) is None or sys.platform == "win32":
        return []
    own = f"-Wl,-install_name,@rpath/{library.name}" if mac else f"-Wl,-soname,{library.name}"
    made = subprocess.run(
        [compiler, "-shared", own, "-o", str(library), str(path.with_suffix(".o")), "-lm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        raise ExportError(f"{compiler} cannot link {library}: {made.stderr.strip()}")
    return [library]
