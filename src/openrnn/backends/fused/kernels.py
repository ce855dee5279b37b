"""From tiles to a kernel that is ready to launch: source, binary without spills, loaded."""

from dataclasses import replace
from functools import lru_cache

from openrnn.cells import lookup
from openrnn.codegen import cuda
from openrnn.codegen.cuda import Backward, Forward
from openrnn.codegen.trace import Traced, trace
from openrnn.native import nvrtc
from openrnn.spec import Spec


def traced(spec: Spec) -> Traced:
    """The graphs of a network's cell, clip applied."""
    return trace(lookup(spec.cell), spec.cell_clip)


@lru_cache(maxsize=4096)
def binary(
    cell: Traced, dtype: str, how: Forward | Backward, arch: str, patience: int = 0
) -> tuple[nvrtc.Binary, Forward | Backward]:
    """A kernel that spills no register, and the tiles with which it does not.

    Where it spills, less of R is put in registers: the model of `plan` is near, the compiler knows.
    """
    kind, write = ("forward", cuda.forward_source)
    if isinstance(how, Backward):
        kind, write = "backward", cuda.backward_source  # type: ignore[assignment]
    macros = (("PATIENCE", patience),) if patience else ()
    title = f"{cell.name}-{dtype}-{kind}-{how.units}"
    while True:
        source = write(cell, dtype, how)  # type: ignore[arg-type]
        made = nvrtc.binary(source, kind, arch, title, macros)
        if not made.resources.spilled or not how.resident:
            return made, how
        how = replace(how, resident=max(0, how.resident - 2))


@lru_cache(maxsize=4096)
def kernel(
    cell: Traced, dtype: str, how: Forward | Backward, device: int, arch: str, patience: int = 0
) -> tuple[nvrtc.Kernel, Forward | Backward]:
    """The same, loaded on a device."""
    made, final = binary(cell, dtype, how, arch, patience)
    shared = cuda.shared_bytes(cell, dtype, final)
    return nvrtc.loaded(made, final.cluster, final.threads, shared, device), final
