"""Kernels that are the same for all cells: they pack weights, and add up gradients."""

from typing import Any

from numba import njit, uint32

from openrnn.kernels.cpu import packing
from openrnn.kernels.cpu.args import DIGEST_WORDS
from openrnn.kernels.cpu.args_type import collect_args_at, digest_args_at, pack_args_at
from openrnn.kernels.cpu.memory import float32_at, float64_at, uint32_at
from openrnn.kernels.cpu.vectors import SIZES

PRIME = 0x9E3779B1


@njit(forceinline=True)
def _mixed(word, more):
    """A word of a digest after another word of the matrix.

    The shift brings high bits down: without it the signs of all elements could change unseen.
    """
    made = uint32((word ^ more) * uint32(PRIME))
    return uint32(made ^ (made >> uint32(15)))


def digest(args_at, task, running):
    """Each word of a digest is made of every DIGEST_WORDS-th word of a part of a matrix.

    One changed word always changes the digest. Several go unseen where each digest word that they
    reach comes out as before, as one in 2**32 does.
    """
    args = digest_args_at(args_at)
    for part in range(task, args.parts, args.tasks):
        begin, end = args.words * part // args.parts, args.words * (part + 1) // args.parts
        made = uint32_at(args.out + part * DIGEST_WORDS * 4)
        for j in range(DIGEST_WORDS):
            made[j] = uint32(0)
        rows = (end - begin) // DIGEST_WORDS
        for i in range(rows):
            given = uint32_at(args.matrix + (begin + i * DIGEST_WORDS) * 4)
            for j in range(DIGEST_WORDS):
                made[j] = _mixed(made[j], given[j])
        given = uint32_at(args.matrix + (begin + rows * DIGEST_WORDS) * 4)
        for j in range(end - begin - rows * DIGEST_WORDS):
            made[j] = _mixed(made[j], given[j])


def _for(dtype: str) -> tuple[Any, ...]:
    """The three kernels of a type."""
    pack_transposed = getattr(packing, f"pack_transposed_{dtype}")
    pack_plain = getattr(packing, f"pack_plain_{dtype}")
    reals, size = {"float32": float32_at, "float64": float64_at}[dtype], SIZES[dtype]

    def transpose(args_at, task, running):
        args = pack_args_at(args_at)
        pack_transposed(
            args.matrix, args.rows, args.gates, args.columns, args.columns, args.out, args.padded,
            task, args.tasks,
        )  # fmt: skip

    def pack(args_at, task, running):
        args = pack_args_at(args_at)
        pack_plain(
            args.matrix, args.gates, args.rows, args.padded, args.columns, args.columns, args.out,
            task, args.tasks,
        )  # fmt: skip

    def collect(args_at, task, running):
        """out[gates, rows, columns] = the sum over parts of sums[gates, padded, width]."""
        args = collect_args_at(args_at)
        tasks, sums, parts, part = args.tasks, args.sums, args.parts, args.part
        padded, rows, width, columns = args.padded, args.rows, args.width, args.columns
        target, count = reals(args.out), args.gates * rows
        for row in range(count * task // tasks, count * (task + 1) // tasks):
            start = (row // rows * padded + row % rows) * width
            given = reals(sums + start * size)
            for j in range(columns):
                target[row * columns + j] = given[j]
            for index in range(1, parts):
                given = reals(sums + (index * part + start) * size)
                for j in range(columns):
                    target[row * columns + j] += given[j]

    return transpose, pack, collect


transpose_float32, pack_float32, collect_float32 = _for("float32")
transpose_float64, pack_float64, collect_float64 = _for("float64")
