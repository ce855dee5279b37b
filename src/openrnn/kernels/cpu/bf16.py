"""Products of float32 rows with bfloat16 weights, for the CPU kernels; sums are float32.

    C[i, j] (+)= sum over k of A[i, k] W[j, k]

The weights lie in panels as `packing` makes them, in half of the memory: [panels, inner, LANES] of
32 bits. Of a panel's two vectors, the lower half of lane v has unit v of the first, and the upper
half unit v of the second. One load gives both: a bfloat16 is the upper half of a float32. Sums are
added up in the order of `product`, so the bits are those of its float32 panels of such weights.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from openrnn.kernels.cpu.args_type import pack_args_at
from openrnn.kernels.cpu.host import LANES
from openrnn.kernels.cpu.memory import named
from openrnn.kernels.cpu.packing import row_sources, rows_from, transposed
from openrnn.kernels.cpu.product import (
    AHEAD,
    LEAST_AHEAD,
    TILE_PANELS,
    of_each_tile,
    prefetch_rows,
    store_sums,
)
from openrnn.kernels.cpu.vectors import Emitter, compiled, intrinsic, number

__all__ = [
    "SIXTEEN", "UPPER", "WORDS", "bf16_product", "bf16_transpose", "over_panels", "rounded",
    "rounded_halves", "word_tile",
]  # fmt: skip

_LANES: int = LANES["float32"]
_PANEL = 2 * _LANES
WORDS = ir.VectorType(ir.IntType(32), _LANES)
UPPER = WORDS([0xFFFF0000] * _LANES)
SIXTEEN = WORDS([16] * _LANES)

VectorsOf = Callable[[Emitter, ir.Value], list[ir.Value]]
Add = Callable[[Emitter, ir.Value, ir.Value, ir.Value], None]

_INT64_2, _INT64_3, _INT64_4 = (types.UniTuple(types.int64, count) for count in (2, 3, 4))


def word_tile(panel: int, factor: ir.Type, vectors_of: VectorsOf, add: Add) -> Any:
    """An intrinsic that makes a tile of a product whose panels are of words of 32 bits.

    Args:
        panel: words of a row of a panel.
        factor: the type of a word of A.
        vectors_of: makes the two vectors of a panel's row, from its address.
        add: adds the product of a splat of a word of A and of such a vector to sums.
    """

    @intrinsic
    def tile(_, shape, a, w, c, accumulate):  # type: ignore[no-untyped-def]
        """c[rows, panels * PANEL] (+)= a[rows, inner] w[inner, panels * PANEL], of TILE_PANELS.

        shape: (rows, panels, inner); a, c: (address, words from row to row); w: (address, words
        from panel to panel).
        """
        signature = types.void(_INT64_3, *[_INT64_2] * 3, types.boolean)

        def emit_case(
            emitter: Emitter, height: int, width: int, inner: ir.Value, args: list[ir.Value]
        ) -> None:
            builder = emitter.builder
            *matrices, accumulate = args
            (a, a_row), (w, w_panel), (c, c_row) = (
                cgutils.unpack_tuple(builder, matrix) for matrix in matrices
            )
            sums = [emitter.zeros(2 * width) for _ in range(height)]
            a_rows = [emitter.at(a, builder.mul(a_row, number(row))) for row in range(height)]
            panels = [emitter.at(w, builder.mul(w_panel, number(one))) for one in range(width)]
            with emitter.loop(inner) as k:
                rows = [emitter.at(start, builder.mul(k, number(panel))) for start in panels]
                vectors = [vector for row in rows for vector in vectors_of(emitter, row)]
                if height >= LEAST_AHEAD:
                    later = [emitter.at(row, number(AHEAD * panel)) for row in rows]
                    prefetch_rows(emitter, later, 4 * panel)
                for row, at in enumerate(a_rows):
                    word = builder.load(emitter.at(at, k), typ=factor)
                    word = emitter.splat(word, _LANES)
                    for slot, vector in zip(sums[row], vectors, strict=True):
                        add(emitter, slot, word, vector)
            store_sums(emitter, sums, c, c_row, accumulate)

        def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
            shape, *others = args
            of_each_tile(Emitter(builder, "float32"), shape, others, emit_case)
            return context.get_dummy_value()

        return signature, emit

    return tile


def _two_of_each(emitter: Emitter, row: ir.Value) -> list[ir.Value]:
    """The lower halves of words as floats, and the upper ones."""
    builder = emitter.builder
    words = builder.bitcast(emitter.load(row), WORDS)
    halves = builder.shl(words, SIXTEEN), builder.and_(words, UPPER)
    return [builder.bitcast(bits, emitter.vector) for bits in halves]


def over_panels(name: str, tile: Any, widths: tuple[int, ...] = TILE_PANELS) -> Any:
    """A function that calls a tile's intrinsic for all panels and rows of a product.

    Args:
        name: of the tile: each one has a function of its own.
        widths: the most panels of tiles of 1, 2, .. rows.
    """
    highest = len(widths)

    @compiled
    @named(name)
    def product(shape, units, a, w, c, accumulate, backwards):  # type: ignore[no-untyped-def]
        """C[i, g padded + u] (+)= A[i, :] . W[g, u, :], for the units [first, end) of every gate g.

        Args:
            shape: (rows, inner).
            units: (gates, padded, first, end).
            a, c: (address, words from row to row); w: (address, words from panel to panel).
            backwards: from the last panels of the last gate to the first, with the same results.
        """
        rows, inner = shape
        gates, padded, first, end = units
        a_at, a_row = a
        w_at, w_panel = w
        c_at, c_row = c
        blocks = (rows + highest - 1) // highest
        most = widths[min(rows, highest) - 1]
        parts, count = gates, end - first
        if count == padded:  # all units of all gates lie one after the other
            parts, count = 1, gates * padded
        count = (count + _PANEL - 1) // _PANEL
        tiles = (count + most - 1) // most
        for turn in range(parts):
            part = parts - 1 - turn if backwards else turn
            column = part * padded + first
            for at in range(tiles):
                done = (tiles - 1 - at if backwards else at) * most
                width = min(most, count - done)
                start, row = column + done * _PANEL, 0
                for block in range(blocks):
                    height = (rows - row) // (blocks - block)
                    tile(
                        (height, width, inner), (a_at + row * a_row * 4, a_row),
                        (w_at + start // _PANEL * w_panel * 4, w_panel),
                        (c_at + (row * c_row + start) * 4, c_row), accumulate,
                    )  # fmt: skip
                    row += height

    return product


_bf16_tile = word_tile(_LANES, ir.FloatType(), _two_of_each, Emitter.add_product)
_over_panels = over_panels("bf16", _bf16_tile)


def bf16_product(  # type: ignore[no-untyped-def]
    rows, inner, gates, units, padded, first, end, a_at, a_row, w, scales, c_at, c_row, accumulate,
    memory, backwards,
):  # fmt: skip
    """C[i, g padded + u] (+)= A[i, :] . W[g, u, :], for the units [first, end) of every gate g.

    A kernel of its own, which time loops call by address: those without bfloat16 weights lack it.

    Args:
        rows, inner: of A. Strides `a_row` and `c_row` count elements.
        padded: the units of a gate in W and in C; first and end: whole panels, unless all.
        w: the panels.
        units, scales, memory: unused, as `int8_product` has them.
        backwards: from the last panels of the last gate to the first, with the same results.
    """
    _over_panels(
        (rows, inner), (gates, padded, first, end), (a_at, a_row), (w, _LANES * inner),
        (c_at, c_row), accumulate != 0, backwards != 0,
    )  # fmt: skip


def rounded(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Bits whose upper half is the bfloat16 nearest to a float, ties to even; a nan stays one."""
    bits = builder.bitcast(vector, WORDS)
    odd = builder.and_(builder.lshr(bits, SIXTEEN), WORDS([1] * _LANES))
    near = builder.add(bits, builder.add(odd, WORDS([0x7FFF] * _LANES)))
    quiet = builder.or_(bits, WORDS([0x00400000] * _LANES))
    return builder.select(builder.fcmp_unordered("uno", vector, vector), quiet, near)


def rounded_halves(emitter: Emitter, vector: ir.Value) -> ir.Value:
    """The bits of the bfloat16 nearest to each float, ties to even, as int16."""
    builder, halves = emitter.builder, ir.VectorType(ir.IntType(16), _LANES)
    return builder.trunc(builder.lshr(rounded(builder, vector), SIXTEEN), halves)


@intrinsic
def _pack_panel(_, column, sizes, w, out):  # type: ignore[no-untyped-def]
    """Writes out[k, 0:LANES] for the two vectors of a panel, whose first column is `column`.

    sizes: (gates, rows_per_gate, padded_unit, inner); w: (address, elements from row to row).
    """
    signature = types.void(types.int64, _INT64_4, _INT64_2, types.int64)

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter = Emitter(builder, "float32")
        column, sizes, matrix, out = args
        inner, lanes = builder.extract_value(sizes, 3), number(_LANES)
        halves = [
            row_sources(emitter, builder.add(column, first), sizes, matrix)
            for first in (number(0), lanes)
        ]
        blocks = builder.udiv(builder.add(inner, number(_LANES - 1)), lanes)
        with cgutils.for_range(builder, blocks) as loop:
            first = builder.mul(loop.index, lanes)
            columns = [
                transposed(emitter, rows_from(emitter, sources, first)) for sources in halves
            ]
            for k, (lower, upper) in enumerate(zip(*columns, strict=True)):
                low, high = rounded(builder, lower), rounded(builder, upper)
                words = builder.or_(builder.lshr(low, SIXTEEN), builder.and_(high, UPPER))
                index = builder.add(first, number(k))
                with builder.if_then(builder.icmp_signed("<", index, inner), likely=True):
                    target = emitter.at(out, builder.mul(index, lanes))
                    emitter.store(builder.bitcast(words, emitter.vector), target)
        return context.get_dummy_value()

    return signature, emit


def bf16_transpose(args_at, task, running):  # type: ignore[no-untyped-def]
    """Packs W[g rows + u, k], rounded to bfloat16, as column g padded + u; the padding is zero.

    A task writes every tasks-th panel.
    """
    args = pack_args_at(args_at)
    gates, padded, inner = args.gates, args.padded, args.columns
    for first in range(task * _PANEL, gates * padded, args.tasks * _PANEL):
        sizes, matrix = (gates, args.rows, padded, inner), (args.matrix, inner)
        _pack_panel(first, sizes, matrix, args.out + first * inner * 2)
