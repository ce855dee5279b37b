"""Matrix products for the CPU kernels: register tiles in LLVM vectors, called from compiled loops.

Addresses are int64, strides count elements. An element of c is summed in the same order in whatever
tile it falls, so no result depends on how threads split the rows, the columns or the units.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = llvmlite.binding.get_host_cpu_features()
_BYTES = 64 if _FEATURES.get("avx512f") else 32 if _FEATURES.get("avx2") else 16

SIZES = {"float32": 4, "float64": 8}  # bytes
LANES = {dtype: _BYTES // size for dtype, size in SIZES.items()}
PANEL = {dtype: 2 * lanes for dtype, lanes in LANES.items()}

# How wide a tile of 1, 2, .. rows is, in panels for `product`, in units for `dots`: with more than
# 20 sums in 32 vector registers, or 12 in 16, a tile would spill.
_PANELS = (4, 4, 2, 2, 1, 1, 1, 1, 1, 1) if _BYTES == 64 else (4, 2, 1, 1, 1, 1)
_UNITS = (8, 8, 4, 4, 4) if _BYTES == 64 else (8, 4, 4)

_SCALARS = {"float32": ir.FloatType(), "float64": ir.DoubleType()}


def number(value: int, bits: int = 64) -> ir.Constant:
    return ir.Constant(ir.IntType(bits), value)


class Emitter:
    """Writes the vector instructions of one dtype into the body of an intrinsic."""

    def __init__(self, builder: ir.IRBuilder, dtype: str) -> None:
        self.builder = builder
        self.scalar = _SCALARS[dtype]
        self.size = SIZES[dtype]
        self.lanes = LANES[dtype]
        self.vector = ir.VectorType(self.scalar, self.lanes)

    def at(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        """The pointer that lies the sum of `offsets`, in elements, after an address or pointer."""
        if base.type == ir.IntType(64):
            base = self.builder.inttoptr(base, self.scalar.as_pointer())
        for offset in offsets:
            base = self.builder.gep(base, [offset], source_etype=self.scalar)
        return base

    def load(self, pointer: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """The vector at `pointer`; where `mask` is false nothing is read and the lane is 0."""
        vector = self.vector if mask is None else ir.VectorType(self.scalar, mask.type.count)
        pointer = self.builder.bitcast(pointer, vector.as_pointer())
        if mask is None:
            return self.builder.load(pointer, align=self.size)
        align = number(self.size, 32)
        return self._call("masked.load", ".p0", vector, pointer, align, mask, vector(None))

    def store(self, value: ir.Value, pointer: ir.Value, mask: ir.Value | None = None) -> None:
        pointer = self.builder.bitcast(pointer, value.type.as_pointer())
        if mask is None:
            self.builder.store(value, pointer, align=self.size)
        else:
            align = number(self.size, 32)
            self._call("masked.store", ".p0", ir.VoidType(), value, pointer, align, mask)

    def multiply_add(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z, fused where the machine can."""
        return self._call("fmuladd", "", x.type, x, y, z)

    def splat(self, value: ir.Value, lanes: int) -> ir.Value:
        first = ir.VectorType(value.type, lanes)(ir.Undefined)
        first = self.builder.insert_element(first, value, number(0, 32))
        return self.shuffle(first, first, [0] * lanes)

    def shuffle(self, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
        return self.builder.shuffle_vector(x, y, mask)

    def below(self, count: ir.Value, lanes: int) -> ir.Value:
        """The mask of `lanes` lanes of which the first `count` are true."""
        limits = self.splat(self.builder.trunc(count, ir.IntType(32)), lanes)
        return self.builder.icmp_signed("<", limits.type(list(range(lanes))), limits)

    def zeros(self, count: int) -> list[ir.Value]:
        """Stack slots of zero vectors; LLVM turns them into registers."""
        slots = [cgutils.alloca_once(self.builder, self.vector) for _ in range(count)]
        for slot in slots:
            self.builder.store(self.vector(None), slot)
        return slots

    def add_product(self, slot: ir.Value, x: ir.Value, y: ir.Value) -> None:
        self.builder.store(self.multiply_add(x, y, self.builder.load(slot)), slot)

    def lane_sums(self, vectors: list[ir.Value]) -> ir.Value:
        """The vector of the sums over the lanes of each of `vectors`, whose number is 2**n.

        Each addition meets lanes half a group apart, for any number of vectors, so that number does
        not change the order of the additions.
        """
        group = self.lanes  # neighbours that still belong to one sum
        while group > 1 or len(vectors) > 1:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=False)) or [vectors * 2]
            width = vectors[0].type.count * min(2, len(vectors))
            low = [lane for lane in range(width) if lane % group < (group + 1) // 2]
            high = [lane + group // 2 for lane in low]
            vectors = [self.shuffle(x, y, low) for x, y in pairs]
            if group > 1:
                halves = [self.shuffle(x, y, high) for x, y in pairs]
                vectors = [self.builder.fadd(x, y) for x, y in zip(vectors, halves, strict=True)]
                group //= 2
        return vectors[0]

    @contextmanager
    def cases(self, value: ir.Value) -> Iterator[Callable[[int], None]]:
        """Inside, `case(n)` starts the code for `value` n; other values do nothing."""
        end = self.builder.append_basic_block("end")
        switch = self.builder.switch(value, end)

        def case(n: int) -> None:
            if not self.builder.block.is_terminated:
                self.builder.branch(end)
            block = self.builder.append_basic_block("case")
            switch.add_case(number(n), block)
            self.builder.position_at_end(block)

        yield case
        self.builder.branch(end)
        self.builder.position_at_end(end)

    def _call(self, name: str, suffix: str, returned: ir.Type, *args: ir.Value) -> ir.Value:
        vector = args[0].type if isinstance(args[0].type, ir.VectorType) else returned
        letter = "f" if isinstance(vector.element, (ir.FloatType, ir.DoubleType)) else "i"
        kind = f"v{vector.count}{letter}{8 * self.size}"
        declared = ir.FunctionType(returned, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(
            self.builder.module, declared, f"llvm.{name}.{kind}{suffix}"
        )
        return self.builder.call(function, args)


@intrinsic(prefer_literal=True)
def _product_tile(
    _, dtype, rows, panels, inner, a, a_row, a_inner, b, b_inner, b_panel, c, c_row, accumulate
):
    """c[rows, panels * PANEL] (+)= a[rows, inner] b[inner, panels * PANEL], for rows in _PANELS."""
    signature = types.void(dtype, *[types.int64] * 11, types.boolean)

    def emit_case(emitter, height, width, args):
        inner, a, a_row, a_inner, b, b_inner, b_panel, c, c_row, accumulate = args
        builder = emitter.builder
        columns = [(panel, half) for panel in range(width) for half in range(2)]
        sums = [emitter.zeros(len(columns)) for _ in range(height)]
        a_rows = [emitter.at(a, builder.mul(a_row, number(row))) for row in range(height)]
        b_panels = [emitter.at(b, builder.mul(b_panel, number(panel))) for panel in range(width)]
        with cgutils.for_range(builder, inner) as loop:
            a_offset = builder.mul(loop.index, a_inner)
            b_offset = builder.mul(loop.index, b_inner)
            b_vectors = [
                emitter.load(emitter.at(b_panels[panel], b_offset, number(half * emitter.lanes)))
                for panel, half in columns
            ]
            for row in range(height):
                value = builder.load(emitter.at(a_rows[row], a_offset), typ=emitter.scalar)
                value = emitter.splat(value, emitter.lanes)
                for slot, vector in zip(sums[row], b_vectors, strict=True):
                    emitter.add_product(slot, value, vector)
        for row in range(height):
            start = emitter.at(c, builder.mul(c_row, number(row)))
            for column, slot in enumerate(sums[row]):
                pointer = emitter.at(start, number(column * emitter.lanes))
                with builder.if_then(accumulate):
                    total = builder.fadd(emitter.load(pointer), builder.load(slot))
                    builder.store(total, slot)
                emitter.store(builder.load(slot), pointer)

    def emit(context, builder, _, args):
        emitter = Emitter(builder, dtype.literal_value)
        _, rows, panels, *others = args
        with emitter.cases(builder.add(builder.mul(rows, number(8)), panels)) as case:
            for height, most in enumerate(_PANELS, 1):
                for width in range(1, most + 1):
                    case(height * 8 + width)
                    emit_case(emitter, height, width, others)
        return context.get_dummy_value()

    return signature, emit


@intrinsic(prefer_literal=True)
def _dots_tile(_, dtype, rows, units, inner, a, a_row, w, w_row, c, c_row, accumulate):
    """c[rows, units] (+)= a[rows, inner] w[units, inner]^T, for rows and units up to _UNITS."""
    signature = types.void(dtype, *[types.int64] * 9, types.boolean)

    def emit_case(emitter, height, width, args):
        units, inner, a, a_row, w, w_row, c, c_row, accumulate = args
        builder = emitter.builder
        lanes = number(emitter.lanes)
        sums = [emitter.zeros(width) for _ in range(height)]
        a_rows = [emitter.at(a, builder.mul(a_row, number(row))) for row in range(height)]
        # Beyond the last unit the last one is read again, and its sum is not stored.
        last = builder.sub(units, number(1))
        w_rows = []
        for unit in map(number, range(width)):
            read = builder.select(builder.icmp_signed("<", unit, last), unit, last)
            w_rows.append(emitter.at(w, builder.mul(w_row, read)))

        def add_lanes(offset, mask):
            values = [emitter.load(emitter.at(start, offset), mask) for start in a_rows]
            for unit, start in enumerate(w_rows):
                weights = emitter.load(emitter.at(start, offset), mask)
                for row, value in enumerate(values):
                    emitter.add_product(sums[row][unit], value, weights)

        with cgutils.for_range(builder, builder.udiv(inner, lanes)) as loop:
            add_lanes(builder.mul(loop.index, lanes), None)
        tail = builder.urem(inner, lanes)
        with builder.if_then(builder.icmp_signed(">", tail, number(0))):
            add_lanes(builder.sub(inner, tail), emitter.below(tail, emitter.lanes))

        stored = emitter.below(units, width)
        added = builder.and_(stored, emitter.splat(accumulate, width))
        for row in range(height):
            total = emitter.lane_sums([builder.load(slot) for slot in sums[row]])
            pointer = emitter.at(c, builder.mul(c_row, number(row)))
            emitter.store(builder.fadd(total, emitter.load(pointer, added)), pointer, stored)

    def emit(context, builder, _, args):
        emitter = Emitter(builder, dtype.literal_value)
        _, rows, *others = args
        with emitter.cases(rows) as case:
            for height, width in enumerate(_UNITS, 1):
                case(height)
                emit_case(emitter, height, width, others)
        return context.get_dummy_value()

    return signature, emit


def _make_product(dtype):
    size, panel, widths = SIZES[dtype], PANEL[dtype], _PANELS
    highest = len(widths)

    @njit(nogil=True, cache=True, error_model="numpy")
    def product(
        rows, inner, columns, a, a_row, a_inner, b, b_inner, b_panel, c, c_row, accumulate
    ):
        """c[i, j] (+)= sum over k of A[i, k] B[k, j], for i < rows, k < inner, j < columns.

        A[i, k] lies at a + i a_row + k a_inner, B[k, p PANEL + v] at b + p b_panel + k b_inner + v,
        c[i, j] at c + i c_row + j; columns is a multiple of PANEL.
        """
        blocks = (rows + highest - 1) // highest
        panels = columns // panel
        done = 0
        while done < panels:
            width = min(widths[min(rows, highest) - 1], panels - done)
            row = 0
            for block in range(blocks):
                height = (rows - row) // (blocks - block)
                _product_tile(
                    dtype, height, width, inner,
                    a + row * a_row * size, a_row, a_inner,
                    b + done * b_panel * size, b_inner, b_panel,
                    c + (row * c_row + done * panel) * size, c_row, accumulate,
                )  # fmt: skip
                row += height
            done += width

    return product


def _make_dots(dtype):
    size, widths = SIZES[dtype], _UNITS
    highest = len(widths)

    @njit(nogil=True, cache=True, error_model="numpy")
    def dots(
        rows, inner, gates, units, a, a_row, w, w_row, c, c_row, padded_unit, accumulate,
        unit_from, unit_to,
    ):  # fmt: skip
        """c[i, g padded_unit + u] (+)= A[i, :] . W[g units + u, :], for unit_from <= u < unit_to.

        For few rows, where packing W would not pay. A[i, k] lies at a + i a_row + k, W[j, k] at
        w + j w_row + k, c[i, j] at c + i c_row + j.
        """
        blocks = (rows + highest - 1) // highest
        most = widths[min(rows, highest) - 1]
        for gate in range(gates):
            unit = unit_from
            while unit < unit_to:
                width = min(most, unit_to - unit)
                row = 0
                for block in range(blocks):
                    height = (rows - row) // (blocks - block)
                    _dots_tile(
                        dtype, height, width, inner,
                        a + row * a_row * size, a_row,
                        w + (gate * units + unit) * w_row * size, w_row,
                        c + (row * c_row + gate * padded_unit + unit) * size, c_row, accumulate,
                    )  # fmt: skip
                    row += height
                unit += width

    return dots


product_float32, product_float64 = _make_product("float32"), _make_product("float64")
dots_float32, dots_float64 = _make_dots("float32"), _make_dots("float64")
