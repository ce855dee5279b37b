"""The time loops, compiled once for all cells of a dtype."""

from functools import lru_cache
from importlib.resources import files

from openrnn.kernels import objects


@lru_cache(maxsize=4)
def loop(kind: str, dtype: str) -> objects.Kernel:
    """`kernels/forward.py` or `kernels/backward.py`, which are written in float32, in a dtype."""
    text = (files("openrnn.kernels") / f"{kind}.py").read_text(encoding="utf-8")
    return objects.kernels(text.replace("float32", dtype), [kind])[0]
