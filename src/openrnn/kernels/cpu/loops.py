"""The time loops, compiled once for all cells of a dtype.

Their variables that begin with a number are made int64: to numba a number in the source has a type
of its own, and it compiles a function anew for each type of its arguments.
"""

from importlib.resources import files

from openrnn.kernels.cpu import objects
from openrnn.memo import resource


def source(kind: str, dtype: str) -> str:
    """The text of `forward.py` or `backward.py` of this folder, written in float32, for a dtype."""
    text = (files("openrnn.kernels.cpu") / f"{kind}.py").read_text(encoding="utf-8")
    return text.replace("float32", dtype)


@resource
def loop(kind: str, dtype: str) -> objects.CompiledFunction:
    """A time loop, compiled."""
    what = f"the time loop {kind} of all cells for {dtype}"
    return objects.kernels(source(kind, dtype), [kind], what)[0]
