"""The fields of a job: the one int64 array that a CPU kernel takes, sizes in elements, addresses in bytes.

After `TAIL` come groups of one address a state: initial, fresh (what resets put in place), final,
every (all steps), and for backward their gradients. An absent tensor has address 0.
"""

NAMES = (
    # sizes: T, B, width of the input, H, O, H padded to whole vectors, columns of a gate row
    # (G * padded, to whole panels), O to whole panels, input width to whole panels
    "steps batch inputs units outputs padded columns width wide "
    # 1 for the reverse direction; rows of a tile; steps, or rows / tile_rows, of a chunk
    "reverse tile_rows chunk "
    # (T, B, inputs) and (T, B, outputs), the last stride 1; strides in elements
    "x x_step x_row y y_step y_row "
    # panels, or with packed 0 the matrices as they are; skip: no input matrix, x goes to each gate
    "w_ih w_hh w_hr packed skip "
    # biases [GATES, units]; per-unit vectors [VECTORS, padded]
    "bias_x bias_r vectors "
    # (B,) int64; (B,) int64 positions sorted by falling length; (T, B) bytes
    "lengths order reset "
    # what backward reads: gate rows [T, B, columns], recurrent sides kept apart [T, B, KEPT * padded],
    # states but the emitted [T, B, OTHERS * padded], outputs before the projection [T, B, padded]
    "kept kept_r history projected "
    # dropout of the input: key, the last counter word, smallest kept word
    "drop drop_low drop_high drop_word drop_threshold "
    # [tasks, scratch_bytes]
    "scratch scratch_bytes "
    # backward: gradient of y like y; of x like x, added to what is there with dx_add
    "dy dy_step dy_row dx dx_step dx_row dx_add "
    # sums of a task [tasks, sums_bytes]: d_w_ih [columns, wide], d_w_hh [columns, width],
    # d_w_hr [outputs, padded], d_bias_x [columns], d_bias_r [columns], d_vectors [VECTORS, padded]
    "sums sums_bytes"
).split()

(
    STEPS, BATCH, INPUTS, UNITS, OUTPUTS, PADDED, COLUMNS, WIDTH, WIDE,
    REVERSE, TILE_ROWS, CHUNK,
    X, X_STEP, X_ROW, Y, Y_STEP, Y_ROW,
    W_IH, W_HH, W_HR, PACKED, SKIP,
    BIAS_X, BIAS_R, VECTORS_AT,
    LENGTHS, ORDER, RESET,
    KEPT_AT, KEPT_R, HISTORY, PROJECTED,
    DROP, DROP_LOW, DROP_HIGH, DROP_WORD, DROP_THRESHOLD,
    SCRATCH, SCRATCH_BYTES,
    DY, DY_STEP, DY_ROW, DX, DX_STEP, DX_ROW, DX_ADD,
    SUMS, SUMS_BYTES,
    TAIL,
) = range(len(NAMES) + 1)  # fmt: skip

GROUPS = ("initial", "fresh", "final", "every", "d_initial", "d_fresh", "d_final", "d_every")
