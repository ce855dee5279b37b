"""The backward time loop of one layer and direction, the same for every cell.

One of the kernel's arguments is the address of the cell's `derivative_rows`, which `codegen.numba`
prints. `loops` compiles the text of this file once for each dtype, put in place of float32.

Rows of all steps are appended to chunk buffers; a full chunk is flushed: weight, bias and input
gradients are products over its rows.
"""

from numba import njit

from openrnn.kernels.cpu import steps as of
from openrnn.kernels.cpu.args import *  # the places of the arguments, all of them constants
from openrnn.kernels.cpu.layout import STRIP_ELEMENTS, STRIP_ROWS
from openrnn.kernels.cpu.memory import float64_at, int64_at
from openrnn.kernels.cpu.product import product_float32 as product
from openrnn.kernels.cpu.regions import call, new_step
from openrnn.kernels.cpu.rows import add_float32 as add
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.rows import drop_float32 as drop
from openrnn.kernels.cpu.rows import ends_reset, is_reset, length_of, row_of, slot_of, time_of
from openrnn.kernels.cpu.rows import spread_float32 as spread
from openrnn.kernels.cpu.team import COUNTER_STRIDE, barrier, share_of
from openrnn.kernels.cpu.vectors import PANEL as PANELS
from openrnn.kernels.cpu.vectors import SIZES

SIZE, PANEL = SIZES["float32"], PANELS["float32"]


@njit(nogil=True, error_model="numpy")
def add_states(args, group, offset, hidden, others):
    """Adds a row's gradients, where given, at a row offset of their tensors."""
    outputs, units, padded = args[OUTPUTS], args[UNITS], args[PADDED]
    if args[group] != 0:
        add(hidden, args[group] + offset * outputs * SIZE, outputs)
    for k in range(args[OTHERS]):
        if args[group + 1 + k] != 0:
            source = args[group + 1 + k] + offset * units * SIZE
            add(others + k * padded * SIZE, source, units)


@njit(nogil=True, error_model="numpy")
def give_states(args, group, offset, hidden, others):
    """Adds a row's gradients to those of initial or fresh states, where wanted."""
    outputs, units, padded = args[OUTPUTS], args[UNITS], args[PADDED]
    if args[group] != 0:
        add(args[group] + offset * outputs * SIZE, hidden, outputs)
    for k in range(args[OTHERS]):
        if args[group + 1 + k] != 0:
            target = args[group + 1 + k] + offset * units * SIZE
            add(target, others + k * padded * SIZE, units)


@njit(nogil=True, error_model="numpy")
def clear(hidden, others, width, other):
    copy(hidden, 0, 0, width)
    copy(others, 0, 0, other)


@njit(nogil=True, error_model="numpy")
def strides(args, rows, columns):
    """The inner and the panel stride of a gate matrix: in panels, or as it is."""
    if args[PACKED] != 0:
        return PANEL, PANEL * rows
    return columns, PANEL


@njit(nogil=True, error_model="numpy")
def column_sums(sums, rows, count, columns, partial, begin, end):
    """sums[columns] += the sum over rows [count, columns], added up apart: it rounds less.

    Of the columns [begin, end).
    """
    partial, rows, wanted = partial + begin * SIZE, rows + begin * SIZE, end - begin
    copy(partial, 0, 0, wanted)
    for i in range(count):
        add(partial, rows + i * columns * SIZE, wanted)
    add(sums + begin * SIZE, partial, wanted)


@njit(nogil=True, error_model="numpy")
def outer_product(begin, end, count, columns, a, a_row, b, c, accumulate):
    """c[rows, columns] (+)= a[count, rows] transposed times b[count, columns].

    Of the rows [begin, end).
    """
    # so many columns of a that they stay in the second-level cache while b passes
    strip = max(STRIP_ROWS, STRIP_ELEMENTS // count)
    for first in range(begin, end, strip):
        product(
            min(strip, end - first), count, columns, a + first * SIZE, 1, a_row, b, columns, PANEL,
            c + first * columns * SIZE, columns, accumulate,
        )  # fmt: skip


@njit(nogil=True, error_model="numpy")
def flush(
    args,
    count,
    dr,
    dx_gates,
    h_rows,
    dh_rows,
    m_rows,
    x_rows,
    spare,
    places,
    sums,
    accumulate,
    scale,
    thread,
    threads,
    counter,
    phase,
):
    """Weight, bias and input gradients of the `count` rows of a chunk, this thread's share of each.

    Returns the next phase of the team's barrier.
    """
    inputs, units, outputs, padded = args[INPUTS], args[UNITS], args[OUTPUTS], args[PADDED]
    columns, width, wide, gates = args[COLUMNS], args[WIDTH], args[WIDE], args[GATES] * args[PADDED]
    at = int64_at(places)  # [2, chunk rows]: t and b of each row
    b_at = int64_at(places + 8 * args[CHUNK] * args[TILE_ROWS])
    begin, end, ends = 0, gates, columns
    if threads > 1:
        begin, end = (
            share_of(gates, PANEL, thread, threads),
            share_of(gates, PANEL, thread + 1, threads),
        )
        ends = end
    first, last = count * thread // threads, count * (thread + 1) // threads
    if sums != 0:
        d_w_hh = sums + columns * wide * SIZE
        d_w_hr = d_w_hh + columns * width * SIZE
        d_bias_x = d_w_hr + outputs * padded * SIZE
        outer_product(begin, end, count, width, dr, columns, h_rows, d_w_hh, accumulate)
        if args[W_HR] != 0:
            outer_product(0, outputs, count, padded, dh_rows, width, m_rows, d_w_hr, accumulate)
        column_sums(d_bias_x, dx_gates, count, columns, spare, begin, ends)
        if args[SUMMED] == 0:
            column_sums(d_bias_x + columns * SIZE, dr, count, columns, spare, begin, ends)
        if args[SKIP] == 0:
            for i in range(first, last):
                source = args[X] + (at[i] * args[X_STEP] + b_at[i] * args[X_ROW]) * SIZE
                target = x_rows + i * wide * SIZE
                if args[DROP] != 0:
                    drop(target, source, inputs, at[i], b_at[i], args, scale, False)
                    copy(target + inputs * SIZE, 0, 0, wide - inputs)
                else:
                    copy(target, source, inputs, wide)
            phase = barrier(counter, threads, phase)
            outer_product(begin, end, count, wide, dx_gates, columns, x_rows, sums, accumulate)
            phase = barrier(counter, threads, phase)
    if args[DX] == 0:
        return phase
    if args[SKIP] != 0:
        for i in range(count):
            copy(x_rows + i * wide * SIZE, dx_gates + i * columns * SIZE, units, wide)
            for g in range(1, args[GATES]):
                add(x_rows + i * wide * SIZE, dx_gates + (i * columns + g * padded) * SIZE, units)
    elif last > first:
        inner, panel = strides(args, gates, wide)
        product(
            last - first, gates, wide, dx_gates + first * columns * SIZE, columns, 1, args[W_IH],
            inner, panel, x_rows + first * wide * SIZE, wide, False,
        )  # fmt: skip
    for i in range(first, last):
        target = args[DX] + (at[i] * args[DX_STEP] + b_at[i] * args[DX_ROW]) * SIZE
        source = x_rows + i * wide * SIZE
        if args[DROP] != 0:
            drop(target, source, inputs, at[i], b_at[i], args, scale, args[DX_ADD] != 0)
        elif args[DX_ADD] != 0:
            add(target, source, inputs)
        else:
            copy(target, source, inputs, inputs)
    return phase


@njit(nogil=True, error_model="numpy")
def load_fresh_or_initial(args, hit, b, hidden, others):
    """The states that were put in place before a step."""
    outputs, units, padded = args[OUTPUTS], args[UNITS], args[PADDED]
    group = TAIL + 1 + args[OTHERS] if hit else TAIL
    given = args[group]
    copy(hidden, given + b * outputs * SIZE if given != 0 else 0, outputs, args[WIDTH])
    for k in range(args[OTHERS]):
        given = args[group + 1 + k]
        source = given + b * units * SIZE if given != 0 else 0
        copy(others + k * padded * SIZE, source, units, padded)


@njit(nogil=True, error_model="numpy")
def backward_tile(
    args, start, rows, scratch, sums, accumulate, scale, thread, threads, counter, phase
):
    """All steps, last first, of the sequences at positions [start, start + rows).

    Of the threads of a team, each copies some rows and computes some units and a part of each
    gradient.
    Returns the next phase of the team's barrier.
    """
    steps, batch, units, outputs = args[STEPS], args[BATCH], args[UNITS], args[OUTPUTS]
    padded, columns, width, wide = args[PADDED], args[COLUMNS], args[WIDTH], args[WIDE]
    states, kept_row, summed = 1 + args[OTHERS], args[KEPT] * padded, args[SUMMED] != 0
    d_initial, d_fresh = TAIL + 4 * states, TAIL + 5 * states
    d_final, d_every = TAIL + 6 * states, TAIL + 7 * states
    other, gates = (states - 1) * padded, args[GATES] * padded
    capacity = args[CHUNK] * args[TILE_ROWS]
    projecting = args[W_HR] != 0
    carry_h = scratch  # [2, rows, width]: gradient of the emitted state
    carry_s = carry_h + 2 * rows * width * SIZE  # [2, rows, other]
    entry = carry_s + 2 * rows * other * SIZE  # [rows, other]
    dm = entry + rows * other * SIZE  # [rows, padded]: before the projection
    dr = dm + rows * padded * SIZE  # [capacity, columns]
    dx_gates = dr  # the same, unless the gates take x and r apart
    h_rows = dr + capacity * columns * SIZE  # [capacity, width]: the state before each step
    if not summed:
        dx_gates, h_rows = h_rows, h_rows + capacity * columns * SIZE
    x_rows = h_rows + capacity * width * SIZE  # [capacity, wide]
    dh_rows = x_rows + capacity * wide * SIZE  # [capacity, width], with a projection
    m_rows = dh_rows + (capacity * width * SIZE if projecting else 0)  # [capacity, padded]
    bias = m_rows + (capacity * padded * SIZE if projecting else 0)  # [columns]
    spare = bias + columns * SIZE  # [columns]: partial sums; what a projected cell says of h
    places = spare + columns * SIZE  # [2, capacity] int64
    t_at, b_at = int64_at(places), int64_at(places + 8 * capacity)
    vectors = sums  # where the gradients of per-unit vectors go
    if sums != 0:
        vectors += (columns * (wide + width + 2) + outputs * padded) * SIZE

    begin, end, w_begin, w_end = 0, padded, 0, width
    if threads > 1:  # width and padded are the same then
        begin, end = (
            share_of(padded, PANEL, thread, threads),
            share_of(padded, PANEL, thread + 1, threads),
        )
        w_begin, w_end = begin, end
    mine = begin * SIZE
    for i in range(thread, rows, threads):
        if length_of(args, start + i) == 0:
            b = row_of(args, start + i)
            d_h, d_s = carry_h + i * width * SIZE, carry_s + i * other * SIZE  # nobody else's
            clear(d_h, d_s, width, other)
            add_states(args, d_final, b, d_h, d_s)
            give_states(args, d_initial, b, d_h, d_s)

    if thread == 0:
        copy(bias, 0, 0, columns)
        spread(bias, args[BIAS_X], args[GATES], units, padded, SIZE)
        spread(bias, args[BIAS_R], args[GATES], units, padded, SIZE)
    step_at: int = new_step()  # type: ignore[call-arg]  # numba's
    fields = int64_at(step_at)
    fields[of.UNITS], fields[of.STRIDE] = end - begin, padded
    fields[of.X_ROW], fields[of.R_ROW], fields[of.BIAS] = columns, kept_row, bias + mine
    fields[of.H_BEFORE_ROW], fields[of.BEFORE_ROW] = width, other
    fields[of.VECTORS], fields[of.D_VECTORS] = args[VECTORS_AT] + mine, vectors + mine
    fields[of.D_AFTER_ROW], fields[of.D_BEFORE_ROW] = other, other
    fields[of.DR_ROW], fields[of.DX_ROW] = columns, columns
    live, filled = 0, 0
    for step in range(steps - 1, -1, -1):
        while live < rows and length_of(args, start + live) > step:
            live += 1
        if live == 0:
            continue
        if filled + live > capacity:
            phase = flush(
                args, filled, dr, dx_gates, h_rows, dh_rows, m_rows, x_rows, spare, places,
                sums, accumulate, scale, thread, threads, counter, phase,
            )  # fmt: skip
            filled, accumulate = 0, True
            phase = barrier(counter, threads, phase)
        slot = slot_of(args, step)
        now = step & 1  # carries are read here and left at the other place
        for i in range(thread, live, threads):
            b, length = row_of(args, start + i), length_of(args, start + i)
            t = time_of(args, step, length)
            t_at[filled + i], b_at[filled + i] = t, b
            d_h = carry_h + (now * rows + i) * width * SIZE
            d_s = carry_s + (now * rows + i) * other * SIZE
            if step == length - 1:
                clear(d_h, d_s, width, other)
                add_states(args, d_final, b, d_h, d_s)
                if ends_reset(args, b):
                    give_states(args, d_fresh, b, d_h, d_s)
                    clear(d_h, d_s, width, other)
            if args[DY] != 0:
                add(d_h, args[DY] + (t * args[DY_STEP] + b * args[DY_ROW]) * SIZE, outputs)
            add_states(args, d_every, t * batch + b, d_h, d_s)
            hidden = h_rows + (filled + i) * width * SIZE
            hit = is_reset(args, step, t, b)
            if hit or step == 0:
                load_fresh_or_initial(args, hit, b, hidden, entry + i * other * SIZE)
            else:
                before = time_of(args, step - 1, length)
                source = args[Y] + (before * args[Y_STEP] + b * args[Y_ROW]) * SIZE
                copy(hidden, source, outputs, width)
            if projecting:
                copy(dh_rows + (filled + i) * width * SIZE, d_h, width, width)
                m = args[PROJECTED] + (slot * batch + start + i) * padded * SIZE
                copy(m_rows + (filled + i) * padded * SIZE, m, units, padded)
        if projecting:
            product(
                live, outputs, padded, carry_h + now * rows * width * SIZE, width, 1, args[W_HR],
                PANEL, PANEL * outputs, dm, padded, False,
            )  # fmt: skip
        place = slot * batch + start
        old = entry
        if step > 0:
            # where a reset came between, forward left the fresh states there
            old = args[HISTORY] + (slot_of(args, step - 1) * batch + start) * other * SIZE
        d_h, d_h_row = carry_h + now * rows * width * SIZE, width
        ds_h = carry_h + (1 - now) * rows * width * SIZE
        ds_to, ds_row = ds_h, width
        if projecting:
            # h has another width here, and no cell with a projection reads it
            d_h, d_h_row, ds_to, ds_row = dm, padded, spare, 0
        gate_r, gate_x = dr + filled * columns * SIZE, dx_gates + filled * columns * SIZE
        phase = barrier(counter, threads, phase)
        fields[of.ROWS] = live
        fields[of.X] = args[KEPT_AT] + place * columns * SIZE + mine
        fields[of.R] = args[KEPT_R] + place * kept_row * SIZE + mine
        fields[of.H_BEFORE] = h_rows + filled * width * SIZE + mine
        fields[of.BEFORE] = old + mine
        fields[of.D_H_AFTER], fields[of.D_H_AFTER_ROW] = d_h + mine, d_h_row
        fields[of.D_AFTER] = carry_s + now * rows * other * SIZE + mine
        fields[of.DR], fields[of.DX] = gate_r + mine, gate_x + mine
        fields[of.D_H_BEFORE], fields[of.D_H_BEFORE_ROW] = ds_to + mine, ds_row
        fields[of.D_BEFORE] = carry_s + (1 - now) * rows * other * SIZE + mine
        call(args[ROWS], (step_at,))
        # what the cell made of padding must not enter the products
        for i in range(live if end == padded else 0):  # the last thread has the padding
            if padded > units:
                for g in range(args[GATES]):
                    copy(gate_r + (i * columns + g * padded + units) * SIZE, 0, 0, padded - units)
                    if not summed:
                        copy(
                            gate_x + (i * columns + g * padded + units) * SIZE, 0, 0, padded - units
                        )
            beyond = gates
            copy(gate_r + (i * columns + beyond) * SIZE, 0, 0, columns - beyond)
            if not summed:
                copy(gate_x + (i * columns + beyond) * SIZE, 0, 0, columns - beyond)
            kept = 0 if projecting else units
            copy(ds_h + (i * width + kept) * SIZE, 0, 0, width - kept)
        if args[W_HH] != 0:
            phase = barrier(counter, threads, phase)
            inner, panel = strides(args, gates, width)
            product(
                live, gates, w_end - w_begin, dr + filled * columns * SIZE, columns, 1,
                args[W_HH] + w_begin // PANEL * panel * SIZE, inner, panel,
                carry_h + ((1 - now) * rows * width + w_begin) * SIZE, width, True,
            )  # fmt: skip
        phase = barrier(counter, threads, phase)
        if step == 0 or args[RESET] != 0:
            for i in range(thread, live, threads):
                b = row_of(args, start + i)
                t = time_of(args, step, length_of(args, start + i))
                d_h = carry_h + ((1 - now) * rows + i) * width * SIZE
                d_s = carry_s + ((1 - now) * rows + i) * other * SIZE
                if is_reset(args, step, t, b):
                    give_states(args, d_fresh, b, d_h, d_s)
                    clear(d_h, d_s, width, other)
                elif step == 0:
                    give_states(args, d_initial, b, d_h, d_s)
        filled += live
    if filled > 0:
        phase = flush(
            args, filled, dr, dx_gates, h_rows, dh_rows, m_rows, x_rows, spare, places, sums,
            accumulate, scale, thread, threads, counter, phase,
        )  # fmt: skip
    return barrier(counter, threads, phase)


def backward(args_at, task, running):
    """A task's share of the batch tiles: every TASKS-th one, or its part of its team's tiles."""
    args, scale = int64_at(args_at), float64_at(args_at)[DROP_SCALE]
    rows, size = args[TILE_ROWS], args[TEAM_SIZE]
    team, thread, teams, phase = task // size, task % size, args[TASKS] // size, 1
    if running != args[TASKS]:
        # threads of a team that do not run together would wait for ever: the first does it all
        if thread > 0:
            return
        size = 1
    scratch = args[SCRATCH] + team * args[SCRATCH_BYTES]
    counter = args[COUNTERS] + team * COUNTER_STRIDE * 8
    sums = args[SUMS]
    if sums != 0:
        sums += team * args[SUMS_BYTES]
    if sums != 0 and thread == 0:
        # products write the sums of the matrices, unless a team may have no step at all
        blank = args[SUMS_BYTES] // SIZE
        if args[WRITES] != 0:
            blank = 2 * args[COLUMNS] + args[VECTORS] * args[PADDED]
        copy(sums + args[SUMS_BYTES] - blank * SIZE, 0, 0, blank)
    for start in range(team * rows, args[BATCH], teams * rows):
        accumulate = args[WRITES] == 0 or start > team * rows
        phase = backward_tile(
            args, start, min(rows, args[BATCH] - start), scratch, sums, accumulate, scale, thread,
            size, counter, phase,
        )  # fmt: skip
