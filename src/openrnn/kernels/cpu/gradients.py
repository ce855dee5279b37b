"""Sums over the rows of a chunk, of which weight and bias gradients are made."""

from numba import njit

from openrnn.kernels.cpu import product as products
from openrnn.kernels.cpu import rows
from openrnn.kernels.cpu.layout import (
    NEAR_BYTES,
    PACKED_STRIP,
    PANELS_TO_PACK,
    STRIP_ELEMENTS,
    STRIP_ROWS,
)
from openrnn.kernels.cpu.memory import named
from openrnn.kernels.cpu.team import barrier, part_of
from openrnn.kernels.cpu.vectors import PANEL, SIZES


def _for(dtype):
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
    def packed_product(team, phase, wanted, count, a, b, memory, c, accumulate):
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
        if columns < PANELS_TO_PACK * panel:
            outer_product(wanted, count, a, b, c, accumulate)
            return phase
        phase = barrier(team, phase)  # others may still read panels of another matrix
        mine, last = part_of(columns, panel, team)
        for first in range(mine, last, panel):
            for k in range(count):
                place = panels + (first * count + k * panel) * size
                copy(place, b_at + (k * columns + first) * size, panel, panel)
        phase = barrier(team, phase)
        # where all of b is near, whole rows of c: they are then written one after the other
        step = highest if count * columns * size <= NEAR_BYTES else PACKED_STRIP
        for first in range(begin, end, step):
            some = min(step, end - first)
            for block in range(0, some, highest):
                height = min(highest, some - block)
                for k in range(count):
                    place = strip + (block * count + k * height) * size
                    copy(place, a_at + (k * a_row + first + block) * size, height, height)
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

    return column_sums, packed_product


column_sums_float32, packed_product_float32 = _for("float32")
column_sums_float64, packed_product_float64 = _for("float64")
