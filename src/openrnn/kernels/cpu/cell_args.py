"""The arguments of a cell's row functions by name: their places in the one int64 array they take.

Of each operand the address of its first row; of those with a row a sequence, also the distance of
rows in elements. The arguments of both functions come first.
"""

(
    # rows; units of a row; elements from one gate to the next, and from one state to the next
    ROWS, UNITS, STRIDE,
    X, X_ROW, R, R_ROW, BIAS, H_BEFORE, H_BEFORE_ROW, BEFORE, BEFORE_ROW, VECTORS,
    TAIL,
) = range(14)  # fmt: skip
# forward
BIAS_R, H_AFTER, H_AFTER_ROW, AFTER, AFTER_ROW, SAVED, SAVED_ROW = range(TAIL, TAIL + 7)
# backward
(
    D_H_AFTER, D_H_AFTER_ROW, D_AFTER, D_AFTER_ROW, DR, DR_ROW, DX, DX_ROW,
    D_H_BEFORE, D_H_BEFORE_ROW, D_BEFORE, D_BEFORE_ROW, D_VECTORS,
) = range(TAIL, TAIL + 13)  # fmt: skip
COUNT = TAIL + 13
