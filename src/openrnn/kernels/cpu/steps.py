"""The fields of a step, the one int64 array that a cell's row functions take.

Of each operand the address of its first row; of those that have more than one, the distance of rows
in elements. What both directions read stands first.
"""

(
    # rows; of each the units; elements between gates, and between states
    ROWS, UNITS, STRIDE,
    X, X_ROW, R, R_ROW, BIAS, H_BEFORE, H_BEFORE_ROW, BEFORE, BEFORE_ROW, VECTORS,
    TAIL,
) = range(14)  # fmt: skip
# forward
BIAS_R, H_AFTER, H_AFTER_ROW, AFTER, AFTER_ROW, KEPT, KEPT_ROW = range(TAIL, TAIL + 7)
# backward
(
    D_H_AFTER, D_H_AFTER_ROW, D_AFTER, D_AFTER_ROW, DR, DR_ROW, DX, DX_ROW,
    D_H_BEFORE, D_H_BEFORE_ROW, D_BEFORE, D_BEFORE_ROW, D_VECTORS,
) = range(TAIL, TAIL + 13)  # fmt: skip
COUNT = TAIL + 13
