"""Kernels that are the same for all cells: they pack weights, and add up gradients.

The int64 array of a kernel here holds the number of tasks, then the arguments in order.
"""

from typing import Any

from openrnn.kernels.cpu import packing
from openrnn.kernels.cpu.memory import float32_at, float64_at, int64_at
from openrnn.kernels.cpu.vectors import SIZES


def _for(dtype: str) -> tuple[Any, ...]:
    """The three kernels of a type."""
    pack_transposed = getattr(packing, f"pack_transposed_{dtype}")
    pack_plain = getattr(packing, f"pack_plain_{dtype}")
    reals, size = {"float32": float32_at, "float64": float64_at}[dtype], SIZES[dtype]

    def transpose(args_at, task, running):
        args = int64_at(args_at)
        pack_transposed(
            args[1], args[2], args[3], args[4], args[5], args[6], args[7], task, args[0]
        )

    def pack(args_at, task, running):
        args = int64_at(args_at)
        pack_plain(args[1], args[2], args[3], args[4], args[5], args[6], args[7], task, args[0])

    def collect(args_at, task, running):
        """out[gates, units, kept] = the sum over parts of sums[gates, padded, width]."""
        args = int64_at(args_at)
        tasks, sums, parts, part = args[0], args[1], args[2], args[3]
        padded, units, width, kept, target = args[5], args[6], args[7], args[8], reals(args[9])
        rows = args[4] * units
        for row in range(rows * task // tasks, rows * (task + 1) // tasks):
            start = (row // units * padded + row % units) * width
            given = reals(sums + start * size)
            for j in range(kept):
                target[row * kept + j] = given[j]
            for place in range(1, parts):
                given = reals(sums + (place * part + start) * size)
                for j in range(kept):
                    target[row * kept + j] += given[j]

    return transpose, pack, collect


transpose_float32, pack_float32, collect_float32 = _for("float32")
transpose_float64, pack_float64, collect_float64 = _for("float64")
