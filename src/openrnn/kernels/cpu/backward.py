"""The backward time loop of one layer and direction, the same for every cell.

One of the kernel's arguments is the address of the cell's `derivative_rows`, which `codegen.numba`
prints. `loops` compiles the text of this file once for each dtype, put in place of float32.

Rows of all steps are appended to the buffers of a chunk; `flush` computes weight, bias and input
gradients as products over the rows of a full chunk.
"""

from typing import NamedTuple

from numba import int64, njit

from openrnn.kernels.cpu import cell_args as field
from openrnn.kernels.cpu.args_type import loop_args_at
from openrnn.kernels.cpu.gradients import column_sums_float32 as column_sums
from openrnn.kernels.cpu.gradients import gate_product_float32 as gate_product
from openrnn.kernels.cpu.gradients import outer_product_16bit_float32 as outer_product_16bit
from openrnn.kernels.cpu.gradients import packed_memory_float32 as packed_memory
from openrnn.kernels.cpu.gradients import packed_product_float32 as packed_product
from openrnn.kernels.cpu.gradients import pairs_products
from openrnn.kernels.cpu.memory import int64_at
from openrnn.kernels.cpu.product import product_float32 as product
from openrnn.kernels.cpu.regions import call, new_cell_args
from openrnn.kernels.cpu.rows import add_float32 as add
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.rows import drop_float32 as drop
from openrnn.kernels.cpu.rows import ends_reset, is_reset, length_of, row_of, slot_of, time_of
from openrnn.kernels.cpu.rows import gather_float32 as gather
from openrnn.kernels.cpu.rows import spread_float32 as spread
from openrnn.kernels.cpu.states import add_from_float32 as add_from
from openrnn.kernels.cpu.states import add_to_float32 as add_to
from openrnn.kernels.cpu.states import clear_float32 as clear
from openrnn.kernels.cpu.states import load_float32 as load
from openrnn.kernels.cpu.team import barrier, part_of, team_of
from openrnn.kernels.cpu.vectors import PANEL as PANELS
from openrnn.kernels.cpu.vectors import SIZES

SIZE, PANEL = SIZES["float32"], PANELS["float32"]


class Tile(NamedTuple):
    """Sequences that run together, the units of one thread, and addresses of what it writes.

    `capacity` is the rows of a chunk, `other` is (states - 1) * padded.
    """

    start: int  # the position of the first sequence
    rows: int
    begin: int  # this thread's units: [begin, end)
    end: int
    d_hidden: int  # [2, rows, h_width]: gradient of the emitted state, by steps in turn
    d_others: int  # [2, rows, other]
    entry: int  # [rows, other]: states that were put in place before a step
    dm: int  # [rows, padded]: gradient before the projection
    dr: int  # [capacity, columns]
    dx_gates: int  # [capacity, columns]: dr itself, unless the gates take x and r apart
    h_rows: int  # [capacity, h_width]: the state before each step
    x_rows: int  # [capacity, x_width], with an input matrix
    dh_rows: int  # [capacity, h_width], with a projection
    m_rows: int  # [capacity, padded], with a projection
    bias: int  # [columns]
    spare: int  # [columns]: partial sums; the gradient of h that no projected cell has
    t_at: int  # [capacity] int64: t of each row
    b_at: int  # [capacity] int64: b of each row
    packed: tuple[int, int]  # memory of `packed_product`: for panels, for this thread's strip
    sums: int  # weight and bias gradients, as `LoopArgs.sums` says; 0 where not wanted
    rounded: int  # this thread's part of `LoopArgs.rounded`


@njit(forceinline=True, error_model="numpy")
def tile_of(args, start, rows, scratch, sums, rounded, team):
    """A tile whose rows lie in this scratch."""
    padded, columns, h_width = args.padded, args.columns, args.h_width
    other, capacity = (args.states - 1) * padded, args.chunk * args.tile_rows
    projecting = args.w_hr != 0
    begin, end = part_of(padded, PANEL, team)
    d_hidden = scratch
    d_others = d_hidden + 2 * rows * h_width * SIZE
    entry = d_others + 2 * rows * other * SIZE
    dm = entry + rows * other * SIZE
    dr = dm + rows * padded * SIZE
    dx_gates = dr if args.summed != 0 else dr + capacity * columns * SIZE
    h_rows = dx_gates + capacity * columns * SIZE
    x_rows = h_rows + capacity * h_width * SIZE
    dh_rows = x_rows + capacity * args.x_width * SIZE
    m_rows = dh_rows + (capacity * h_width * SIZE if projecting else 0)
    bias = m_rows + (capacity * padded * SIZE if projecting else 0)
    spare = bias + columns * SIZE
    t_at = spare + columns * SIZE
    packed = packed_memory(args, team, t_at + 16 * capacity, capacity)
    return Tile(
        start, rows, begin, end, d_hidden, d_others, entry, dm, dr, dx_gates, h_rows, x_rows,
        dh_rows, m_rows, bias, spare, t_at, t_at + 8 * capacity, packed, sums, rounded,
    )  # fmt: skip


@njit(nogil=True, error_model="numpy")
def weight_gradients(args, tile, team, count, accumulate, phase):
    """Adds a chunk's part of weight and bias gradients; returns the barrier's next phase."""
    columns, h_width, x_width, padded = args.columns, args.h_width, args.x_width, args.padded
    outputs, thread, threads = args.outputs, team.thread, team.threads
    begin, end = part = part_of(args.gates * padded, PANEL, team)
    ends = end if threads > 1 else columns
    d_w_ih, d_w_hh = tile.sums, tile.sums + columns * x_width * SIZE
    d_w_hr = d_w_hh + columns * h_width * SIZE
    d_bias_x = d_w_hr + outputs * padded * SIZE
    if args.d_w_hh != 0:
        d_w_ih, d_w_hh = args.d_w_ih, args.d_w_hh
    dr, dx, x = (tile.dr, columns), (tile.dx_gates, columns), (tile.x_rows, x_width)
    h, memory = (tile.h_rows, h_width), tile.packed
    both = args.pairs_outer != 0 and args.summed != 0 and args.skip == 0
    if args.store_16bit != 0:
        outer_product_16bit(args, part, count, dr, h, d_w_hh, tile.rounded)
    elif not both:
        phase = packed_product(args, team, phase, part, count, dr, h, memory, d_w_hh, accumulate)
    if args.w_hr != 0:
        dh, m = (tile.dh_rows, h_width), (tile.m_rows, padded)
        rows = (outputs * thread // threads, outputs * (thread + 1) // threads)
        phase = packed_product(args, team, phase, rows, count, dh, m, memory, d_w_hr, accumulate)
    column_sums(d_bias_x, tile.dx_gates, (count, columns), tile.spare, (begin, ends))
    if args.summed == 0:
        column_sums(d_bias_x + columns * SIZE, tile.dr, (count, columns), tile.spare, (begin, ends))
    if args.skip != 0:
        return phase
    for i in range(count * thread // threads, count * (thread + 1) // threads):
        t, b = int64_at(tile.t_at)[i], int64_at(tile.b_at)[i]
        source = args.x + (t * args.x_step + b * args.x_row) * SIZE
        target = tile.x_rows + i * x_width * SIZE
        if args.drop != 0:
            drop(target, source, args.inputs, t, b, args, False)
            copy(target + args.inputs * SIZE, 0, 0, x_width - args.inputs)
        else:
            copy(target, source, args.inputs, x_width)
    phase = barrier(team, phase)
    if args.store_16bit != 0:
        outer_product_16bit(args, part, count, dx, x, d_w_ih, tile.rounded)
    elif both:
        b, c = (h, x), (d_w_hh, d_w_ih)
        phase = pairs_products(args, team, phase, part, count, dr, b, memory, c, accumulate)
    else:
        phase = packed_product(args, team, phase, part, count, dx, x, memory, d_w_ih, accumulate)
    return barrier(team, phase)


@njit(nogil=True, error_model="numpy")
def input_gradients(args, tile, team, count):
    """Writes the gradients of x of a chunk's rows."""
    inputs, columns, x_width = args.inputs, args.columns, args.x_width
    first = count * team.thread // team.threads
    last = count * (team.thread + 1) // team.threads
    if last > first and args.skip == 0:
        a, c = tile.dx_gates + first * columns * SIZE, tile.x_rows + first * x_width * SIZE
        sizes = (x_width, 0, x_width)
        gate_product(args, tile.rounded, last - first, a, args.w_ih, sizes, c, False, False)
    for i in range(first, last):
        t, b = int64_at(tile.t_at)[i], int64_at(tile.b_at)[i]
        target = args.dx + (t * args.dx_step + b * args.dx_row) * SIZE
        source = tile.x_rows + i * x_width * SIZE
        if args.skip != 0:
            gather(args, target, tile.dx_gates + i * columns * SIZE)
        elif args.drop != 0:
            drop(target, source, inputs, t, b, args, args.dx_add != 0)
        elif args.dx_add != 0:
            add(target, source, inputs)
        else:
            copy(target, source, inputs, inputs)


@njit(nogil=True, error_model="numpy")
def flush(args, tile, team, count, accumulate, phase):
    """This thread's share of all gradients of a chunk's rows; returns the barrier's next phase."""
    if tile.sums != 0:
        phase = weight_gradients(args, tile, team, count, accumulate, phase)
    if args.dx != 0:
        input_gradients(args, tile, team, count)
    return phase


@njit(forceinline=True, error_model="numpy")
def prepare(args, tile, team):
    """The gradients of sequences without steps, and the sum of the biases."""
    for i in range(team.thread, tile.rows, team.threads):
        if length_of(args, tile.start + i) == 0:
            b = row_of(args, tile.start + i)
            d_h = tile.d_hidden + i * args.h_width * SIZE
            d_s = tile.d_others + i * (args.states - 1) * args.padded * SIZE
            clear(args, d_h, d_s)
            add_from(args, args.d_final, b, d_h, d_s)
            add_to(args, args.d_initial, b, d_h, d_s)
    if team.thread == 0:
        copy(tile.bias, 0, 0, args.columns)
        spread(tile.bias, args.bias_x, args.gates, args.units, args.padded)
        spread(tile.bias, args.bias_r, args.gates, args.units, args.padded)


@njit(forceinline=True, error_model="numpy")
def fill_cell_args(args, tile, cell_args):
    """The arguments of the cell's derivative that are the same in all steps."""
    columns, padded, h_width = args.columns, args.padded, args.h_width
    other, mine = (args.states - 1) * padded, tile.begin * SIZE
    before = columns * (args.x_width + h_width + 2) + args.outputs * padded
    d_vectors = tile.sums + (before * SIZE if tile.sums != 0 else 0)
    cell_args[field.UNITS], cell_args[field.STRIDE] = tile.end - tile.begin, padded
    cell_args[field.X_ROW], cell_args[field.R_ROW] = columns, args.saved_sides * padded
    cell_args[field.BIAS] = tile.bias + mine
    cell_args[field.H_BEFORE_ROW], cell_args[field.BEFORE_ROW] = h_width, other
    cell_args[field.VECTORS] = args.unit_vectors + mine
    cell_args[field.D_VECTORS] = d_vectors + mine
    cell_args[field.D_AFTER_ROW], cell_args[field.D_BEFORE_ROW] = other, other
    cell_args[field.DR_ROW], cell_args[field.DX_ROW] = columns, columns


@njit(forceinline=True, error_model="numpy")
def gather_row(args, tile, step, i, filled):
    """Makes a sequence's row of a step ready: its incoming gradients and the states before."""
    outputs, h_width, padded = args.outputs, args.h_width, args.padded
    other, row = (args.states - 1) * padded, filled + i
    b, length = row_of(args, tile.start + i), length_of(args, tile.start + i)
    t = time_of(args, step, length)
    int64_at(tile.t_at)[row], int64_at(tile.b_at)[row] = t, b
    d_h = tile.d_hidden + ((step & 1) * tile.rows + i) * h_width * SIZE
    d_s = tile.d_others + ((step & 1) * tile.rows + i) * other * SIZE
    if step == length - 1:
        clear(args, d_h, d_s)
        add_from(args, args.d_final, b, d_h, d_s)
        if ends_reset(args, b):
            add_to(args, args.d_reset_state, b, d_h, d_s)
            clear(args, d_h, d_s)
    if args.dy != 0:
        add(d_h, args.dy + (t * args.dy_step + b * args.dy_row) * SIZE, outputs)
    add_from(args, args.d_all_states, t * args.batch + b, d_h, d_s)
    hidden = tile.h_rows + row * h_width * SIZE
    hit = is_reset(args, step, t, b)
    if hit or step == 0:
        group = args.reset_state if hit else args.initial
        load(args, group, b, hidden, tile.entry + i * other * SIZE)
    else:
        before = time_of(args, step - 1, length)
        source = args.y + (before * args.y_step + b * args.y_row) * SIZE
        copy(hidden, source, outputs, h_width)
    if args.w_hr != 0:
        copy(tile.dh_rows + row * h_width * SIZE, d_h, h_width, h_width)
        saved_row = slot_of(args, step) * args.batch + tile.start + i
        m = args.saved_unprojected + saved_row * padded * SIZE
        copy(tile.m_rows + row * padded * SIZE, m, args.units, padded)


@njit(forceinline=True, error_model="numpy")
def run_cell(args, tile, step, live, filled, cell_args_at):
    """The cell's derivative of a step's rows."""
    columns, h_width, padded = args.columns, args.h_width, args.padded
    other, rows, mine = (args.states - 1) * padded, tile.rows, tile.begin * SIZE
    now = step & 1  # gradients of states are read here and left at the other place
    first = slot_of(args, step) * args.batch + tile.start
    before = tile.entry
    if step > 0:
        # where a reset came between, forward left the reset states there
        previous = slot_of(args, step - 1) * args.batch + tile.start
        before = args.saved_states + previous * other * SIZE
    d_after, d_after_row = tile.d_hidden + now * rows * h_width * SIZE, h_width
    d_before, d_before_row = tile.d_hidden + (1 - now) * rows * h_width * SIZE, h_width
    if args.w_hr != 0:
        # h has another width, and no cell with a projection reads it
        d_after, d_after_row, d_before, d_before_row = tile.dm, padded, tile.spare, 0
    cell_args = int64_at(cell_args_at)
    cell_args[field.ROWS] = live
    cell_args[field.X] = args.saved_gates + first * columns * SIZE + mine
    cell_args[field.R] = args.saved_recurrent + first * args.saved_sides * padded * SIZE + mine
    cell_args[field.H_BEFORE] = tile.h_rows + filled * h_width * SIZE + mine
    cell_args[field.BEFORE] = before + mine
    cell_args[field.D_H_AFTER], cell_args[field.D_H_AFTER_ROW] = d_after + mine, d_after_row
    cell_args[field.D_AFTER] = tile.d_others + now * rows * other * SIZE + mine
    cell_args[field.DR] = tile.dr + filled * columns * SIZE + mine
    cell_args[field.DX] = tile.dx_gates + filled * columns * SIZE + mine
    cell_args[field.D_H_BEFORE], cell_args[field.D_H_BEFORE_ROW] = d_before + mine, d_before_row
    cell_args[field.D_BEFORE] = tile.d_others + (1 - now) * rows * other * SIZE + mine
    call(args.row_function, (cell_args_at,))  # type: ignore[call-arg]  # numba's


@njit(forceinline=True, error_model="numpy")
def clear_padding(args, tile, step, live, filled):
    """Clears what the cell made of padding, which must not enter the products."""
    columns, units, padded, h_width = args.columns, args.units, args.padded, args.h_width
    gates, summed = args.gates, args.summed != 0
    d_before = tile.d_hidden + (1 - (step & 1)) * tile.rows * h_width * SIZE
    used = 0 if args.w_hr != 0 else units
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
        copy(d_before + (i * h_width + used) * SIZE, 0, 0, h_width - used)


@njit(forceinline=True, error_model="numpy")
def carry_back(args, tile, team, step, live, filled):
    """Adds the recurrent product to the gradient of the state before a step."""
    h_width = args.h_width
    begin, end = part_of(h_width, PANEL, team)
    if begin == end:
        return
    a = tile.dr + filled * args.columns * SIZE
    c = tile.d_hidden + (1 - (step & 1)) * tile.rows * h_width * SIZE
    # every other step goes backwards, and begins with what the one before left in the caches
    sizes, backwards = (h_width, begin, end), (step & 1) != 0
    gate_product(args, tile.rounded, live, a, args.w_hh, sizes, c, True, backwards)


@njit(forceinline=True, error_model="numpy")
def give_before(args, tile, team, step, live):
    """Gives the gradients of states that were put in place before a step to their tensors."""
    h_width, other, to = args.h_width, (args.states - 1) * args.padded, 1 - (step & 1)
    for i in range(team.thread, live, team.threads):
        b = row_of(args, tile.start + i)
        t = time_of(args, step, length_of(args, tile.start + i))
        d_h = tile.d_hidden + (to * tile.rows + i) * h_width * SIZE
        d_s = tile.d_others + (to * tile.rows + i) * other * SIZE
        if is_reset(args, step, t, b):
            add_to(args, args.d_reset_state, b, d_h, d_s)
            clear(args, d_h, d_s)
        elif step == 0:
            add_to(args, args.d_initial, b, d_h, d_s)


@njit(nogil=True, error_model="numpy")
def backward_tile(args, tile, team, accumulate, phase):
    """All steps, last first, of a tile's sequences; returns the barrier's next phase.

    Each thread of a team gathers some rows and computes its units and a part of each gradient.
    """
    h_width, capacity = args.h_width, args.chunk * args.tile_rows
    prepare(args, tile, team)
    cell_args_at: int = new_cell_args()  # type: ignore[call-arg]  # numba's
    fill_cell_args(args, tile, int64_at(cell_args_at))
    live, filled, chunks = int64(0), int64(0), int64(0)
    for step in range(args.steps - 1, -1, -1):
        while live < tile.rows and length_of(args, tile.start + live) > step:
            live += 1
        if live == 0:
            continue
        if filled + live > capacity:
            phase = flush(args, tile, team, filled, accumulate or chunks > 0, phase)
            filled, chunks = int64(0), chunks + 1
            phase = barrier(team, phase)
        for i in range(team.thread, live, team.threads):
            gather_row(args, tile, step, i, filled)
        if args.w_hr != 0:
            phase = barrier(team, phase)  # each thread's units need all columns of y
            outputs, padded, begin = args.outputs, args.padded, tile.begin
            a = (tile.d_hidden + (step & 1) * tile.rows * h_width * SIZE, h_width, 1)
            b = (args.w_hr + begin * outputs * SIZE, PANEL, PANEL * outputs)
            target = (tile.dm + begin * SIZE, padded)
            product((live, outputs, tile.end - begin), a, b, target, False, False)
        phase = barrier(team, phase)
        run_cell(args, tile, step, live, filled, cell_args_at)
        if tile.end == args.padded:  # the last thread has the padding
            clear_padding(args, tile, step, live, filled)
        if args.w_hh != 0:
            phase = barrier(team, phase)
            carry_back(args, tile, team, step, live, filled)
        phase = barrier(team, phase)
        if step == 0 or args.reset != 0:
            give_before(args, tile, team, step, live)
        filled += live
    if filled > 0:
        phase = flush(args, tile, team, filled, accumulate or chunks > 0, phase)
    return barrier(team, phase)


def backward(args_at, task, running):
    """A task's share of the batch tiles: every `tasks`-th one, or its part of its team's tiles."""
    args, phase = loop_args_at(args_at), int64(1)
    number, teams, team = team_of(args, task, running)
    if team.thread >= team.threads:
        return
    rows = args.tile_rows
    scratch = args.scratch + number * args.scratch_bytes
    sums, rounded = args.sums, args.rounded + task * args.rounded_bytes
    if sums != 0:
        sums += number * args.sums_bytes
    if sums != 0 and team.thread == 0:
        # products write the sums of the matrices, unless a team may have no step at all
        cleared = args.sums_bytes // SIZE
        if args.overwrite != 0:
            cleared = 2 * args.columns + args.vectors * args.padded
        copy(sums + args.sums_bytes - cleared * SIZE, 0, 0, cleared)
    for start in range(number * rows, args.batch, teams * rows):
        accumulate = args.overwrite == 0 or start > number * rows
        count = min(rows, args.batch - start)
        tile = tile_of(args, start, count, scratch, sums, rounded, team)
        phase = backward_tile(args, tile, team, accumulate, phase)
