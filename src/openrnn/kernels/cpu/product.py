"""Matrix products for the CPU kernels: register tiles in LLVM vectors, called from compiled loops.

Addresses are int64; strides count elements. An element of C is summed in the same order in every
kind of tile, so no result depends on how threads split the rows, the columns or the units.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from openrnn.kernels.cpu.memory import named
from openrnn.kernels.cpu.vectors import (
    LANES,
    PANEL,
    REGISTERS,
    SIZES,
    Emitter,
    compiled,
    intrinsic,
    number,
)

__all__ = [
    "HIGHEST", "LANES", "PANEL", "TILE_PANELS", "ElementType", "dots_float32", "dots_float64",
    "make_dots", "make_product", "of_each_tile", "prefetch_rows", "product_float32",
    "product_float64", "store_sums",
]  # fmt: skip

# The widths of tiles of 1, 2, .. rows: in panels for `product`, in units for `dots`. With more than
# 24 sums in 32 vector registers, or 12 in 16, a tile would spill registers, or nearly.
TILE_PANELS = (4, 4, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1) if REGISTERS == 32 else (4, 2, 1, 1, 1, 1)
_UNITS = (8, 8, 4, 4, 4) if REGISTERS == 32 else (8, 4, 4)

HIGHEST = len(TILE_PANELS)  # rows of a tile of `product`

# Rows of B that a tile asks for before those that it multiplies: with AVX-512 4 KiB of each panel.
# The processor's own prefetching ends at each page and leaves a tile waiting for the caches that
# cores share. Tiles of one and two rows have little to do for each line, and gain nothing.
AHEAD, LEAST_AHEAD = 32, 3
LINE = 64  # bytes

_INT64_2, _INT64_3 = (types.UniTuple(types.int64, count) for count in (2, 3))


EmitTile = Callable[[Emitter, int, int, ir.Value, list[ir.Value]], None]


def of_each_tile(
    emitter: Emitter, shape: ir.Value, args: list[ir.Value], emit_tile: EmitTile
) -> None:
    """Emits the code of every tile of TILE_PANELS, and the choice among them by the shape.

    shape: (rows, panels, inner); emit_tile takes rows and panels as numbers, then inner and args.
    """
    builder = emitter.builder
    rows, panels, inner = cgutils.unpack_tuple(builder, shape)
    with emitter.cases(builder.add(builder.mul(rows, number(8)), panels)) as case:
        for height, most in enumerate(TILE_PANELS, 1):
            for width in range(1, most + 1):
                case(height * 8 + width)
                emit_tile(emitter, height, width, inner, args)


def prefetch_rows(emitter: Emitter, rows: list[ir.Value], size: int) -> None:
    """Asks for the rows of panels that begin at these pointers, `size` bytes each."""
    byte = ir.IntType(8)
    for row in rows:
        start = emitter.builder.bitcast(row, byte.as_pointer())
        for line in range(0, size, LINE):
            emitter.prefetch(emitter.builder.gep(start, [number(line)], source_etype=byte))


def store_sums(
    emitter: Emitter, sums: list[list[ir.Value]], c: ir.Value, c_row: ir.Value,
    accumulate: ir.Value,
) -> None:  # fmt: skip
    """Writes the sums of a tile, a list of vectors for each row, to C, or adds them to it."""
    builder = emitter.builder
    for row, slots in enumerate(sums):
        start = emitter.at(c, builder.mul(c_row, number(row)))
        for column, slot in enumerate(slots):
            pointer = emitter.at(start, number(column * emitter.lanes))
            with builder.if_then(accumulate):
                total = builder.fadd(emitter.load(pointer), builder.load(slot))
                builder.store(total, slot)
            emitter.store(builder.load(slot), pointer)


class ElementType(NamedTuple):
    """The type of a matrix's elements in memory: how addresses and loads of it are emitted.

    Attributes:
        size: bytes of an element.
        at: as `Emitter.at`; load: as `Emitter.load`.
    """

    size: int
    at: Callable[..., ir.Value]
    load: Callable[..., ir.Value]


def _product_tile_of(element: ElementType) -> Any:
    """An intrinsic that makes a tile of `product`."""

    def emit_case(
        emitter: Emitter, height: int, width: int, inner: ir.Value, args: list[ir.Value]
    ) -> None:
        builder = emitter.builder
        *matrices, accumulate = args
        (a, a_row, a_inner), (b, b_inner, b_panel), (c, c_row) = (
            cgutils.unpack_tuple(builder, matrix) for matrix in matrices
        )
        columns = [(panel, half) for panel in range(width) for half in range(2)]
        sums = [emitter.zeros(len(columns)) for _ in range(height)]
        a_rows = [emitter.at(a, builder.mul(a_row, number(row))) for row in range(height)]
        panels = [builder.mul(b_panel, number(panel)) for panel in range(width)]
        b_panels = [element.at(emitter, b, offset) for offset in panels]
        with emitter.loop(inner) as k:
            a_offset = builder.mul(k, a_inner)
            b_offset = builder.mul(k, b_inner)
            rows = [element.at(emitter, panel, b_offset) for panel in b_panels]
            b_vectors = []
            for panel, half in columns:
                pointer = element.at(emitter, rows[panel], number(half * emitter.lanes))
                b_vectors.append(element.load(emitter, pointer))
            if height >= LEAST_AHEAD:
                ahead = builder.mul(number(AHEAD), b_inner)
                later = [element.at(emitter, row, ahead) for row in rows]
                prefetch_rows(emitter, later, 2 * emitter.lanes * element.size)
            for row in range(height):
                value = builder.load(emitter.at(a_rows[row], a_offset), typ=emitter.scalar)
                value = emitter.splat(value, emitter.lanes)
                for slot, vector in zip(sums[row], b_vectors, strict=True):
                    emitter.add_product(slot, value, vector)
        store_sums(emitter, sums, c, c_row, accumulate)

    @intrinsic
    def product_tile(_, dtype, shape, a, b, c, accumulate):  # type: ignore[no-untyped-def]
        """c[rows, panels * PANEL] (+)= a[rows, inner] b[inner, panels * PANEL], of TILE_PANELS.

        shape: (rows, panels, inner); a, b and c as `product` takes them.
        """
        signature = types.void(dtype, _INT64_3, _INT64_3, _INT64_3, _INT64_2, types.boolean)

        def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
            emitter = Emitter(builder, dtype.literal_value)
            _, shape, *others = args
            of_each_tile(emitter, shape, others, emit_case)
            return context.get_dummy_value()

        return signature, emit

    return product_tile


def _dots_tile_of(element: ElementType) -> Any:
    """An intrinsic that makes a tile of `dots`."""

    def emit_case(
        emitter: Emitter, height: int, width: int, sizes: list[ir.Value], args: list[ir.Value]
    ) -> None:
        builder = emitter.builder
        units, inner = sizes
        *matrices, accumulate = args
        (a, a_row), (w, w_row), (c, c_row) = (
            cgutils.unpack_tuple(builder, matrix) for matrix in matrices
        )
        lanes = number(emitter.lanes)
        sums = [emitter.zeros(width) for _ in range(height)]
        a_rows = [emitter.at(a, builder.mul(a_row, number(row))) for row in range(height)]
        # Beyond the last unit the last one is read again, and its sum is not stored.
        last = builder.sub(units, number(1))
        w_rows = []
        for unit in map(number, range(width)):
            read = builder.select(builder.icmp_signed("<", unit, last), unit, last)
            w_rows.append(element.at(emitter, w, builder.mul(w_row, read)))

        def add_lanes(offset: ir.Value, mask: ir.Value | None) -> None:
            values = [emitter.load(emitter.at(start, offset), mask) for start in a_rows]
            for unit, start in enumerate(w_rows):
                weights = element.load(emitter, element.at(emitter, start, offset), mask)
                for row, value in enumerate(values):
                    emitter.add_product(sums[row][unit], value, weights)

        with emitter.loop(builder.udiv(inner, lanes)) as block:
            add_lanes(builder.mul(block, lanes), None)
        tail = builder.urem(inner, lanes)
        with builder.if_then(builder.icmp_signed(">", tail, number(0))):
            add_lanes(builder.sub(inner, tail), emitter.below(tail, emitter.lanes))

        stored = emitter.below(units, width)
        added = builder.and_(stored, emitter.splat(accumulate, width))
        for row in range(height):
            total = emitter.lane_sums([builder.load(slot) for slot in sums[row]])
            pointer = emitter.at(c, builder.mul(c_row, number(row)))
            emitter.store(builder.fadd(total, emitter.load(pointer, added)), pointer, stored)

    @intrinsic
    def dots_tile(_, dtype, shape, a, w, c, accumulate):  # type: ignore[no-untyped-def]
        """c[rows, units] (+)= a[rows, inner] w[units, inner]^T, for rows and units up to _UNITS.

        shape: (rows, units, inner); a, w and c: (address, elements from row to row).
        """
        signature = types.void(dtype, _INT64_3, *[_INT64_2] * 3, types.boolean)

        def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
            emitter = Emitter(builder, dtype.literal_value)
            _, shape, *others = args
            rows, *sizes = cgutils.unpack_tuple(builder, shape)
            with emitter.cases(rows) as case:
                for height, width in enumerate(_UNITS, 1):
                    case(height)
                    emit_case(emitter, height, width, sizes, others)
            return context.get_dummy_value()

        return signature, emit

    return dots_tile


def make_product(dtype: str, name: str, element: ElementType) -> Any:
    """`product` for sums of a dtype and an `element` type of B, which `name` tells from others."""
    size, b_size, panel, widths = SIZES[dtype], element.size, PANEL[dtype], TILE_PANELS
    highest, product_tile = HIGHEST, _product_tile_of(element)

    @compiled
    @named(name)
    def product(shape, a, b, c, accumulate, backwards):  # type: ignore[no-untyped-def]
        """C[i, j] (+)= sum over k of A[i, k] B[k, j], for i < rows, k < inner, j < columns.

        Args:
            shape: (rows, inner, columns); columns is a multiple of PANEL.
            a: (address, a_row, a_inner); A[i, k] lies at address + i a_row + k a_inner.
            b: (address, b_inner, b_panel); B[k, p PANEL + v] lies at
                address + p b_panel + k b_inner + v.
            c: (address, c_row); C[i, j] lies at address + i c_row + j.
            backwards: from the last panels to the first, with the same results.
        """
        rows, inner, columns = shape
        a_at, a_row, a_inner = a
        b_at, b_inner, b_panel = b
        c_at, c_row = c
        blocks = (rows + highest - 1) // highest
        panels = columns // panel
        most = widths[min(rows, highest) - 1]
        tiles = (panels + most - 1) // most
        for tile in range(tiles):
            done = (tiles - 1 - tile if backwards else tile) * most
            width = min(most, panels - done)
            row = 0
            for block in range(blocks):
                height = (rows - row) // (blocks - block)
                product_tile(
                    dtype, (height, width, inner),
                    (a_at + row * a_row * size, a_row, a_inner),
                    (b_at + done * b_panel * b_size, b_inner, b_panel),
                    (c_at + (row * c_row + done * panel) * size, c_row), accumulate,
                )  # fmt: skip
                row += height

    return product


def make_dots(dtype: str, name: str, element: ElementType) -> Any:
    """`dots` for sums of a dtype and an `element` type of W, which `name` tells from others."""
    size, w_size, widths, dots_tile = SIZES[dtype], element.size, _UNITS, _dots_tile_of(element)
    highest = len(widths)

    @compiled
    @named(name)
    def dots(shape, sizes, wanted, a, w, c, accumulate, backwards):  # type: ignore[no-untyped-def]
        """C[i, g padded + u] (+)= A[i, :] . W[g units + u, :], for some units u of every gate g.

        For few rows, where packing W would not pay.

        Args:
            shape: (rows, inner).
            sizes: (gates, units, padded): the gates, the units of a gate in W and in C.
            wanted: (first unit, end).
            a, w, c: (address, elements from row to row) of each matrix.
            backwards: from the last units of the last gate to the first, with the same results.
        """
        rows, inner = shape
        gates, units, padded = sizes
        first, end = wanted
        a_at, a_row = a
        w_at, w_row = w
        c_at, c_row = c
        blocks = (rows + highest - 1) // highest
        most = widths[min(rows, highest) - 1]
        tiles = (end - first + most - 1) // most
        for turn in range(gates):
            gate = gates - 1 - turn if backwards else turn
            for tile in range(tiles):
                unit = first + (tiles - 1 - tile if backwards else tile) * most
                width = min(most, end - unit)
                row = 0
                for block in range(blocks):
                    height = (rows - row) // (blocks - block)
                    dots_tile(
                        dtype, (height, width, inner),
                        (a_at + row * a_row * size, a_row),
                        (w_at + (gate * units + unit) * w_row * w_size, w_row),
                        (c_at + (row * c_row + gate * padded + unit) * size, c_row), accumulate,
                    )  # fmt: skip
                    row += height

    return dots


_FULL_PRECISION = [
    (dtype, dtype, ElementType(SIZES[dtype], Emitter.at, Emitter.load)) for dtype in SIZES
]
product_float32, product_float64 = (make_product(*of) for of in _FULL_PRECISION)
dots_float32, dots_float64 = (make_dots(*of) for of in _FULL_PRECISION)
