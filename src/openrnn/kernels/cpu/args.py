"""The arguments of a CPU kernel by name: their places in the one int64 array that it takes.

Sizes and strides count elements, addresses bytes. An absent tensor has address 0. From `TAIL` on
come groups of addresses, one for each state of the cell; `INITIAL` and so on number the groups.
"""

(
    # address of the cell's row function, step or derivative: C, its argument an int64
    ROW_FUNCTION,
    # T, B, width of the input, H, O
    STEPS, BATCH, INPUTS, UNITS, OUTPUTS,
    # H to whole vectors; columns of a gate row (G * padded, to whole panels); O and the input
    # width to whole panels
    PADDED, COLUMNS, WIDTH, WIDE,
    # what the cell has: gates, states but the emitted one, per-unit vectors, recurrent sides that
    # are kept apart; whether gates take only sums of both sides
    GATES, OTHERS, VECTORS, KEPT, SUMMED,
    # 1 for the reverse direction; rows of a tile; steps of a chunk
    REVERSE, TILE_ROWS, CHUNK,
    # gate matrices are panels, or with 0 as they are; no input matrix: x goes to each gate;
    # a task's first products write their sums, which hold nothing yet
    PACKED, SKIP, WRITES,
    SCRATCH_BYTES, SUMS_BYTES,
    # how many tasks share the tiles; how many of them are a team, which shares each of its tiles;
    # the barrier counters of the teams, COUNTER_STRIDE apart
    TASKS, TEAM_SIZE, COUNTERS,
    # dropout of the input: whether, key, last counter word, smallest kept word, the factor of
    # kept values (a float64)
    DROP, DROP_LOW, DROP_HIGH, DROP_WORD, DROP_THRESHOLD, DROP_SCALE,
    # (T, B, inputs) and (T, B, outputs), the last stride 1; strides in elements
    X, X_STEP, X_ROW, Y, Y_STEP, Y_ROW,
    # matrices; biases [GATES, units]; per-unit vectors [VECTORS, padded]
    W_IH, W_HH, W_HR, BIAS_X, BIAS_R, VECTORS_AT,
    # (B,) int64; (B,) int64 positions sorted by falling length; (T, B) bytes
    LENGTHS, ORDER, RESET,
    # what backward reads: gate rows [T, B, columns], recurrent sides kept apart
    # [T, B, KEPT * padded], states but the emitted [T, B, OTHERS * padded], outputs before the
    # projection [T, B, padded]
    KEPT_AT, KEPT_R, HISTORY, PROJECTED,
    # [tasks, scratch_bytes]
    SCRATCH,
    # backward: gradient of y like y; of x like x, added to what is there with dx_add
    DY, DY_STEP, DY_ROW, DX, DX_STEP, DX_ROW, DX_ADD,
    # sums of a task [tasks, sums_bytes]: d_w_ih [columns, wide], d_w_hh [columns, width],
    # d_w_hr [outputs, padded], d_bias_x [columns], d_bias_r [columns], d_vectors [VECTORS, padded]
    SUMS,
    TAIL,
) = range(61)  # fmt: skip
# the states before the first step, those that a reset puts in place, those after the last step and
# those after every step; for backward, the gradients of these four
(
    INITIAL, FRESH, FINAL, EVERY, D_INITIAL, D_FRESH, D_FINAL, D_EVERY,
) = range(8)  # fmt: skip
