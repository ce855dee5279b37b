"""The backward time loop of one layer and direction, the same for every cell.

One of the kernel's arguments is the address of the cell's `derivative_rows`, which `codegen.numba`
prints. `loops` compiles the text of this file once for each dtype, put in place of float32.

Rows of all steps are appended to the buffers of a chunk; `flush` computes weight, bias and input
gradients as products over the rows of a full chunk.
"""

from typing import NamedTuple

from numba import int64, njit

from openrnn.kernels.cpu import cell_args as field
from openrnn.kernels.cpu.args import *  # the places of the arguments, all of them constants
from openrnn.kernels.cpu.gradients import column_sums_float32 as column_sums
from openrnn.kernels.cpu.gradients import outer_product_float32 as outer_product
from openrnn.kernels.cpu.memory import float64_at, int64_at
from openrnn.kernels.cpu.product import product_float32 as product
from openrnn.kernels.cpu.regions import call, new_cell_args
from openrnn.kernels.cpu.rows import add_float32 as add
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.rows import drop_float32 as drop
from openrnn.kernels.cpu.rows import ends_reset, is_reset, length_of, row_of, slot_of, time_of
from openrnn.kernels.cpu.rows import spread_float32 as spread
from openrnn.kernels.cpu.states import add_from_float32 as add_from
from openrnn.kernels.cpu.states import add_to_float32 as add_to
from openrnn.kernels.cpu.states import clear_float32 as clear
from openrnn.kernels.cpu.states import load_float32 as load
from openrnn.kernels.cpu.team import COUNTER_STRIDE, Team, barrier, share_of
from openrnn.kernels.cpu.vectors import PANEL as PANELS
from openrnn.kernels.cpu.vectors import SIZES

SIZE, PANEL = SIZES["float32"], PANELS["float32"]


class Tile(NamedTuple):
    """Sequences that run together, the units of one thread, and addresses of what it writes.

    `capacity` is the rows of a chunk, `other` is OTHERS * padded.
    """

    start: int  # the position of the first sequence
    rows: int
    begin: int  # this thread's units: [begin, end)
    end: int
    d_hidden: int  # [2, rows, width]: gradient of the emitted state, by steps in turn
    d_others: int  # [2, rows, other]
    entry: int  # [rows, other]: states that were put in place before a step
    dm: int  # [rows, padded]: gradient before the projection
    dr: int  # [capacity, columns]
    dx_gates: int  # [capacity, columns]: dr itself, unless the gates take x and r apart
    h_rows: int  # [capacity, width]: the state before each step
    x_rows: int  # [capacity, wide]
    dh_rows: int  # [capacity, width], with a projection
    m_rows: int  # [capacity, padded], with a projection
    bias: int  # [columns]
    spare: int  # [columns]: partial sums; the gradient of h that no projected cell has
    t_at: int  # [capacity] int64: t of each row
    b_at: int  # [capacity] int64: b of each row
    sums: int  # weight and bias gradients, as `args.SUMS` says; 0 where not wanted


@njit(forceinline=True, error_model="numpy")
def tile_of(args, start, rows, scratch, sums, team):
    """A tile whose rows lie in this scratch."""
    padded, columns, width = args[PADDED], args[COLUMNS], args[WIDTH]
    other, capacity = args[OTHERS] * padded, args[CHUNK] * args[TILE_ROWS]
    projecting = args[W_HR] != 0
    begin, end = share_of(padded, PANEL, team.thread, team.threads), padded
    if team.threads > 1:
        end = share_of(padded, PANEL, team.thread + 1, team.threads)
    d_hidden = scratch
    d_others = d_hidden + 2 * rows * width * SIZE
    entry = d_others + 2 * rows * other * SIZE
    dm = entry + rows * other * SIZE
    dr = dm + rows * padded * SIZE
    dx_gates = dr
    h_rows = dr + capacity * columns * SIZE
    if args[SUMMED] == 0:
        dx_gates, h_rows = h_rows, h_rows + capacity * columns * SIZE
    x_rows = h_rows + capacity * width * SIZE
    dh_rows = x_rows + capacity * args[WIDE] * SIZE
    m_rows = dh_rows + (capacity * width * SIZE if projecting else 0)
    bias = m_rows + (capacity * padded * SIZE if projecting else 0)
    spare = bias + columns * SIZE
    t_at = spare + columns * SIZE
    return Tile(
        start, rows, begin, end, d_hidden, d_others, entry, dm, dr, dx_gates, h_rows, x_rows,
        dh_rows, m_rows, bias, spare, t_at, t_at + 8 * capacity, sums,
    )  # fmt: skip


@njit(nogil=True, error_model="numpy")
def gate_matrix(args, weight, columns):
    """A gate matrix as the right factor of `product`: in panels, or as it is."""
    if args[PACKED] != 0:
        return weight, PANEL, PANEL * args[GATES] * args[PADDED]
    return weight, columns, PANEL


@njit(nogil=True, error_model="numpy")
def weight_gradients(args, tile, team, count, accumulate, scale, phase):
    """Adds a chunk's part of weight and bias gradients; returns the barrier's next phase."""
    columns, width, wide, padded = args[COLUMNS], args[WIDTH], args[WIDE], args[PADDED]
    outputs, gates, thread, threads = args[OUTPUTS], args[GATES] * padded, team.thread, team.threads
    begin, end, ends = share_of(gates, PANEL, thread, threads), gates, columns
    if threads > 1:
        end = ends = share_of(gates, PANEL, thread + 1, threads)
    d_w_hh = tile.sums + columns * wide * SIZE
    d_w_hr = d_w_hh + columns * width * SIZE
    d_bias_x = d_w_hr + outputs * padded * SIZE
    dr, dx = (tile.dr, columns), (tile.dx_gates, columns)
    outer_product((begin, end), count, dr, (tile.h_rows, width), d_w_hh, accumulate)
    if args[W_HR] != 0:
        dh, m = (tile.dh_rows, width), (tile.m_rows, padded)
        outer_product((int64(0), outputs), count, dh, m, d_w_hr, accumulate)
    column_sums(d_bias_x, tile.dx_gates, (count, columns), tile.spare, (begin, ends))
    if args[SUMMED] == 0:
        d_bias_r = d_bias_x + columns * SIZE
        column_sums(d_bias_r, tile.dr, (count, columns), tile.spare, (begin, ends))
    if args[SKIP] != 0:
        return phase
    for i in range(count * thread // threads, count * (thread + 1) // threads):
        t, b = int64_at(tile.t_at)[i], int64_at(tile.b_at)[i]
        source = args[X] + (t * args[X_STEP] + b * args[X_ROW]) * SIZE
        target = tile.x_rows + i * wide * SIZE
        if args[DROP] != 0:
            drop(target, source, args[INPUTS], t, b, args, scale, False)
            copy(target + args[INPUTS] * SIZE, 0, 0, wide - args[INPUTS])
        else:
            copy(target, source, args[INPUTS], wide)
    phase = barrier(team, phase)
    outer_product((begin, end), count, dx, (tile.x_rows, wide), tile.sums, accumulate)
    return barrier(team, phase)


@njit(nogil=True, error_model="numpy")
def input_gradients(args, tile, team, count, scale):
    """Writes the gradients of x of a chunk's rows."""
    inputs, units, padded = args[INPUTS], args[UNITS], args[PADDED]
    columns, wide, gates = args[COLUMNS], args[WIDE], args[GATES] * args[PADDED]
    first = count * team.thread // team.threads
    last = count * (team.thread + 1) // team.threads
    if args[SKIP] != 0:
        for i in range(count):
            gate, target = tile.dx_gates + i * columns * SIZE, tile.x_rows + i * wide * SIZE
            copy(target, gate, units, wide)
            for g in range(1, args[GATES]):
                add(target, gate + g * padded * SIZE, units)
    elif last > first:
        a = (tile.dx_gates + first * columns * SIZE, columns, 1)
        c = (tile.x_rows + first * wide * SIZE, wide)
        product((last - first, gates, wide), a, gate_matrix(args, args[W_IH], wide), c, False)
    for i in range(first, last):
        t, b = int64_at(tile.t_at)[i], int64_at(tile.b_at)[i]
        target = args[DX] + (t * args[DX_STEP] + b * args[DX_ROW]) * SIZE
        source = tile.x_rows + i * wide * SIZE
        if args[DROP] != 0:
            drop(target, source, inputs, t, b, args, scale, args[DX_ADD] != 0)
        elif args[DX_ADD] != 0:
            add(target, source, inputs)
        else:
            copy(target, source, inputs, inputs)


@njit(nogil=True, error_model="numpy")
def flush(args, tile, team, count, accumulate, scale, phase):
    """Weight, bias and input gradients of a chunk's `count` rows, this thread's share of each.

    Returns the barrier's next phase.
    """
    if tile.sums != 0:
        phase = weight_gradients(args, tile, team, count, accumulate, scale, phase)
    if args[DX] != 0:
        input_gradients(args, tile, team, count, scale)
    return phase


@njit(forceinline=True, error_model="numpy")
def prepare(args, tile, team):
    """The gradients of sequences without steps, and the sum of the biases."""
    for i in range(team.thread, tile.rows, team.threads):
        if length_of(args, tile.start + i) == 0:
            b = row_of(args, tile.start + i)
            d_h = tile.d_hidden + i * args[WIDTH] * SIZE
            d_s = tile.d_others + i * args[OTHERS] * args[PADDED] * SIZE
            clear(args, d_h, d_s)
            add_from(args, D_FINAL, b, d_h, d_s)
            add_to(args, D_INITIAL, b, d_h, d_s)
    if team.thread == 0:
        copy(tile.bias, 0, 0, args[COLUMNS])
        spread(tile.bias, args[BIAS_X], args[GATES], args[UNITS], args[PADDED])
        spread(tile.bias, args[BIAS_R], args[GATES], args[UNITS], args[PADDED])


@njit(forceinline=True, error_model="numpy")
def fill_cell_args(args, tile, cell_args):
    """The arguments of the cell's derivative that are the same in all steps."""
    columns, padded, width = args[COLUMNS], args[PADDED], args[WIDTH]
    other, mine = args[OTHERS] * padded, tile.begin * SIZE
    others = columns * (args[WIDE] + width + 2) + args[OUTPUTS] * padded  # before d_vectors in sums
    d_vectors = tile.sums + (others * SIZE if tile.sums != 0 else 0)
    cell_args[field.UNITS], cell_args[field.STRIDE] = tile.end - tile.begin, padded
    cell_args[field.X_ROW], cell_args[field.R_ROW] = columns, args[KEPT] * padded
    cell_args[field.BIAS] = tile.bias + mine
    cell_args[field.H_BEFORE_ROW], cell_args[field.BEFORE_ROW] = width, other
    cell_args[field.VECTORS] = args[VECTORS_AT] + mine
    cell_args[field.D_VECTORS] = d_vectors + mine
    cell_args[field.D_AFTER_ROW], cell_args[field.D_BEFORE_ROW] = other, other
    cell_args[field.DR_ROW], cell_args[field.DX_ROW] = columns, columns


@njit(forceinline=True, error_model="numpy")
def gather_row(args, tile, step, i, filled):
    """Makes a sequence's row of a step ready: its incoming gradients and the states before."""
    outputs, width, padded = args[OUTPUTS], args[WIDTH], args[PADDED]
    other, place = args[OTHERS] * padded, filled + i
    b, length = row_of(args, tile.start + i), length_of(args, tile.start + i)
    t = time_of(args, step, length)
    int64_at(tile.t_at)[place], int64_at(tile.b_at)[place] = t, b
    d_h = tile.d_hidden + ((step & 1) * tile.rows + i) * width * SIZE
    d_s = tile.d_others + ((step & 1) * tile.rows + i) * other * SIZE
    if step == length - 1:
        clear(args, d_h, d_s)
        add_from(args, D_FINAL, b, d_h, d_s)
        if ends_reset(args, b):
            add_to(args, D_FRESH, b, d_h, d_s)
            clear(args, d_h, d_s)
    if args[DY] != 0:
        add(d_h, args[DY] + (t * args[DY_STEP] + b * args[DY_ROW]) * SIZE, outputs)
    add_from(args, D_EVERY, t * args[BATCH] + b, d_h, d_s)
    hidden = tile.h_rows + place * width * SIZE
    hit = is_reset(args, step, t, b)
    if hit or step == 0:
        load(args, FRESH if hit else INITIAL, b, hidden, tile.entry + i * other * SIZE)
    else:
        before = time_of(args, step - 1, length)
        source = args[Y] + (before * args[Y_STEP] + b * args[Y_ROW]) * SIZE
        copy(hidden, source, outputs, width)
    if args[W_HR] != 0:
        copy(tile.dh_rows + place * width * SIZE, d_h, width, width)
        row = slot_of(args, step) * args[BATCH] + tile.start + i
        m = args[PROJECTED] + row * padded * SIZE
        copy(tile.m_rows + place * padded * SIZE, m, args[UNITS], padded)


@njit(forceinline=True, error_model="numpy")
def run_cell(args, tile, step, live, filled, cell_args_at):
    """The cell's derivative of a step's rows."""
    columns, width, padded = args[COLUMNS], args[WIDTH], args[PADDED]
    other, rows, mine = args[OTHERS] * padded, tile.rows, tile.begin * SIZE
    now = step & 1  # gradients of states are read here and left at the other place
    place = slot_of(args, step) * args[BATCH] + tile.start
    before = tile.entry
    if step > 0:
        # where a reset came between, forward left the fresh states there
        previous = slot_of(args, step - 1) * args[BATCH] + tile.start
        before = args[HISTORY] + previous * other * SIZE
    d_after, d_after_row = tile.d_hidden + now * rows * width * SIZE, width
    d_before, d_before_row = tile.d_hidden + (1 - now) * rows * width * SIZE, width
    if args[W_HR] != 0:
        # h has another width here, and no cell with a projection reads it
        d_after, d_after_row, d_before, d_before_row = tile.dm, padded, tile.spare, 0
    cell_args = int64_at(cell_args_at)
    cell_args[field.ROWS] = live
    cell_args[field.X] = args[KEPT_AT] + place * columns * SIZE + mine
    cell_args[field.R] = args[KEPT_R] + place * args[KEPT] * padded * SIZE + mine
    cell_args[field.H_BEFORE] = tile.h_rows + filled * width * SIZE + mine
    cell_args[field.BEFORE] = before + mine
    cell_args[field.D_H_AFTER], cell_args[field.D_H_AFTER_ROW] = d_after + mine, d_after_row
    cell_args[field.D_AFTER] = tile.d_others + now * rows * other * SIZE + mine
    cell_args[field.DR] = tile.dr + filled * columns * SIZE + mine
    cell_args[field.DX] = tile.dx_gates + filled * columns * SIZE + mine
    cell_args[field.D_H_BEFORE], cell_args[field.D_H_BEFORE_ROW] = d_before + mine, d_before_row
    cell_args[field.D_BEFORE] = tile.d_others + (1 - now) * rows * other * SIZE + mine
    call(args[ROW_FUNCTION], (cell_args_at,))  # type: ignore[call-arg]  # numba's


@njit(forceinline=True, error_model="numpy")
def clear_padding(args, tile, step, live, filled):
    """Clears what the cell made of padding, which must not enter the products."""
    columns, units, padded, width = args[COLUMNS], args[UNITS], args[PADDED], args[WIDTH]
    gates, summed = args[GATES], args[SUMMED] != 0
    d_before = tile.d_hidden + (1 - (step & 1)) * tile.rows * width * SIZE
    kept = 0 if args[W_HR] != 0 else units
    for i in range(live):
        gate_r = tile.dr + (filled + i) * columns * SIZE
        gate_x = tile.dx_gates + (filled + i) * columns * SIZE
        if padded > units:
            for g in range(gates):
                offset = (g * padded + units) * SIZE
                copy(gate_r + offset, 0, 0, padded - units)
                if not summed:
                    copy(gate_x + offset, 0, 0, padded - units)
        beyond = gates * padded
        copy(gate_r + beyond * SIZE, 0, 0, columns - beyond)
        if not summed:
            copy(gate_x + beyond * SIZE, 0, 0, columns - beyond)
        copy(d_before + (i * width + kept) * SIZE, 0, 0, width - kept)


@njit(forceinline=True, error_model="numpy")
def carry_back(args, tile, team, step, live, filled):
    """Adds the recurrent product to the gradient of the state before a step."""
    width, gates = args[WIDTH], args[GATES] * args[PADDED]
    begin, end = (tile.begin, tile.end) if team.threads > 1 else (0, width)  # padded is width then
    weight, inner, panel = gate_matrix(args, args[W_HH], width)
    a = (tile.dr + filled * args[COLUMNS] * SIZE, args[COLUMNS], 1)
    b = (weight + begin // PANEL * panel * SIZE, inner, panel)
    c = (tile.d_hidden + ((1 - (step & 1)) * tile.rows * width + begin) * SIZE, width)
    product((live, gates, end - begin), a, b, c, True)


@njit(forceinline=True, error_model="numpy")
def give_before(args, tile, team, step, live):
    """Gives the gradients of states that were put in place before a step to their tensors."""
    width, other, to = args[WIDTH], args[OTHERS] * args[PADDED], 1 - (step & 1)
    for i in range(team.thread, live, team.threads):
        b = row_of(args, tile.start + i)
        t = time_of(args, step, length_of(args, tile.start + i))
        d_h = tile.d_hidden + (to * tile.rows + i) * width * SIZE
        d_s = tile.d_others + (to * tile.rows + i) * other * SIZE
        if is_reset(args, step, t, b):
            add_to(args, D_FRESH, b, d_h, d_s)
            clear(args, d_h, d_s)
        elif step == 0:
            add_to(args, D_INITIAL, b, d_h, d_s)


@njit(nogil=True, error_model="numpy")
def backward_tile(args, tile, team, accumulate, scale, phase):
    """All steps, last first, of a tile's sequences; returns the barrier's next phase.

    Each thread of a team gathers some rows and computes its units and a part of each gradient.
    """
    width, capacity = args[WIDTH], args[CHUNK] * args[TILE_ROWS]
    prepare(args, tile, team)
    cell_args_at: int = new_cell_args()  # type: ignore[call-arg]  # numba's
    fill_cell_args(args, tile, int64_at(cell_args_at))
    live, filled, chunks = int64(0), int64(0), int64(0)
    for step in range(args[STEPS] - 1, -1, -1):
        while live < tile.rows and length_of(args, tile.start + live) > step:
            live += 1
        if live == 0:
            continue
        if filled + live > capacity:
            phase = flush(args, tile, team, filled, accumulate or chunks > 0, scale, phase)
            filled, chunks = int64(0), chunks + 1
            phase = barrier(team, phase)
        for i in range(team.thread, live, team.threads):
            gather_row(args, tile, step, i, filled)
        if args[W_HR] != 0:
            outputs, padded = args[OUTPUTS], args[PADDED]
            a = (tile.d_hidden + (step & 1) * tile.rows * width * SIZE, width, 1)
            b = (args[W_HR], PANEL, PANEL * outputs)
            product((live, outputs, padded), a, b, (tile.dm, padded), False)
        phase = barrier(team, phase)
        run_cell(args, tile, step, live, filled, cell_args_at)
        if tile.end == args[PADDED]:  # the last thread has the padding
            clear_padding(args, tile, step, live, filled)
        if args[W_HH] != 0:
            phase = barrier(team, phase)
            carry_back(args, tile, team, step, live, filled)
        phase = barrier(team, phase)
        if step == 0 or args[RESET] != 0:
            give_before(args, tile, team, step, live)
        filled += live
    if filled > 0:
        phase = flush(args, tile, team, filled, accumulate or chunks > 0, scale, phase)
    return barrier(team, phase)


def backward(args_at, task, running):
    """A task's share of the batch tiles: every TASKS-th one, or its part of its team's tiles."""
    args, scale = int64_at(args_at), float64_at(args_at)[DROP_SCALE]
    rows, size = args[TILE_ROWS], args[TEAM_SIZE]
    place, thread, teams, phase = task // size, task % size, args[TASKS] // size, int64(1)
    if running != args[TASKS]:
        # threads of a team that do not run together would wait for ever: the first does it all
        if thread > 0:
            return
        size = int64(1)
    team = Team(thread, size, args[COUNTERS] + place * COUNTER_STRIDE * 8)
    scratch = args[SCRATCH] + place * args[SCRATCH_BYTES]
    sums = args[SUMS]
    if sums != 0:
        sums += place * args[SUMS_BYTES]
    if sums != 0 and thread == 0:
        # products write the sums of the matrices, unless a team may have no step at all
        blank = args[SUMS_BYTES] // SIZE
        if args[WRITES] != 0:
            blank = 2 * args[COLUMNS] + args[VECTORS] * args[PADDED]
        copy(sums + args[SUMS_BYTES] - blank * SIZE, 0, 0, blank)
    for start in range(place * rows, args[BATCH], teams * rows):
        accumulate = args[WRITES] == 0 or start > place * rows
        tile = tile_of(args, start, min(rows, args[BATCH] - start), scratch, sums, team)
        phase = backward_tile(args, tile, team, accumulate, scale, phase)
