"""Packs factors of products of bfloat16 pairs: panels of pairs, and rows of pairs.

`pairs` has the layout. Zeros fill the last block of PAIR_BLOCK pairs.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from openrnn.kernels.cpu.args_type import pack_args_at
from openrnn.kernels.cpu.bf16 import WORDS, rounded_halves
from openrnn.kernels.cpu.host import LANES, MULTIPLIES_BF16
from openrnn.kernels.cpu.layout import PAIR_BLOCK
from openrnn.kernels.cpu.packing import row_sources, rows_from, transposed
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.rows import pair_words
from openrnn.kernels.cpu.vectors import Emitter, compiled, intrinsic, number

__all__ = ["halves", "pair_columns", "pairs_pack", "pairs_panels", "pairs_transpose"]

_LANES: int = LANES["float32"]
_PANEL = 2 * _LANES

_INT64_2, _INT64_4 = (types.UniTuple(types.int64, count) for count in (2, 4))


def halves(emitter: Emitter, vector: ir.Value) -> ir.Value:
    """The bfloat16 nearest to each float, ties to even, as int16."""
    builder, kind = emitter.builder, ir.VectorType(ir.IntType(16), _LANES)
    if MULTIPLIES_BF16:
        takes = ir.FunctionType(kind, [emitter.vector])
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return builder.call(cgutils.get_or_insert_function(builder.module, takes, name), [vector])
    return rounded_halves(emitter, vector)


def _pairs_of(emitter: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Words of two float vectors, both rounded."""
    first, second = halves(emitter, low), halves(emitter, high)
    turns = [lane // 2 + lane % 2 * _LANES for lane in range(_PANEL)]
    return emitter.builder.bitcast(emitter.shuffle(first, second, turns), WORDS)


@intrinsic
def _pair_rows(_, rows, a, width, out):  # type: ignore[no-untyped-def]
    """out[p, j] = (a[2 p, j], a[2 p + 1, j]), a panel's row for each p; zeros beyond rows, width.

    Of whole pairs of rows, and of one row that is left. a: (address, elements from row to row).
    """
    signature = types.void(types.int64, _INT64_2, types.int64, types.int64)

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter, (rows, matrix, width, out) = Emitter(builder, "float32"), args
        a, a_row = cgutils.unpack_tuple(builder, matrix)
        starts = [number(start) for start in range(0, _PANEL, _LANES)]
        masks = [emitter.below(builder.sub(width, start), _LANES) for start in starts]

        def write(pair: ir.Value, both: bool) -> None:
            row = emitter.at(a, builder.mul(builder.mul(pair, number(2)), a_row))
            target = emitter.at(out, builder.mul(pair, number(_PANEL)))
            for start, mask in zip(starts, masks, strict=True):
                low, high = emitter.load(emitter.at(row, start), mask), emitter.vector(None)
                if both:
                    high = emitter.load(emitter.at(row, a_row, start), mask)
                words = builder.bitcast(_pairs_of(emitter, low, high), emitter.vector)
                emitter.store(words, emitter.at(target, start))

        whole = builder.udiv(rows, number(2))
        with emitter.loop(whole) as pair:
            write(pair, both=True)
        odd = builder.icmp_signed("<", builder.mul(whole, number(2)), rows)
        with builder.if_then(odd):
            write(whole, both=False)
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def pair_columns(_, rows, a, width, out, step):  # type: ignore[no-untyped-def]
    """out[j, p] = (a[2 p, j], a[2 p + 1, j]) for the columns j < width, up to LANES of them.

    In whole vectors of pairs, with zeros beyond rows. a: (address, elements from row to row); step:
    words from row to row of out.
    """
    signature = types.void(types.int64, _INT64_2, types.int64, types.int64, types.int64)

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter, (rows, matrix, width, out, step) = Emitter(builder, "float32"), args
        a, a_row = cgutils.unpack_tuple(builder, matrix)

        def turn(block: ir.Value, left: ir.Value | None) -> None:
            """Of PANEL rows; `left` is how many of them there are, if not all."""
            row = builder.mul(block, number(_PANEL))
            loaded = []
            for index in map(number, range(_PANEL)):
                count = width
                if left is not None:
                    exists = builder.icmp_signed("<", index, left)
                    count = builder.select(exists, width, number(0))
                at = emitter.at(a, builder.mul(builder.add(row, index), a_row))
                loaded.append(emitter.load(at, emitter.below(count, _LANES)))
            pairs = zip(loaded[::2], loaded[1::2], strict=True)
            words = [builder.bitcast(_pairs_of(emitter, *pair), emitter.vector) for pair in pairs]
            target = emitter.at(out, builder.mul(block, number(_LANES)))
            for column, vector in enumerate(transposed(emitter, words)):
                with builder.if_then(builder.icmp_signed("<", number(column), width), likely=True):
                    emitter.store(vector, emitter.at(target, builder.mul(step, number(column))))

        whole = builder.udiv(rows, number(_PANEL))
        with emitter.loop(whole) as block:
            turn(block, None)
        left = builder.sub(rows, builder.mul(whole, number(_PANEL)))
        with builder.if_then(builder.icmp_signed(">", left, number(0))):
            turn(whole, left)
        return context.get_dummy_value()

    return signature, emit


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
        even, odd = (list(range(first, _PANEL, 2)) for first in range(2))
        blocks = builder.udiv(builder.add(inner, number(_PANEL - 1)), number(_PANEL))
        with cgutils.for_range(builder, blocks) as loop:
            first = builder.mul(loop.index, number(_PANEL))
            second = builder.add(first, number(_LANES))
            left, right = (rows_from(emitter, sources, at) for at in (first, second))
            rows = []
            for x, y in zip(left, right, strict=True):
                low, high = (emitter.shuffle(x, y, lanes) for lanes in (even, odd))
                rows.append(_pairs_of(emitter, low, high))
            start = builder.mul(loop.index, number(_LANES))
            for k, words in enumerate(transposed(emitter, rows)):
                target = emitter.at(out, builder.mul(builder.add(start, number(k)), number(_PANEL)))
                emitter.store(builder.bitcast(words, emitter.vector), target)
        return context.get_dummy_value()

    return signature, emit


@compiled
def _clear_block(panel: int, inner: int) -> None:
    """Zeros in the last block of pairs of a panel, unless numbers fill it."""
    if inner % (2 * PAIR_BLOCK) != 0:
        last = pair_words(inner) - PAIR_BLOCK
        copy(panel + last * _PANEL * 4, 0, 0, PAIR_BLOCK * _PANEL)


def pairs_transpose(args_at, task, running):  # type: ignore[no-untyped-def]
    """Packs W[g rows + u, k] as column g padded + u of pairs of k; the padding is zero.

    A task writes every tasks-th panel.
    """
    args = pack_args_at(args_at)
    gates, padded, inner = args.gates, args.padded, args.columns
    for first in range(task * _PANEL, gates * padded, args.tasks * _PANEL):
        sizes, matrix = (gates, args.rows, padded, inner), (args.matrix, inner)
        start = args.out + first * pair_words(inner) * 4
        _clear_block(start, inner)
        _transpose_pairs(first, sizes, matrix, start)
        _transpose_pairs(first + _LANES, sizes, matrix, start + _LANES * 4)


def pairs_pack(args_at, task, running):  # type: ignore[no-untyped-def]
    """Packs W[g rows + u, j] as column j of pairs of rows g padded + u; the padding is zero.

    A task writes every tasks-th panel. `padded` is even.
    """
    args = pack_args_at(args_at)
    rows, padded, columns = args.rows, args.padded, args.columns
    for first in range(task * _PANEL, columns, args.tasks * _PANEL):
        panel = args.out + first * pair_words(args.gates * padded) * 4
        _clear_block(panel, args.gates * padded)
        for gate in range(args.gates):
            out = panel + gate * (padded // 2) * _PANEL * 4
            if rows < padded:
                copy(out, 0, 0, padded // 2 * _PANEL)
            a = args.matrix + (gate * rows * columns + first) * 4
            _pair_rows(rows, (a, columns), min(columns - first, _PANEL), out)


def pairs_panels(begin, end, count, b_at, b_row, panels):  # type: ignore[no-untyped-def]
    """Packs the columns [begin, end) of B[count, columns]: panels of pairs of rows, for `outer`."""
    for first in range(begin, end, _PANEL):
        out = panels + first * pair_words(count) * 4
        _clear_block(out, count)
        _pair_rows(count, (b_at + first * 4, b_row), _PANEL, out)
