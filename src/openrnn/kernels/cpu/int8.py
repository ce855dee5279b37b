"""Products of float32 rows with int8 weights, for the CPU kernels.

    C[i, j] (+)= a_scale[i] w_scale[j] sum over k of q[i, k] w[j, k]

w is int8. q is int16: row i of A over a_scale[i], rounded. Both are multiplied exactly, into int32,
so no result depends on the width of vectors, or on how threads split rows and units.

w lies in memory as [gates, panels, pairs, INT8_PANEL, 2]: of INT8_PANEL units two neighbouring k
each, as the instruction takes them that multiplies and adds pairs (pmaddwd of x86).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from openrnn.kernels.cpu.args import INT8_PANEL
from openrnn.kernels.cpu.host import FEATURES, REGISTERS, WIDTH
from openrnn.kernels.cpu.layout import INT8_ROWS
from openrnn.kernels.cpu.vectors import Emitter, compiled, intrinsic, number

__all__ = ["int8_product"]

LARGEST_SUM = 2**31 - 1
LARGEST_WEIGHT, LARGEST_INPUT = 127, 2**15 - 1
SMALLEST = 1e-33  # a row whose largest element is smaller is taken for zeros
NOT_FINITE = 0x7F800000  # the bits of float32 infinity; those of a nan are larger

_INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (16, 32, 64))
_LANES = WIDTH // 4  # int32 sums of a vector
_VECTORS = INT8_PANEL // _LANES  # of a panel's sums
_HEIGHT = 20 // _VECTORS if REGISTERS == 32 else 10 // _VECTORS  # rows of a tile

_INT64_2, _INT64_3 = (types.UniTuple(types.int64, count) for count in (2, 3))


def _pair_products(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x[2 n] y[2 n] + x[2 n + 1] y[2 n + 1] as int32, of vectors of int16."""
    name = {64: "avx512.pmaddw.d.512", 32: "avx2.pmadd.wd", 16: "sse2.pmadd.wd"}[WIDTH]
    needs = {64: "+avx512bw", 32: "+avx2", 16: "+sse2"}[WIDTH]
    sums = ir.VectorType(_INT32, _LANES)
    if needs in FEATURES.split(","):
        kind = ir.FunctionType(sums, [x.type, y.type])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
        return builder.call(function, [x, y])
    wide = ir.VectorType(_INT32, 2 * _LANES)
    products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    even, odd = (
        builder.shuffle_vector(
            products, products, ir.Constant(sums, list(range(first, 2 * _LANES, 2)))
        )
        for first in range(2)
    )
    return builder.add(even, odd)


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def _int8_tile(_, shape, q, w, scales, c, accumulate):  # type: ignore[no-untyped-def]
    """The product of this file for up to _HEIGHT rows and some vectors of units of one panel.

    shape: (rows, vectors, pairs); q: (address, bytes from row to row); w: the address of the first
    unit; scales: (address of those of the rows, of those of the units); c: (address, elements from
    row to row).
    """
    signature = types.void(
        _INT64_3, _INT64_2, types.int64, _INT64_2, _INT64_2, types.boolean
    )  # fmt: skip

    def emit_case(
        emitter: Emitter, height: int, vectors: int, pairs: ir.Value, args: list[ir.Value]
    ) -> None:
        builder = emitter.builder
        q, panel, scales, c, accumulate = args
        (q, q_row), (a_scales, w_scales), (c, c_row) = (
            cgutils.unpack_tuple(builder, pair) for pair in (q, scales, c)
        )
        total = ir.VectorType(_INT32, _LANES)
        bytes_, words = (ir.VectorType(ir.IntType(bits), 2 * _LANES) for bits in (8, 16))
        slots = [cgutils.alloca_once(builder, total) for _ in range(height * vectors)]
        for slot in slots:
            builder.store(total(None), slot)
        rows = [builder.add(q, builder.mul(q_row, number(row))) for row in range(height)]
        with cgutils.for_range(builder, pairs) as loop:
            start = builder.add(panel, builder.mul(loop.index, number(2 * INT8_PANEL)))
            weights = []
            for vector in range(vectors):
                address = builder.add(start, number(2 * _LANES * vector))
                found = builder.load(_pointer(builder, address, bytes_), align=1)
                weights.append(builder.sext(found, words))
            offset = builder.mul(loop.index, number(4))
            for row, at in enumerate(rows):
                pair = builder.load(_pointer(builder, builder.add(at, offset), _INT32), align=4)
                inputs = builder.bitcast(emitter.splat(pair, _LANES), words)
                for vector, weight in enumerate(weights):
                    slot = slots[row * vectors + vector]
                    found = _pair_products(builder, inputs, weight)
                    builder.store(builder.add(builder.load(slot), found), slot)
        for row in range(height):
            scale = builder.load(emitter.at(a_scales, number(row)), typ=emitter.scalar)
            for vector in range(vectors):
                first = number(_LANES * vector)
                value = builder.sitofp(builder.load(slots[row * vectors + vector]), emitter.vector)
                both = builder.fmul(
                    emitter.load(emitter.at(w_scales, first)), emitter.splat(scale, _LANES)
                )
                value = builder.fmul(value, both)
                pointer = emitter.at(c, builder.mul(c_row, number(row)), first)
                before = cgutils.alloca_once(builder, emitter.vector)
                builder.store(emitter.vector(None), before)
                with builder.if_then(accumulate):
                    builder.store(emitter.load(pointer), before)
                emitter.store(builder.fadd(value, builder.load(before)), pointer)

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter = Emitter(builder, "float32")
        shape, *others = args
        rows, vectors, pairs = cgutils.unpack_tuple(builder, shape)
        with emitter.cases(builder.add(builder.mul(rows, number(8)), vectors)) as case:
            for height in range(1, _HEIGHT + 1):
                for width in range(1, _VECTORS + 1):
                    case(8 * height + width)
                    emit_case(emitter, height, width, pairs, others)
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def _largest_bits(_, a, count):  # type: ignore[no-untyped-def]
    """The bits of the largest |a[j]|, j < count: as integers, so that a nan is larger than all."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter, (a, count) = Emitter(builder, "float32"), args
        kind = ir.VectorType(_INT32, _LANES)
        most = cgutils.alloca_once(builder, kind)
        builder.store(kind(None), most)
        positive = kind([0x7FFFFFFF] * _LANES)

        def look(offset: ir.Value, mask: ir.Value | None) -> None:
            bits = builder.bitcast(emitter.load(emitter.at(a, offset), mask), kind)
            bits, before = builder.and_(bits, positive), builder.load(most)
            larger = builder.icmp_signed(">", bits, before)
            builder.store(builder.select(larger, bits, before), most)

        emitter.whole_vectors(count, look)
        vector, width = builder.load(most), _LANES
        while width > 1:
            width //= 2
            low, high = (
                emitter.shuffle(vector, vector, range(first, first + width)) for first in (0, width)
            )
            vector = builder.select(builder.icmp_signed(">", low, high), low, high)
        found = builder.extract_element(vector, number(0, 32))
        return builder.zext(found, _INT64)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def _round_row(_, a, count, factor, q):  # type: ignore[no-untyped-def]
    """q[j] = a[j] * factor, rounded to the nearest int16, ties to even, for j < count.

    Up to the next whole vector q becomes 0.
    """

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        emitter, (a, count, factor, q) = Emitter(builder, "float32"), args
        factors = emitter.splat(factor, _LANES)
        kind = ir.FunctionType(emitter.vector, [emitter.vector])
        rint = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{_LANES}f32")
        whole, half = ir.VectorType(_INT32, _LANES), ir.VectorType(_INT16, _LANES)

        def look(offset: ir.Value, mask: ir.Value | None) -> None:
            value = builder.fmul(emitter.load(emitter.at(a, offset), mask), factors)
            value = builder.trunc(builder.fptosi(builder.call(rint, [value]), whole), half)
            address = builder.add(q, builder.mul(offset, number(2)))
            builder.store(value, _pointer(builder, address, half), align=2)

        emitter.whole_vectors(count, look)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), emit


@intrinsic
def _float_of(_, bits):  # type: ignore[no-untyped-def]
    """The float32 that has these bits."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        return builder.bitcast(builder.trunc(args[0], _INT32), ir.FloatType())

    return types.float32(types.int64), emit


@intrinsic
def _store_float(_, address, value):  # type: ignore[no-untyped-def]
    """Writes one float32."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
        builder.store(args[1], _pointer(builder, args[0], ir.FloatType()))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


@compiled
def _round_rows(rows, inner, q_row, a, q_at, scales_at):  # type: ignore
    """Rows of A as int16, `q_row` bytes apart, and the scale of each."""
    a_at, a_row = a
    level = min(LARGEST_INPUT, LARGEST_SUM // (LARGEST_WEIGHT * inner))
    for i in range(rows):
        row, scale, factor = a_at + i * a_row * 4, 0.0, 0.0
        bits = _largest_bits(row, inner)
        largest = _float_of(bits)
        if bits >= NOT_FINITE:
            scale = float("nan")  # and so are all products with this row
        elif largest >= SMALLEST:
            scale, factor = largest / level, level / largest
        _round_row(row, inner if factor > 0 else 0, factor, q_at + i * q_row)
        _store_float(scales_at + 4 * i, scale)


def int8_product(  # type: ignore[no-untyped-def]
    rows, inner, gates, units, padded, first, end, a_at, a_row, w, scales, c_at, c_row, accumulate,
    memory, backwards,
):  # fmt: skip
    """C[i, g padded + u] (+)= A[i, :] . W[g, u, :], for the units [first, end) of every gate g.

    A kernel of its own, which time loops call by address: those without int8 weights lack it.

    Args:
        rows, inner: of A. Strides `a_row` and `c_row` count elements.
        units, padded: the units of a gate in W and in C; first and end: whole vectors of C.
        w: W as this file says; scales: float32 [gates, panels, INT8_PANEL].
        memory: of this thread: float32 [INT8_ROWS], then rounded rows.
        backwards: from the last gate to the first, with the same results.
    """
    pairs, panels = (inner + 1) // 2, (units + INT8_PANEL - 1) // INT8_PANEL
    q_row = (inner + INT8_PANEL - 1) // INT8_PANEL * INT8_PANEL * 2
    q_at = memory + 4 * INT8_ROWS
    for start in range(0, rows, INT8_ROWS):
        some = min(INT8_ROWS, rows - start)
        a_rows = (a_at + start * a_row * 4, a_row)
        _round_rows(some, inner, q_row, a_rows, q_at, memory)  # type: ignore[no-untyped-call]
        blocks = (some + _HEIGHT - 1) // _HEIGHT
        for turn in range(gates):
            gate, unit = gates - 1 - turn if backwards != 0 else turn, first
            while unit < min(end, units):
                # narrow vectors: a thread's units may begin within a panel
                panel, index = gate * panels + unit // INT8_PANEL, unit % INT8_PANEL
                vectors = min(INT8_PANEL - index, end - unit) // _LANES
                row = 0
                for block in range(blocks):
                    height = (some - row) // (blocks - block)
                    _int8_tile(
                        (height, vectors, pairs), (q_at + row * q_row, q_row),
                        w + panel * pairs * 2 * INT8_PANEL + 2 * index,
                        (memory + 4 * row, scales + 4 * (panel * INT8_PANEL + index)),
                        (c_at + ((start + row) * c_row + gate * padded + unit) * 4, c_row),
                        accumulate != 0,
                    )  # fmt: skip
                    row += height
                unit += vectors * _LANES
