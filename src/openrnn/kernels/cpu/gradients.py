"""Sums over the rows of a chunk, of which weight and bias gradients are made."""

from numba import njit

from openrnn.kernels.cpu import product as products
from openrnn.kernels.cpu import rows
from openrnn.kernels.cpu.layout import STRIP_ELEMENTS, STRIP_ROWS
from openrnn.kernels.cpu.memory import named
from openrnn.kernels.cpu.vectors import PANEL, SIZES


def _for(dtype):
    size, panel = SIZES[dtype], PANEL[dtype]
    copy, add = getattr(rows, f"copy_{dtype}"), getattr(rows, f"add_{dtype}")
    product = getattr(products, f"product_{dtype}")

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
            )

    return column_sums, outer_product


column_sums_float32, outer_product_float32 = _for("float32")
column_sums_float64, outer_product_float64 = _for("float64")
