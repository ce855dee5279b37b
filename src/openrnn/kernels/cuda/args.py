"""The arguments of every CUDA kernel, a table each.

In shapes `hidden` is H, and `units` or UNITS is H padded as `tuning/units.py` says, at least to a
multiple of 8.
"""

from typing import Annotated

from openrnn.kernels.cuda.table import Args, States, table


@table
class ForwardArgs(Args):
    """Arguments of the forward time loop of one layer and direction.

    Strides in bytes lead to the loop's next step: they are negative where it runs back in time.
    """

    weight: Annotated[int, "const storage_t*", "R [GATES, UNITS, UNITS], zeros past hidden"]
    w_ih: Annotated[int, "const storage_t*", "in a stack: W_ih, of the same shape"] = 0
    x: Annotated[int, "const storage_t*", "input side [T, B, GATES, UNITS], by strides"]
    x_step_bytes: Annotated[int, "int64", "of the loop, negative in reverse"]
    x_row: Annotated[int, "int64", "values from a row to the next"]
    x_gate: Annotated[int, "int64", "values from a gate to the next, 0: one for all"]
    y: Annotated[
        int, "storage_t*", "out [T, B, hidden], by strides; stack: holds ones before the launch"
    ]
    y_step_bytes: Annotated[int, "int64", "of the loop, negative in reverse"]
    y_row: Annotated[int, "int64", "values from a row to the next"]
    flag_buffer: Annotated[
        int,
        "operand_t*",
        "grid: [T, B, UNITS] of ones; stack if PADDED: of storage_t; or see multicast_exchange.cuh",
    ] = 0
    saved: Annotated[
        int, "storage_t*", "out if SAVE: [T, tiles of 8 rows, GROUPS, 64 cells, SAVED] in planes"
    ] = 0
    saved_step_bytes: Annotated[int, "int64", "of the loop, negative in reverse"]
    bias_x: Annotated[int, "const storage_t*", "[GATES, hidden], or null"] = 0
    bias_r: Annotated[int, "const storage_t*", "[GATES, hidden], or null"] = 0
    vectors: Annotated[int, "const storage_t*", "per-unit vectors [VECTORS, hidden]"] = 0
    lengths: Annotated[int, "const int64*", "if LENGTHS: [B]"] = 0
    order: Annotated[int, "const int64*", "if LENGTHS: [B] rows by falling length"] = 0
    reset: Annotated[int, "const unsigned char*", "if RESET: [T, B]"] = 0
    reset_step_bytes: Annotated[int, "int64", "of the loop, negative in reverse"]
    chunk_in: Annotated[
        int, "const float*", "[STATES, B, hidden] that the time chunk before left, or null"
    ] = 0
    chunk_out: Annotated[int, "float*", "the same for the next chunk instead of final, or null"] = 0
    steps: Annotated[int, "int64", "T"]
    batch: Annotated[int, "int64", "B"]
    hidden: Annotated[int, "int64", "H, at most UNITS"]
    layers: Annotated[int, "int64", "of a stack, whose structs follow each other; or 1"] = 1
    reverse: Annotated[int, "int64", "1: the loop begins at the end of time"]
    first_row: Annotated[int, "int64", "grid, stack: rows before it are of other launches"] = 0
    delay: Annotated[int, "int64", "grid only: cycles until the first poll"] = 0
    step: Annotated[int, "int64", "stepwise only: of the loop; -1 before the first"] = 0
    h: Annotated[int, "storage_t*", "stepwise only: [B, UNITS] that the next GEMM reads"] = 0
    products: Annotated[int, "const float*", "stepwise only: h R^T [B, GATES, UNITS]"] = 0
    carried: Annotated[int, "float*", "stepwise only: states [STATES, B, hidden] between steps"] = 0
    streamed: Annotated[
        int, "void*", "grid: [warps, STREAMED_FRAGMENTS, 1 KiB], see streamed.cuh; or null"
    ] = 0
    initial: Annotated[States, "const storage_t*", "[B, hidden] each, or null: zeros"]
    reset_state: Annotated[States, "const storage_t*", "the same, after a reset"]
    final: Annotated[States, "storage_t*", "out [B, hidden] each"]
    all_states: Annotated[States, "storage_t*", "out if ALL_STATES: [T, B, hidden] each"]


@table
class BackwardArgs(Args):
    """Arguments of the backward time loop of one layer and direction.

    Strides in bytes lead to the loop's next step, which is forward's step before.
    """

    weight: Annotated[int, "const storage_t*", "R transposed [UNITS, GATES, UNITS], see PLANES"]
    w_above: Annotated[int, "const storage_t*", "in a stack: W_ih of the layer above, likewise"] = 0
    saved: Annotated[int, "const storage_t*", "as forward wrote it"]
    saved_step_bytes: Annotated[int, "int64", "of this loop, negative unless reverse"]
    dy: Annotated[int, "const storage_t*", "[T, B, UNITS], by strides; or null"] = 0
    dy_step_bytes: Annotated[int, "int64", "of this loop, negative unless reverse"] = 0
    dy_row: Annotated[int, "int64", "values from a row to the next"] = 0
    d_gates: Annotated[
        int,
        "storage_t*",
        "out [T, B, PLANES, UNITS]; grid, stack: holds ones before the launch",
    ]
    d_gates_step_bytes: Annotated[int, "int64", "of this loop, negative unless reverse"]
    flag_buffer: Annotated[int, "operand_t*", "see multicast_exchange.cuh; else null"] = 0
    sums: Annotated[int, "float*", "out [parts by rows, PLANES + VECTORS, UNITS] over T and rows"]
    vectors: Annotated[int, "const storage_t*", "per-unit vectors [VECTORS, hidden]"] = 0
    lengths: Annotated[int, "const int64*", "if LENGTHS: [B]"] = 0
    order: Annotated[int, "const int64*", "if LENGTHS: [B] rows by falling length"] = 0
    reset: Annotated[int, "const unsigned char*", "if RESET: [T, B]"] = 0
    reset_step_bytes: Annotated[int, "int64", "of this loop, negative unless reverse"]
    chunk_in: Annotated[
        int, "const float*", "[STATES, B, hidden] that the time chunk before left, or null"
    ] = 0
    chunk_out: Annotated[int, "float*", "the same for the next chunk, not d_initial; or null"] = 0
    steps: Annotated[int, "int64", "T"]
    batch: Annotated[int, "int64", "B"]
    hidden: Annotated[int, "int64", "H, at most UNITS"]
    layers: Annotated[int, "int64", "of a stack, whose structs follow each other; or 1"] = 1
    reverse: Annotated[int, "int64", "1: forward's loop begins at the end of time"]
    first_row: Annotated[int, "int64", "grid, stack: rows before it are of other launches"] = 0
    delay: Annotated[int, "int64", "grid only: cycles until the first poll"] = 0
    step: Annotated[int, "int64", "stepwise only: of the loop; T after the last"] = 0
    products: Annotated[int, "const float*", "stepwise only: dh of the step before [B, UNITS]"] = 0
    carried: Annotated[
        int, "float*", "stepwise only: [STATES, B, hidden] between steps; of reset states behind it"
    ] = 0
    streamed: Annotated[
        int, "void*", "grid: [warps, STREAMED_FRAGMENTS, 1 KiB], see streamed.cuh; or null"
    ] = 0
    d_final: Annotated[States, "const storage_t*", "[B, hidden] each, or null: zeros"]
    d_all_states: Annotated[
        States, "const storage_t*", "if ALL_STATES: [T, B, hidden] each, or null"
    ]
    d_initial: Annotated[States, "storage_t*", "out [B, hidden] each, or null"]
    d_reset_state: Annotated[States, "storage_t*", "out if RESET_STATE: [B, hidden] each, or null"]


@table
class StepForwardArgs(Args):
    """Arguments of `step_forward` and `step_cell`: T = 1, one layer and direction."""

    weight: Annotated[int, "const storage_t*", "R [GATES, hidden, hidden]"]
    w_ih: Annotated[int, "const storage_t*", "W_ih [GATES, hidden, inputs], or null"] = 0
    x: Annotated[
        int, "const storage_t*", "[B, inputs]; without w_ih the input side [B, GATES, hidden]"
    ]
    x_row: Annotated[int, "int64", "values from a row to the next"]
    x_gate: Annotated[int, "int64", "without w_ih: values from a gate to the next"] = 0
    inputs: Annotated[int, "int64", "I, a multiple of 8; 0 without w_ih"]
    x_products: Annotated[int, "const float*", "step_cell: [B, GATES, hidden] of W_ih, or null"] = 0
    h_products: Annotated[int, "const float*", "step_cell: the same of R, or null"] = 0
    y: Annotated[int, "storage_t*", "out [B, hidden], by rows"]
    y_row: Annotated[int, "int64", "values from a row to the next"]
    saved: Annotated[
        int, "storage_t*", "out [tiles of 8 rows, hidden / 8, 64 cells, SAVED] in planes, or null"
    ] = 0
    bias_x: Annotated[int, "const storage_t*", "[GATES, hidden], or null"] = 0
    bias_r: Annotated[int, "const storage_t*", "[GATES, hidden], or null"] = 0
    vectors: Annotated[int, "const storage_t*", "per-unit vectors [VECTORS, hidden]"] = 0
    reset: Annotated[int, "const unsigned char*", "[B] of rows reset before the step, or null"] = 0
    batch: Annotated[int, "int64", "B"]
    hidden: Annotated[int, "int64", "H, a multiple of 8"]
    initial: Annotated[States, "const storage_t*", "[B, hidden] each, or null: zeros"]
    reset_state: Annotated[States, "const storage_t*", "the same, after a reset"]
    final: Annotated[States, "storage_t*", "out [B, hidden] each, not in the memory of initial"]
    all_states: Annotated[States, "storage_t*", "out [B, hidden] each, or null"]


@table
class StepBackwardArgs(Args):
    """Arguments of `step_backward`, the derivative of one step of one layer and direction."""

    saved: Annotated[int, "const storage_t*", "as forward wrote it"]
    dy: Annotated[int, "const storage_t*", "[B, hidden], by rows; or null"] = 0
    dy_row: Annotated[int, "int64", "values from a row to the next"] = 0
    d_gates: Annotated[int, "storage_t*", "out [B, PLANES, hidden]"]
    input_bias: Annotated[int, "storage_t*", "out [GATES, hidden], or null"] = 0
    recurrent_bias: Annotated[int, "storage_t*", "out [GATES, hidden], or null"] = 0
    d_vectors: Annotated[int, "storage_t*", "out [VECTORS, hidden]; null where VECTORS is 0"] = 0
    vectors: Annotated[int, "const storage_t*", "per-unit vectors [VECTORS, hidden]"] = 0
    batch: Annotated[int, "int64", "B"]
    hidden: Annotated[int, "int64", "H, a multiple of 8"]
    left: Annotated[int, "int64", "4 bits each: the plane of a gate on the input side"]
    right: Annotated[int, "int64", "4 bits each: the same on the recurrent side"]
    d_final: Annotated[States, "const storage_t*", "[B, hidden] each, or null: zeros"]
    d_all_states: Annotated[States, "const storage_t*", "[B, hidden] each, or null: zeros"]
    d_initial: Annotated[
        States, "storage_t*", "out [B, hidden] each without what R passes on, or null"
    ]


@table
class PermuteWeightsArgs(Args):
    """Arguments of `permute_weights`."""

    matrix: Annotated[int, "const storage_t*", "[gates, hidden, columns], by its stride"]
    row: Annotated[int, "int64", "values from a row of matrix to the next"]
    out: Annotated[
        int, "storage_t*", "[gates, units, across] or, transposed, [across, gates, units]"
    ]
    units: Annotated[int, "int64", "at least hidden, a multiple of 8; zeros past hidden"]
    hidden: Annotated[int, "int64", ""]
    across: Annotated[int, "int64", "columns of out, with zeros past those of matrix"]
    columns: Annotated[int, "int64", ""]
    gates: Annotated[int, "int64", ""]
    order: Annotated[int, "int64", "4 bits each: the gate of matrix at that place of out"]
    transposed: Annotated[int, "int64", "1: each gate is transposed"]


@table
class CopyRowsArgs(Args):
    """Arguments of `copy_rows`."""

    x: Annotated[int, "const storage_t*", "[T, B, width], by strides"]
    x_step: Annotated[int, "int64", "values from a step to the next"]
    x_row: Annotated[int, "int64", "values from a row to the next"]
    out: Annotated[int, "storage_t*", "[T, B, out_width]"]
    lengths: Annotated[int, "const int64*", "[B], or null"] = 0
    mask: Annotated[int, "const unsigned char*", "[T, B], or null"] = 0
    steps: Annotated[int, "int64", "T"]
    batch: Annotated[int, "int64", "B"]
    width: Annotated[int, "int64", "values of a row of x"]
    out_width: Annotated[int, "int64", "of a row of out, at least width"]
    pieces: Annotated[int, "int64", "of a row of out, each of 16, 8 or 4 bytes or of a value"]


@table
class NarrowValuesArgs(Args):
    """Arguments of `narrow_values`; both begin at multiples of 16 bytes."""

    x: Annotated[int, "const float*", "[count]"]
    out: Annotated[int, "storage_t*", "out [count], 16 bits"]
    count: Annotated[int, "int64", ""]


@table
class FillFlagsArgs(Args):
    """Arguments of `fill_flags`."""

    buffer: Annotated[int, "void*", "[rows], by their stride"]
    rows: Annotated[int, "int64", ""]
    row_bytes: Annotated[int, "int64", "from a row to the next"]
    pieces: Annotated[int, "int64", "of 16 bytes that a row has"]


@table
class DropoutArgs(Args):
    """Arguments of `dropout`."""

    x: Annotated[int, "const storage_t*", "[T, B, width]"]
    out: Annotated[int, "storage_t*", "[T, B, width]"]
    steps: Annotated[int, "int64", "T"]
    batch: Annotated[int, "int64", "B"]
    width: Annotated[int, "int64", "values of a row"]
    seed: Annotated[int, "const int64*", "[2] seed and offset, in memory for CUDA graphs"]
    layer: Annotated[int, "int64", "the layer whose output x is"]
    first: Annotated[int, "int64", "number of the first step"]
    threshold: Annotated[int, "int64", "smallest number below 2^32 that is not dropped"]
    scale: Annotated[int, "int64", "bits of the float32 that kept values are multiplied by"]


@table
class ReduceBiasGradientsArgs(Args):
    """Arguments of `reduce_bias_gradients`."""

    sums: Annotated[int, "const float*", "[parts, planes + vectors, units]"]
    input_bias: Annotated[int, "storage_t*", "out [gates, hidden], or null"] = 0
    recurrent_bias: Annotated[int, "storage_t*", "out [gates, hidden], or null"] = 0
    unit_vectors: Annotated[int, "storage_t*", "out [vectors, hidden]; null where vectors is 0"] = 0
    parts: Annotated[int, "int64", ""]
    planes: Annotated[int, "int64", ""]
    gates: Annotated[int, "int64", ""]
    vectors: Annotated[int, "int64", ""]
    units: Annotated[int, "int64", "of a row of sums, at least hidden"]
    hidden: Annotated[int, "int64", ""]
    left: Annotated[int, "int64", "4 bits each: the plane of a gate on the input side"]
    right: Annotated[int, "int64", "4 bits each: the same on the recurrent side"]


@table
class SortLengthsArgs(Args):
    """Arguments of `sort_lengths`."""

    lengths: Annotated[int, "const int64*", "[B]"]
    order: Annotated[int, "int64*", "out [B]: rows by falling length"]
    batch: Annotated[int, "int64", "B"]


@table
class CutLengthsArgs(Args):
    """Arguments of `cut_lengths`."""

    lengths: Annotated[int, "const int64*", "[B]"]
    inside: Annotated[int, "int64*", "out [B]: in 0 to steps"]
    batch: Annotated[int, "int64", "B"]
    begin: Annotated[int, "int64", "the first step of the chunk"]
    steps: Annotated[int, "int64", "of the chunk"]


LOOPS: dict[str, type[Args]] = {"forward": ForwardArgs, "backward": BackwardArgs}
STEPS: dict[str, type[Args]] = {
    "step_forward": StepForwardArgs,
    "step_cell": StepForwardArgs,
    "step_backward": StepBackwardArgs,
}
PLAIN: dict[str, type[Args]] = {  # by the name of the kernel and of its file
    "permute_weights": PermuteWeightsArgs,
    "copy_rows": CopyRowsArgs,
    "narrow_values": NarrowValuesArgs,
    "fill_flags": FillFlagsArgs,
    "dropout": DropoutArgs,
    "reduce_bias_gradients": ReduceBiasGradientsArgs,
    "sort_lengths": SortLengthsArgs,
    "cut_lengths": CutLengthsArgs,
}
