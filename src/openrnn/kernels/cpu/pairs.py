"""Products of numbers rounded to bfloat16, pair by pair, for the CPU kernels; sums are float32.

    C[i, j] (+)= sum over k of A[i, k] B[k, j]

One instruction of AVX512-BF16 (vdpbf16ps) adds a[2 p] b[2 p] + a[2 p + 1] b[2 p + 1] to each of 16
sums: twice as many products as a float32 instruction. A pair is a word of 32 bits, the first number
in its lower half. B lies in panels [panels, pairs, PANEL] of such words. A comes in float32 and is
rounded to the nearest, ties to even. Zeros fill the last block of PAIR_BLOCK pairs, which `amx`
reads whole: it multiplies the same rows and panels. The instructions take subnormal numbers for 0.

Other processors have no use for these kernels. They are compiled there, too, with float32
instructions in place of that one, so that tests run anywhere.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from openrnn.kernels.cpu.bf16 import SIXTEEN, UPPER, WORDS, over_panels, word_tile
from openrnn.kernels.cpu.host import LANES, MULTIPLIES_BF16
from openrnn.kernels.cpu.layout import NEAR_BYTES, PACKED_STRIP, PAIR_BLOCK
from openrnn.kernels.cpu.pair_panels import halves, pair_columns
from openrnn.kernels.cpu.product import HIGHEST
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.rows import pair_words, rounded_rows
from openrnn.kernels.cpu.vectors import Emitter, intrinsic, number

__all__ = ["kernels_of", "pairs_outer", "pairs_product"]

_LANES: int = LANES["float32"]
_PANEL = 2 * _LANES


def _add_pairs(emitter: Emitter, slot: ir.Value, x: ir.Value, y: ir.Value) -> None:
    """Adds the products of two vectors of pairs to sums."""
    builder = emitter.builder
    if MULTIPLIES_BF16:
        kind = ir.FunctionType(emitter.vector, [emitter.vector, x.type, y.type])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.store(builder.call(function, [builder.load(slot), x, y]), slot)
        return
    for low in (True, False):
        parts = [builder.shl(w, SIXTEEN) if low else builder.and_(w, UPPER) for w in (x, y)]
        emitter.add_product(slot, *(builder.bitcast(part, emitter.vector) for part in parts))


def _two_vectors(emitter: Emitter, row: ir.Value) -> list[ir.Value]:
    """The pairs of a panel's row."""
    starts = row, emitter.at(row, number(_LANES))
    return [emitter.builder.bitcast(emitter.load(start), WORDS) for start in starts]


_pairs_tile = word_tile(_PANEL, ir.IntType(32), _two_vectors, _add_pairs)


@intrinsic
def _round_row(_, a, count, out):  # type: ignore[no-untyped-def]
    """out[j] = a[j] as bfloat16 for j < count; the rest of the last vector is 0."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter, (a, count, out) = Emitter(builder, "float32"), args

        def look(offset: ir.Value, mask: ir.Value | None) -> None:
            value = halves(emitter, emitter.load(emitter.at(a, offset), mask))
            address = builder.add(out, builder.mul(offset, number(2)))
            builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=2)

        emitter.whole_vectors(count, look)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def kernels_of(multiply: Any, least: int) -> tuple[Any, Any]:
    """The kernels of `multiply`, a function as `over_panels` makes it, of tiles of `least` rows."""

    def pairs_product(  # type: ignore[no-untyped-def]
        rows, inner, gates, units, padded, first, end, a_at, a_row, w, scales, c_at, c_row,
        accumulate, memory, backwards,
    ):  # fmt: skip
        """C[i, g padded + u] (+)= A[i, :] . W[g, u, :], for the units [first, end) of every gate g.

        A kernel of its own, which time loops call by address, forward and backward.

        Args:
            rows, inner: of A. Strides `a_row` and `c_row` count elements.
            padded: the units of a gate in W and in C; first and end: whole panels, unless all.
            w: the panels.
            units, scales: unused, as `int8_product` has them.
            memory: of this thread, for rows that are rounded.
            backwards: from the last panels of the last gate to the first, with the same results.
        """
        pairs, row_words = (inner + 1) // 2, pair_words(inner)
        most = rounded_rows(row_words)
        for start in range(0, rows, most):
            some = min(most, rows - start)
            for row in range(some):
                out = memory + row * row_words * 4
                if inner % (2 * PAIR_BLOCK) != 0:
                    copy(out + (row_words - PAIR_BLOCK) * 4, 0, 0, PAIR_BLOCK)
                _round_row(a_at + (start + row) * a_row * 4, inner, out)
            multiply(
                (some, pairs), (gates, padded, first, end), (memory, row_words),
                (w, _PANEL * row_words), (c_at + start * c_row * 4, c_row), accumulate != 0,
                backwards != 0,
            )  # fmt: skip

    def pairs_outer(  # type: ignore[no-untyped-def]
        begin, end, count, a_at, a_row, panels, columns, strip, c_at, accumulate, more_panels,
        more_columns, more_at,
    ):  # fmt: skip
        """The rows [begin, end) of C (+)= A[count, ..] transposed times B[count, columns].

        Args:
            panels: all of B, as `pairs_panels` packs it.
            strip: memory of this thread, for PACKED_STRIP columns of A, each a row of pairs.
            c_at: C, whose rows are `columns` apart.
            more_panels, more_columns, more_at: another B and C, of the same A; 0 columns if none.
        """
        pairs, whole = (count + 1) // 2, pair_words(count)
        # where all of B is near, whole rows of C: they are then written one after the other
        near = whole * (columns + more_columns) * 4 <= NEAR_BYTES
        step = least if near else PACKED_STRIP
        for first in range(begin, end, step):
            some = min(step, end - first)
            for column in range(0, some, _LANES):
                a = (a_at + (first + column) * 4, a_row)
                out = strip + column * whole * 4
                pair_columns(count, a, min(_LANES, some - column), out, whole)
            for b, width, c in ((panels, columns, c_at), (more_panels, more_columns, more_at)):
                multiply(
                    (some, pairs), (1, width, 0, width), (strip, whole), (b, _PANEL * whole),
                    (c + first * width * 4, width), accumulate != 0, False,
                )  # fmt: skip

    return pairs_product, pairs_outer


pairs_product, pairs_outer = kernels_of(over_panels("pairs", _pairs_tile), HIGHEST)
