"""The arguments of a CPU kernel by name: their places in the one int64 array that it takes.

Sizes and strides count elements, addresses bytes. An absent tensor has address 0. From `TAIL` on
come groups of addresses, one for each state of the cell; `INITIAL` and so on number the groups.
"""

(
    # address of the cell's step or derivative: a C function whose one argument is an int64
    ROW_FUNCTION,
    # T, B, input width, H, O
    STEPS, BATCH, INPUTS, UNITS, OUTPUTS,
    # H rounded up to whole vectors; then, each rounded up to whole panels: a gate row
    # (GATES * PADDED), O, the input width
    PADDED, COLUMNS, WIDTH, WIDE,
    # of the cell: gates; states without the emitted one; per-unit vectors; gates whose recurrent
    # side is kept apart; 1 if every gate reads only the sum x + r
    GATES, OTHERS, VECTORS, KEPT, SUMMED,
    # 1 for the reverse direction; rows of a tile; steps of a chunk
    REVERSE, TILE_ROWS, CHUNK,
    # 1 if gate matrices are packed into panels; 1 with skip input, where x goes to each gate and
    # there is no input matrix; 1 if the first products of a task overwrite its sums
    PACKED, SKIP, WRITES,
    # bytes of one team's scratch memory and of its sums
    SCRATCH_BYTES, SUMS_BYTES,
    # tasks that share the tiles; tasks of a team, which share each of the team's tiles; address of
    # the barrier counters, one a team, COUNTER_STRIDE apart
    TASKS, TEAM_SIZE, COUNTERS,
    # dropout of the input: 1 if there is any; the key, two numbers; the last word of the counter;
    # the smallest word that keeps a value; what kept values are multiplied by (a float64)
    DROP, DROP_LOW, DROP_HIGH, DROP_WORD, DROP_THRESHOLD, DROP_SCALE,
    # x (T, B, inputs) and y (T, B, outputs): address, strides of T and B; the last stride is 1
    X, X_STEP, X_ROW, Y, Y_STEP, Y_ROW,
    # matrices; biases [GATES, units]; per-unit vectors [VECTORS, padded]
    W_IH, W_HH, W_HR, BIAS_X, BIAS_R, VECTORS_AT,
    # lengths (B,) int64; rows sorted by falling length (B,) int64; reset mask (T, B), bytes
    LENGTHS, ORDER, RESET,
    # what backward reads: gate rows [T, B, columns]; recurrent sides kept apart
    # [T, B, KEPT * padded]; states without the emitted one [T, B, OTHERS * padded]; outputs before
    # the projection [T, B, padded]
    KEPT_AT, KEPT_R, HISTORY, PROJECTED,
    # scratch memory [teams, scratch_bytes]
    SCRATCH,
    # backward: the gradients of y and of x, as y and x above; 1 if dx is added to what is there
    DY, DY_STEP, DY_ROW, DX, DX_STEP, DX_ROW, DX_ADD,
    # sums of a team [teams, sums_bytes]: d_w_ih [columns, wide], d_w_hh [columns, width],
    # d_w_hr [outputs, padded], d_bias_x [columns], d_bias_r [columns], d_vectors [VECTORS, padded]
    SUMS,
    TAIL,
) = range(61)  # fmt: skip
# groups of states: before the first step, put in place by a reset, after the last step, after
# every step; for backward the gradients of these four
INITIAL, FRESH, FINAL, EVERY, D_INITIAL, D_FRESH, D_FINAL, D_EVERY = range(8)
