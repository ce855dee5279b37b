"""Packs weight matrices for the products: panels of PANEL columns, [panels, inner, PANEL].

Addresses are int64; strides count elements.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from openrnn.kernels.cpu.memory import named
from openrnn.kernels.cpu.vectors import LANES, PANEL, SIZES, Emitter, compiled, intrinsic, number

__all__ = [
    "pack_plain_float32",
    "pack_plain_float64",
    "pack_transposed_float32",
    "pack_transposed_float64",
    "row_sources",
    "rows_from",
    "transposed",
]


def transposed(emitter: Emitter, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of a square of vectors: each round interleaves its upper with its lower half."""
    lanes = emitter.lanes
    order = [lane // 2 + lane % 2 * lanes for lane in range(2 * lanes)]
    for _ in range(lanes.bit_length() - 1):
        pairs = zip(rows[: lanes // 2], rows[lanes // 2 :], strict=True)
        halves = [(x, y, half) for x, y in pairs for half in (order[:lanes], order[lanes:])]
        rows = [emitter.shuffle(*each) for each in halves]
    return rows


def row_sources(
    emitter: Emitter, column: ir.Value, sizes: ir.Value, matrix: ir.Value
) -> list[tuple[ir.Value, ir.Value]]:
    """Where the weights of LANES columns lie, and how many there are: 0 in a column of padding.

    column: the first of them; sizes and matrix: as `_pack_rows` takes them.
    """
    builder = emitter.builder
    gates, rows_per_gate, padded_unit, inner = cgutils.unpack_tuple(builder, sizes)
    w, w_row = cgutils.unpack_tuple(builder, matrix)
    sources = []
    for lane in map(number, range(emitter.lanes)):
        index = builder.add(column, lane)
        gate, unit = builder.udiv(index, padded_unit), builder.urem(index, padded_unit)
        row = builder.add(builder.mul(gate, rows_per_gate), unit)
        unit_exists = builder.icmp_unsigned("<", unit, rows_per_gate)
        exists = builder.and_(unit_exists, builder.icmp_unsigned("<", gate, gates))
        count = builder.select(exists, inner, number(0))
        sources.append((emitter.at(w, builder.mul(row, w_row)), count))
    return sources


def rows_from(
    emitter: Emitter, sources: list[tuple[ir.Value, ir.Value]], first: ir.Value
) -> list[ir.Value]:
    """A vector of each of `row_sources`, from an element on; 0 beyond the last one."""
    return [
        emitter.load(
            emitter.at(source, first),
            emitter.below(emitter.builder.sub(count, first), emitter.lanes),
        )
        for source, count in sources
    ]


@intrinsic
def _pack_rows(_, dtype, column, sizes, w, out):  # type: ignore[no-untyped-def]
    """Writes out[k, 0:LANES], rows PANEL apart, for the columns from `column` on.

    sizes: (gates, rows_per_gate, padded_unit, inner); w: (address, elements from row to row).
    """
    four, two = (types.UniTuple(types.int64, count) for count in (4, 2))
    signature = types.void(dtype, types.int64, four, two, types.int64)

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter = Emitter(builder, dtype.literal_value)
        _, column, sizes, matrix, out = args
        lanes, inner = emitter.lanes, builder.extract_value(sizes, 3)
        sources = row_sources(emitter, column, sizes, matrix)
        blocks = builder.udiv(builder.add(inner, number(lanes - 1)), number(lanes))
        with cgutils.for_range(builder, blocks) as loop:
            first = builder.mul(loop.index, number(lanes))
            rows = rows_from(emitter, sources, first)
            for k, vector in enumerate(transposed(emitter, rows)):
                index = builder.add(first, number(k))
                with builder.if_then(builder.icmp_signed("<", index, inner), likely=True):
                    target = emitter.at(out, builder.mul(index, number(2 * lanes)))
                    emitter.store(vector, target)
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def _copy_rows(_, dtype, rows, columns, w, w_row, out):  # type: ignore[no-untyped-def]
    """Writes out[rows, PANEL]: the first `columns` of each row of w, then zeros."""
    signature = types.void(dtype, *[types.int64] * 5)

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter = Emitter(builder, dtype.literal_value)
        _, rows, columns, w, w_row, out = args
        lanes = emitter.lanes
        starts = [number(0), number(lanes)]
        masks = [emitter.below(builder.sub(columns, start), lanes) for start in starts]
        with cgutils.for_range(builder, rows) as loop:
            source = emitter.at(w, builder.mul(loop.index, w_row))
            target = emitter.at(out, builder.mul(loop.index, number(2 * lanes)))
            for start, mask in zip(starts, masks, strict=True):
                vector = emitter.load(emitter.at(source, start), mask)
                emitter.store(vector, emitter.at(target, start))
        return context.get_dummy_value()

    return signature, emit


def _make_pack_transposed(dtype: str) -> Any:
    size, lanes, panel = SIZES[dtype], LANES[dtype], PANEL[dtype]

    @compiled
    @named(dtype)
    def pack_transposed(  # type: ignore[no-untyped-def]
        w, rows_per_gate, gates, inner, w_row, out, padded_unit, task, tasks
    ):
        """Packs B[k, g padded_unit + u] = W[g rows_per_gate + u, k]; the padding is zero.

        W[j, k] lies at w + j w_row + k; out has gates padded_unit columns, rounded up to PANEL.
        A task writes every tasks-th panel.
        """
        for first in range(task * panel, gates * padded_unit, tasks * panel):
            for half in range(2):
                start = out + (first * inner + half * lanes) * size
                column = first + half * lanes
                sizes = (gates, rows_per_gate, padded_unit, inner)
                _pack_rows(dtype, column, sizes, (w, w_row), start)

    return pack_transposed


def _make_pack_plain(dtype: str) -> Any:
    size, panel = SIZES[dtype], PANEL[dtype]

    @compiled
    @named(dtype)
    def pack_plain(  # type: ignore[no-untyped-def]
        w, gates, rows_per_gate, padded_unit, columns, w_row, out, task, tasks
    ):
        """Packs B[g padded_unit + u, j] = W[g rows_per_gate + u, j]; the padding is zero.

        W[i, j] lies at w + i w_row + j; out has gates padded_unit rows and `columns` columns,
        rounded up to PANEL. A task writes every tasks-th panel.
        """
        for first in range(task * panel, columns, tasks * panel):
            width = min(columns - first, panel)
            for gate in range(gates):
                rows = w + (gate * rows_per_gate * w_row + first) * size
                start = out + (first * gates + gate * panel) * padded_unit * size
                padding = start + rows_per_gate * panel * size
                _copy_rows(dtype, rows_per_gate, width, rows, w_row, start)
                _copy_rows(dtype, padded_unit - rows_per_gate, 0, rows, w_row, padding)

    return pack_plain


pack_transposed_float32 = _make_pack_transposed("float32")
pack_transposed_float64 = _make_pack_transposed("float64")
pack_plain_float32, pack_plain_float64 = _make_pack_plain("float32"), _make_pack_plain("float64")
