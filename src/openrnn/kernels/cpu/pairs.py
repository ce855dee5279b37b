"""Products of numbers rounded to bfloat16, pair by pair, for the CPU kernels; sums are float32.

    C[i, j] (+)= sum over k of A[i, k] B[k, j]

One instruction of AVX512-BF16 (vdpbf16ps) adds a[2 p] b[2 p] + a[2 p + 1] b[2 p + 1] to each of 16
sums: in the time of a float32 instruction twice as many products. A pair is a word of 32 bits, the
first number in its lower half. B lies in panels [panels, pairs, PANEL] of such words. A comes in
float32 and is rounded to the nearest, ties to even. Where inner is odd a zero makes the last pair.

Other processors have no use for these kernels. They are compiled there, too, with float32
instructions in place of that one, so that tests run anywhere.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from openrnn.kernels.cpu.args_type import pack_args_at
from openrnn.kernels.cpu.bf16 import SIXTEEN, UPPER, WORDS, over_panels, rounded
from openrnn.kernels.cpu.host import LANES, MULTIPLIES_BF16
from openrnn.kernels.cpu.layout import NEAR_BYTES, PACKED_STRIP, PAIR_WORDS, PAIRS_ROWS
from openrnn.kernels.cpu.packing import row_sources, transposed
from openrnn.kernels.cpu.product import (
    AHEAD,
    HIGHEST,
    LEAST_AHEAD,
    of_each_tile,
    prefetch_panels,
    store_sums,
)
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.vectors import Emitter, intrinsic, number

__all__ = [
    "pairs_outer", "pairs_pack", "pairs_panels", "pairs_product", "pairs_transpose",
]  # fmt: skip

_LANES: int = LANES["float32"]
_PANEL = 2 * _LANES

_INT64_2, _INT64_3, _INT64_4 = (types.UniTuple(types.int64, count) for count in (2, 3, 4))


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


def _halves(emitter: Emitter, vector: ir.Value) -> ir.Value:
    """The bfloat16 nearest to each float, ties to even, as int16."""
    builder, halves = emitter.builder, ir.VectorType(ir.IntType(16), _LANES)
    if MULTIPLIES_BF16:
        kind = ir.FunctionType(halves, [emitter.vector])
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector])
    return builder.trunc(builder.lshr(rounded(builder, vector), SIXTEEN), halves)


def _pairs_of(emitter: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Words of two float vectors, both rounded."""
    first, second = _halves(emitter, low), _halves(emitter, high)
    turns = [lane // 2 + lane % 2 * _LANES for lane in range(_PANEL)]
    return emitter.builder.bitcast(emitter.shuffle(first, second, turns), WORDS)


@intrinsic
def _pairs_tile(_, shape, a, w, c, accumulate):  # type: ignore[no-untyped-def]
    """c[rows, panels * PANEL] (+)= a[rows, pairs] w[pairs, panels * PANEL], rows in TILE_PANELS.

    shape: (rows, panels, pairs); a: (address, words from row to row, from pair to pair); w:
    (address, words from panel to panel); c: (address, elements from row to row).
    """
    signature = types.void(_INT64_3, _INT64_3, _INT64_2, _INT64_2, types.boolean)

    def emit_case(
        emitter: Emitter, height: int, width: int, pairs: ir.Value, args: list[ir.Value]
    ) -> None:
        builder = emitter.builder
        *matrices, accumulate = args
        (a, a_row, a_pair), (w, w_panel), (c, c_row) = (
            cgutils.unpack_tuple(builder, matrix) for matrix in matrices
        )
        sums = [emitter.zeros(2 * width) for _ in range(height)]
        a_rows = [emitter.at(a, builder.mul(a_row, number(row))) for row in range(height)]
        panels = [emitter.at(w, builder.mul(w_panel, number(panel))) for panel in range(width)]
        with emitter.loop(pairs) as pair:
            offset, a_offset = builder.mul(pair, number(_PANEL)), builder.mul(pair, a_pair)
            vectors = [
                builder.bitcast(emitter.load(emitter.at(start, offset, half)), WORDS)
                for start in panels
                for half in (number(0), number(_LANES))
            ]
            if height >= LEAST_AHEAD:
                prefetch_panels(emitter, panels, offset, number(AHEAD * _PANEL))
            for row, at in enumerate(a_rows):
                word = builder.load(emitter.at(at, a_offset), typ=ir.IntType(32))
                word = emitter.splat(word, _LANES)
                for slot, vector in zip(sums[row], vectors, strict=True):
                    _add_pairs(emitter, slot, word, vector)
        store_sums(emitter, sums, c, c_row, accumulate)

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        shape, *others = args
        of_each_tile(Emitter(builder, "float32"), shape, others, emit_case)
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def _round_row(_, a, count, out):  # type: ignore[no-untyped-def]
    """out[j] = a[j] as bfloat16, j < count; up to the next whole vector of floats it becomes 0."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter, (a, count, out) = Emitter(builder, "float32"), args

        def look(offset: ir.Value, mask: ir.Value | None) -> None:
            value = _halves(emitter, emitter.load(emitter.at(a, offset), mask))
            address = builder.add(out, builder.mul(offset, number(2)))
            builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=2)

        emitter.whole_vectors(count, look)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _pairer(most: int) -> Any:
    """An intrinsic that makes pairs of neighbouring rows, of up to so many columns."""

    @intrinsic
    def pair_rows(_, rows, a, width, out, step):  # type: ignore[no-untyped-def]
        """out[p, j] = (a[2 p, j], a[2 p + 1, j]) for 2 p < rows and j < width; beyond: zeros.

        a: (address, elements from row to row); step: words from pair to pair of out.
        """
        signature = types.void(types.int64, _INT64_2, types.int64, types.int64, types.int64)

        def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
            emitter, (rows, matrix, width, out, step) = Emitter(builder, "float32"), args
            a, a_row = cgutils.unpack_tuple(builder, matrix)
            starts = [number(start) for start in range(0, most, _LANES)]
            masks = [emitter.below(builder.sub(width, start), _LANES) for start in starts]

            def write(pair: ir.Value, both: bool) -> None:
                row = emitter.at(a, builder.mul(builder.mul(pair, number(2)), a_row))
                target = emitter.at(out, builder.mul(pair, step))
                for start, mask in zip(starts, masks, strict=True):
                    low, high = emitter.load(emitter.at(row, start), mask), emitter.vector(None)
                    if both:
                        high = emitter.load(emitter.at(row, a_row, start), mask)
                    words = builder.bitcast(_pairs_of(emitter, low, high), emitter.vector)
                    emitter.store(words, emitter.at(target, start), mask)

            whole = builder.udiv(rows, number(2))
            with emitter.loop(whole) as pair:
                write(pair, both=True)
            odd = builder.icmp_signed("<", builder.mul(whole, number(2)), rows)
            with builder.if_then(odd):
                write(whole, both=False)
            return context.get_dummy_value()

        return signature, emit

    return pair_rows


_pair_panel, _pair_block = _pairer(_PANEL), _pairer(HIGHEST)


@intrinsic
def _transpose_pairs(_, column, sizes, w, out):  # type: ignore[no-untyped-def]
    """Writes out[pair, 0:LANES], rows PANEL apart, for the columns from `column` on.

    sizes: (gates, rows_per_gate, padded_unit, inner); w: (address, elements from row to row).
    """
    signature = types.void(types.int64, _INT64_4, _INT64_2, types.int64)

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter = Emitter(builder, "float32")
        column, sizes, matrix, out = args
        inner = builder.extract_value(sizes, 3)
        sources = row_sources(emitter, column, sizes, matrix)
        pairs = builder.udiv(builder.add(inner, number(1)), number(2))
        even, odd = (list(range(first, _PANEL, 2)) for first in range(2))
        blocks = builder.udiv(builder.add(inner, number(_PANEL - 1)), number(_PANEL))
        with cgutils.for_range(builder, blocks) as loop:
            first = builder.mul(loop.index, number(_PANEL))
            rows = []
            for source, count in sources:
                left = builder.sub(count, first)
                mask, rest = (
                    emitter.below(builder.sub(left, number(done)), _LANES) for done in (0, _LANES)
                )
                x = emitter.load(emitter.at(source, first), mask)
                y = emitter.load(emitter.at(source, first, number(_LANES)), rest)
                low, high = (emitter.shuffle(x, y, lanes) for lanes in (even, odd))
                rows.append(_pairs_of(emitter, low, high))
            start = builder.mul(loop.index, number(_LANES))
            for k, words in enumerate(transposed(emitter, rows)):
                pair = builder.add(start, number(k))
                with builder.if_then(builder.icmp_signed("<", pair, pairs), likely=True):
                    target = emitter.at(out, builder.mul(pair, number(_PANEL)))
                    emitter.store(builder.bitcast(words, emitter.vector), target)
        return context.get_dummy_value()

    return signature, emit


def pairs_transpose(args_at, task, running):  # type: ignore[no-untyped-def]
    """Packs W[g rows + u, k] as column g padded + u of pairs of k; the padding is zero.

    A task writes every tasks-th panel.
    """
    args = pack_args_at(args_at)
    gates, padded, inner = args.gates, args.padded, args.columns
    for first in range(task * _PANEL, gates * padded, args.tasks * _PANEL):
        sizes, matrix = (gates, args.rows, padded, inner), (args.matrix, inner)
        start = args.out + first * ((inner + 1) // 2) * 4
        _transpose_pairs(first, sizes, matrix, start)
        _transpose_pairs(first + _LANES, sizes, matrix, start + _LANES * 4)


def pairs_pack(args_at, task, running):  # type: ignore[no-untyped-def]
    """Packs W[g rows + u, j] as column j of pairs of rows g padded + u; the padding is zero.

    A task writes every tasks-th panel. `padded` is even.
    """
    args = pack_args_at(args_at)
    rows, padded, columns = args.rows, args.padded, args.columns
    for first in range(task * _PANEL, columns, args.tasks * _PANEL):
        width = min(columns - first, _PANEL)
        for gate in range(args.gates):
            out = args.out + (first * args.gates + gate * _PANEL) * (padded // 2) * 4
            if width < _PANEL or rows < padded:
                copy(out, 0, 0, padded // 2 * _PANEL)
            a = args.matrix + (gate * rows * columns + first) * 4
            _pair_panel(rows, (a, columns), width, out, _PANEL)


_over_panels = over_panels("pairs", _pairs_tile)


def pairs_product(  # type: ignore[no-untyped-def]
    rows, inner, gates, units, padded, first, end, a_at, a_row, w, scales, c_at, c_row, accumulate,
    memory, backwards,
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
    pairs, row_words = (inner + 1) // 2, (inner + _LANES - 1) // _LANES * (_LANES // 2)
    most = max(PAIRS_ROWS, PAIR_WORDS // row_words)
    for start in range(0, rows, most):
        some = min(most, rows - start)
        for row in range(some):
            _round_row(a_at + (start + row) * a_row * 4, inner, memory + row * row_words * 4)
        _over_panels(
            (some, pairs), (gates, padded, first, end), (memory, row_words, 1),
            (w, _PANEL * pairs), (c_at + start * c_row * 4, c_row), accumulate != 0, backwards != 0,
        )  # fmt: skip


def pairs_panels(begin, end, count, b_at, b_row, panels):  # type: ignore[no-untyped-def]
    """Packs the columns [begin, end) of B[count, columns]: panels of pairs of rows, for `outer`."""
    for first in range(begin, end, _PANEL):
        out = panels + first * ((count + 1) // 2) * 4
        _pair_panel(count, (b_at + first * 4, b_row), _PANEL, out, _PANEL)


def pairs_outer(  # type: ignore[no-untyped-def]
    begin, end, count, a_at, a_row, panels, columns, strip, c_at, accumulate, more_panels,
    more_columns, more_at,
):  # fmt: skip
    """The rows [begin, end) of C (+)= A[count, ..] transposed times B[count, columns].

    Args:
        panels: all of B, as `pairs_panels` packs it.
        strip: memory of this thread, for PACKED_STRIP columns of A.
        c_at: C, whose rows are `columns` apart.
        more_panels, more_columns, more_at: another B and C, of the same A; 0 columns if none.
    """
    pairs = (count + 1) // 2
    # where all of B is near, whole rows of C: they are then written one after the other
    near = pairs * (columns + more_columns) * 4 <= NEAR_BYTES
    step = HIGHEST if near else PACKED_STRIP
    for first in range(begin, end, step):
        some = min(step, end - first)
        for block in range(0, some, HIGHEST):
            height = min(HIGHEST, some - block)
            a = (a_at + (first + block) * 4, a_row)
            _pair_block(count, a, height, strip + block * pairs * 4, height)
        for b, width, c in ((panels, columns, c_at), (more_panels, more_columns, more_at)):
            for column in range(0, width, _PANEL):
                for block in range(0, some, HIGHEST):
                    height = min(HIGHEST, some - block)
                    _pairs_tile(
                        (height, 1, pairs), (strip + block * pairs * 4, 1, height),
                        (b + column * pairs * 4, _PANEL * pairs),
                        (c + ((first + block) * width + column) * 4, width), accumulate != 0,
                    )  # fmt: skip
