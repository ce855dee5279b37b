"""Products of bfloat16 pairs by AMX, the matrix instructions of some x86 processors; float32 sums.

One instruction (tdpbf16ps) adds 16 rows by 16 pairs times 16 pairs by 16 columns to 16 x 16 sums,
all in registers of 1 KiB, tiles: in a cycle 16 times as many products as two float32 instructions
make. A block here is up to two tiles of rows by the two tiles of columns that a panel of `pairs`
has. Rows and panels end with zeros that make their pairs a multiple of 16.

Source of the instructions, and of the configuration's layout: Intel 64 and IA-32 Architectures
Software Developer's Manual, volume 1, chapter 18.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from openrnn.kernels.cpu.bf16 import over_panels
from openrnn.kernels.cpu.layout import PACKED_STRIP, PAIR_BLOCK
from openrnn.kernels.cpu.pairs import kernels_of
from openrnn.kernels.cpu.vectors import Emitter, compiled, intrinsic, number

__all__ = ["pairs_outer", "pairs_product"]

_TILE = 16  # rows of a tile, and words of a row
_BLOCK = 2 * _TILE  # rows of a block, and words of a panel's row
_SUMS, _ROWS, _COLUMNS = (0, 1, 2, 3), (4, 5), (6, 7)  # tiles of C: by rows, then by columns; A; B

_INT64_2, _INT64_3 = (types.UniTuple(types.int64, count) for count in (2, 3))
_BYTE = ir.IntType(8)


def _call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


@intrinsic
def _configure(_, rows):  # type: ignore[no-untyped-def]
    """Tiles for blocks of so many rows, 1 to 32; others stay out of use."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        (rows,) = args
        made = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, 64))
        builder.store(made.type.pointee(None), made)

        def put(byte: int, value: ir.Value) -> None:
            at = builder.gep(made, [number(0), number(byte)])
            builder.store(value, builder.bitcast(at, value.type.as_pointer()), align=1)

        full = number(_TILE)
        upper = builder.select(builder.icmp_signed("<", rows, full), rows, full)
        heights = dict.fromkeys(_COLUMNS, full)
        for half, height in enumerate((upper, builder.sub(rows, upper))):
            heights |= dict.fromkeys((*_SUMS[2 * half : 2 * half + 2], _ROWS[half]), height)
        put(0, ir.Constant(_BYTE, 1))  # the palette of tiles of 16 rows of 64 bytes
        for tile, height in heights.items():
            used = builder.icmp_signed(">", height, number(0))
            width = builder.select(used, number(64), number(0))
            put(16 + 2 * tile, builder.trunc(width, ir.IntType(16)))
            put(48 + tile, builder.trunc(height, _BYTE))
        _call(builder, "ldtilecfg", builder.bitcast(made, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def _release(_):  # type: ignore[no-untyped-def]
    """The tiles are empty: the system need not save them with this thread's registers."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _block(_, shape, a, w, c, accumulate):  # type: ignore[no-untyped-def]
    """c[rows, panel] (+)= a[rows, pairs] w[pairs, panel], after `_configure` for these rows.

    shape: (rows, 1, blocks of 16 pairs); a, c: (address, words from row to row); w: (address, _).
    """
    signature = types.void(_INT64_3, *[_INT64_2] * 3, types.boolean)

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        shape, a, w, c, accumulate = args
        (rows, _, steps), a, (w, _), c = (
            cgutils.unpack_tuple(builder, each) for each in (shape, a, w, c)
        )
        emitter = Emitter(builder, "float32")

        def move(name: str, tile: int, at: ir.Value, row: ir.Value) -> None:
            """Between a tile and memory whose rows are so many words apart."""
            pointer = builder.bitcast(at, _BYTE.as_pointer())
            _call(builder, name, ir.Constant(_BYTE, tile), pointer, builder.mul(row, number(4)))

        def of_sums(name: str, halves: Sequence[int]) -> None:
            for half in halves:
                row = emitter.at(c[0], builder.mul(c[1], number(half * _TILE)))
                for column in range(2):
                    tile = _SUMS[2 * half + column]
                    if name == "tilezero":
                        _call(builder, name, ir.Constant(_BYTE, tile))
                    else:
                        move(name, tile, emitter.at(row, number(column * _TILE)), c[1])

        def emit_for(halves: Sequence[int]) -> None:
            with builder.if_else(accumulate) as (added, fresh):
                with added:
                    of_sums("tileloadd64", halves)
                with fresh:
                    of_sums("tilezero", halves)
            with emitter.loop(steps) as step:
                near = builder.mul(step, number(PAIR_BLOCK))
                for half in halves:
                    row = builder.mul(a[1], number(half * _TILE))
                    move("tileloadd64", _ROWS[half], emitter.at(a[0], row, near), a[1])
                panel = emitter.at(w, builder.mul(near, number(_BLOCK)))
                for column, tile in enumerate(_COLUMNS):
                    at = emitter.at(panel, number(column * _TILE))
                    move("tileloadd64", tile, at, number(_BLOCK))
                for half in halves:
                    for column, right in enumerate(_COLUMNS):
                        three = _SUMS[2 * half + column], _ROWS[half], right
                        _call(builder, "tdpbf16ps", *(ir.Constant(_BYTE, tile) for tile in three))
            of_sums("tilestored64", halves)

        with builder.if_else(builder.icmp_signed(">", rows, number(_TILE))) as (both, one):
            with both:
                emit_for((0, 1))
            with one:
                emit_for((0,))
        return context.get_dummy_value()

    return signature, emit


_over_panels = over_panels("amx", _block, (1,) * _BLOCK)


@compiled
def _over_blocks(shape, units, a, w, c, accumulate, backwards):  # type: ignore[no-untyped-def]
    """What `over_panels` makes: whole blocks of rows first, so that tiles are configured twice."""
    rows, pairs = shape
    blocks = (pairs + PAIR_BLOCK - 1) // PAIR_BLOCK
    whole = rows // _BLOCK * _BLOCK
    for begin, end in ((0, whole), (whole, rows)):
        if begin < end:
            _configure(min(_BLOCK, end - begin))
            _over_panels(
                (end - begin, blocks), units, (a[0] + begin * a[1] * 4, a[1]), w,
                (c[0] + begin * c[1] * 4, c[1]), accumulate, backwards,
            )  # fmt: skip
    _release()


pairs_product, pairs_outer = kernels_of(_over_blocks, PACKED_STRIP)
