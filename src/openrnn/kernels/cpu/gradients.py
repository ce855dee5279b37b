"""Products of backward: with gate matrices, and over the rows of a chunk, for weight gradients.

Kernels for pairs of bfloat16 are called by their addresses; see `pairs`.
"""

from numba import int64, njit

from openrnn.kernels.cpu import product as products
from openrnn.kernels.cpu import rows
from openrnn.kernels.cpu.layout import (
    NEAR_BYTES,
    PACKED_STRIP,
    PANELS_TO_PACK,
    STORE_16BIT_ROWS,
    STRIP_ELEMENTS,
    STRIP_ROWS,
)
from openrnn.kernels.cpu.memory import named
from openrnn.kernels.cpu.regions import call
from openrnn.kernels.cpu.team import barrier, part_of
from openrnn.kernels.cpu.vectors import PANEL, SIZES

PAIRS_PANEL = PANEL["float32"]


@njit(nogil=True, error_model="numpy")
def pairs_products(args, team, phase, wanted, count, a, b, memory, c, accumulate):
    """`packed_product` with two matrices b, into two c, of bfloat16 pairs: a is packed once.

    After a barrier: others may have read panels of other matrices. Returns its next phase. A second
    b of no columns stands for none.
    """
    begin, end = wanted
    panels, strip = memory
    second = panels + rows.pair_words(count) * b[0][1] * 4
    for (at, columns), out in ((b[0], panels), (b[1], second)):
        mine, last = part_of(columns, PAIRS_PANEL, team)
        packing = (mine, last, count, at, columns, out)
        call(args.pairs_panels, packing)  # type: ignore[call-arg]  # numba's
    phase = barrier(team, phase)
    given = (
        begin, end, count, a[0], a[1], panels, b[0][1], strip, c[0], int64(accumulate), second,
        b[1][1], c[1],
    )  # fmt: skip
    call(args.pairs_outer, given)  # type: ignore[call-arg]  # numba's
    return phase


def _outer_for(dtype):
    size, panel, product = SIZES[dtype], PANEL[dtype], getattr(products, f"product_{dtype}")

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def outer_product(wanted, count, a, b, c, accumulate):
        """c[rows, columns] (+)= a[count, rows] transposed times b[count, columns].

        Of the rows [begin, end) = wanted; a and b are (address, elements from row to row).
        """
        begin, end = wanted
        a_at, a_row = a
        b_at, columns = b
        # so many columns of a that they stay in the second-level cache while b passes
        strip = max(STRIP_ROWS, STRIP_ELEMENTS // count)
        for first in range(begin, end, strip):
            product(
                (min(strip, end - first), count, columns),
                (a_at + first * size, 1, a_row),
                (b_at, columns, panel),
                (c + first * columns * size, columns),
                accumulate,
                False,
            )

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def outer_product_16bit(args, wanted, count, a, b, c, memory):
        """`outer_product` whose result is stored in 16 bits.

        memory: for STORE_16BIT_ROWS of its rows in float32, which are rounded while they are near.
        """
        begin, end = wanted
        a_at, a_row = a
        columns = b[1]
        for first in range(begin, end, STORE_16BIT_ROWS):
            some = min(STORE_16BIT_ROWS, end - first)
            outer_product((0, some), count, (a_at + first * size, a_row), b, memory, False)
            given = (memory, c + first * columns * 2, some * columns)
            call(args.store_16bit, given)  # type: ignore[call-arg]  # numba's

    return outer_product, outer_product_16bit


def _for(dtype, outer_product):
    size, panel = SIZES[dtype], PANEL[dtype]
    copy, add = getattr(rows, f"copy_{dtype}"), getattr(rows, f"add_{dtype}")
    product, highest = getattr(products, f"product_{dtype}"), products.HIGHEST

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def column_sums(sums, values, shape, partial, wanted):
        """sums[columns] += the sum over rows of values, (rows, columns) = shape.

        Of the columns [begin, end) = wanted. The sum is made apart, in partial: it rounds less.
        """
        count, columns = shape
        begin, end = wanted
        partial, values = partial + begin * size, values + begin * size
        copy(partial, 0, 0, end - begin)
        for i in range(count):
            add(partial, values + i * columns * size, end - begin)
        add(sums + begin * size, partial, end - begin)

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def packed_product(args, team, phase, wanted, count, a, b, memory, c, accumulate):
        """`outer_product` by a team, of packed factors; returns the barrier's next phase.

        Rows of a and b lie far apart, and each would be at a new page of memory.

        Args:
            wanted: of this thread.
            memory: addresses: of the team, for b in panels of columns, [columns / PANEL, count,
                PANEL]; of this thread, for a strip of a in blocks of HIGHEST columns, the last of
                which may be narrower, [PACKED_STRIP / HIGHEST, count, columns of the block].
        """
        begin, end = wanted
        a_at, a_row = a
        b_at, columns = b
        panels, strip = memory
        if columns < PANELS_TO_PACK * panel and args.pairs_outer == 0:
            outer_product(wanted, count, a, b, c, accumulate)
            return phase
        phase = barrier(team, phase)  # others may still read panels of another matrix
        if args.pairs_outer != 0:
            none = (0, 0)
            return pairs_products(
                args, team, phase, wanted, count, a, (b, none), memory, (c, 0), accumulate
            )
        mine, last = part_of(columns, panel, team)
        for first in range(mine, last, panel):
            for k in range(count):
                target = panels + (first * count + k * panel) * size
                copy(target, b_at + (k * columns + first) * size, panel, panel)
        phase = barrier(team, phase)
        # where all of b is near, whole rows of c: they are then written one after the other
        step = highest if count * columns * size <= NEAR_BYTES else PACKED_STRIP
        for first in range(begin, end, step):
            some = min(step, end - first)
            for block in range(0, some, highest):
                height = min(highest, some - block)
                for k in range(count):
                    target = strip + (block * count + k * height) * size
                    copy(target, a_at + (k * a_row + first + block) * size, height, height)
            for column in range(0, columns, panel):
                for block in range(0, some, highest):
                    height = min(highest, some - block)
                    product(
                        (height, count, panel),
                        (strip + block * count * size, 1, height),
                        (panels + column * count * size, panel, panel),
                        (c + ((first + block) * columns + column) * size, columns),
                        accumulate,
                        False,
                    )
        return phase

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def packed_memory(args, team, free, capacity):
        """`memory` of `packed_product`, from an address on, for up to `capacity` rows."""
        panels = (free + 63) // 64 * 64
        return panels, panels + rows.strip_offset(capacity, args.widest, team.thread) * size

    return column_sums, packed_product, packed_memory


def _gates_for(dtype):
    size, panel, product = SIZES[dtype], PANEL[dtype], getattr(products, f"product_{dtype}")

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def gate_product(args, rounded, rows, a, weight, sizes, c, accumulate, backwards):
        """c[rows, begin .. end] (+)= a[rows, gates * padded] times columns of a gate matrix.

        Args:
            rounded: memory of this thread, for rows that are rounded.
            a, c: addresses; rows of a are those of gates.
            weight: in panels, or as it is; sizes: (columns of it and of c, begin, end).
        """
        columns, begin, end = sizes
        inner = args.gates * args.padded
        if args.product != 0:
            given = (
                rows, inner, 1, columns, columns, begin, end, a, args.columns, weight, 0, c,
                columns, int64(accumulate), rounded, int64(backwards),
            )  # fmt: skip
            call(args.product, given)  # type: ignore[call-arg]  # numba's
            return
        along, panels = (panel, panel * inner) if args.packed != 0 else (columns, panel)
        b = (weight + begin // panel * panels * size, along, panels)
        target = (c + begin * size, columns)
        shape = (rows, inner, end - begin)
        product(shape, (a, args.columns, 1), b, target, accumulate, backwards)

    return gate_product


_outer_float32, outer_product_16bit_float32 = _outer_for("float32")
_outer_float64, outer_product_16bit_float64 = _outer_for("float64")
column_sums_float32, packed_product_float32, packed_memory_float32 = _for("float32", _outer_float32)
column_sums_float64, packed_product_float64, packed_memory_float64 = _for("float64", _outer_float64)
gate_product_float32, gate_product_float64 = _gates_for("float32"), _gates_for("float64")
