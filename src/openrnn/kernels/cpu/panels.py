"""What is compiled once for all cells: weights into panels, sums into gradients, a thread's tasks.

A job is the number of tasks, then the arguments in order.
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

    def transpose(job_at, task, team):
        job = int64_at(job_at)
        pack_transposed(job[1], job[2], job[3], job[4], job[5], job[6], job[7], task, job[0])

    def pack(job_at, task, team):
        job = int64_at(job_at)
        pack_plain(job[1], job[2], job[3], job[4], job[5], job[6], job[7], task, job[0])

    def collect(job_at, task, team):
        """out[gates, units, kept] = the sum over parts of sums[gates, padded, width]."""
        job = int64_at(job_at)
        tasks, sums, parts, part, padded, width = job[0], job[1], job[2], job[3], job[5], job[7]
        units, kept, target = job[6], job[8], reals(job[9])
        rows = job[4] * units
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
