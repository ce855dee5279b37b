"""The forward time loop of one layer and direction, the same for every cell.

One of the kernel's arguments is the address of the cell's `step_rows`, which `codegen.numba`
prints. `loops` compiles the text of this file once for each dtype, put in place of float32.
"""

from numba import njit

from openrnn.kernels.cpu import steps as of
from openrnn.kernels.cpu.args import *  # the places of the arguments, all of them constants
from openrnn.kernels.cpu.memory import float64_at, int64_at
from openrnn.kernels.cpu.product import dots_float32 as dots
from openrnn.kernels.cpu.product import product_float32 as product
from openrnn.kernels.cpu.regions import call, new_step
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.rows import drop_float32 as drop
from openrnn.kernels.cpu.rows import ends_reset, is_reset, length_of, row_of, slot_of, time_of
from openrnn.kernels.cpu.rows import spread_float32 as spread
from openrnn.kernels.cpu.team import COUNTER_STRIDE, barrier, share_of
from openrnn.kernels.cpu.vectors import PANEL as PANELS
from openrnn.kernels.cpu.vectors import SIZES

SIZE, PANEL = SIZES["float32"], PANELS["float32"]


@njit(nogil=True, error_model="numpy")
def multiply(args, rows, inner, a, a_row, weight, c, columns, accumulate, begin, end):
    """c (+)= rows of A times the transposed gate matrix, packed in panels or as it is.

    Of each gate the units [begin, end), whole panels unless they are all.
    """
    padded = args[PADDED]
    if args[PACKED] == 0:
        dots(
            rows, inner, args[GATES], args[UNITS], a, a_row, weight, inner, c, columns, padded,
            accumulate, begin, min(end, args[UNITS]),
        )  # fmt: skip
    elif end - begin == padded:
        product(
            rows, inner, columns, a, a_row, 1, weight, PANEL, PANEL * inner, c, columns, accumulate
        )
    else:
        for g in range(args[GATES]):
            first = g * padded + begin
            product(
                rows, inner, end - begin, a, a_row, 1, weight + first * inner * SIZE, PANEL,
                PANEL * inner, c + first * SIZE, columns, accumulate,
            )  # fmt: skip


@njit(nogil=True, error_model="numpy")
def input_side(
    args, start, rows, live, first, last, base, gates, gates_step, x_rows, scale, begin, end
):
    """Gate rows of the steps [first, last): the input product, of the units [begin, end)."""
    inputs, columns, units, padded = args[INPUTS], args[COLUMNS], args[UNITS], args[PADDED]
    ragged, dropping = args[LENGTHS] != 0, args[DROP] != 0
    gather = ragged or dropping or args[SKIP] != 0
    a = args[X] + (base * args[X_STEP] + start * args[X_ROW]) * SIZE
    a_step, a_row = args[X_STEP], args[X_ROW]
    if gather:
        a, a_step, a_row = x_rows, rows * inputs, inputs
    elif rows == 1:
        a_row = a_step
    for step in range(first, last):
        if not gather:
            break
        while live > 0 and length_of(args, start + live - 1) <= step:
            live -= 1
        slot = slot_of(args, step) - base
        for i in range(live):
            b = row_of(args, start + i)
            t = time_of(args, step, length_of(args, start + i))
            source = args[X] + (t * args[X_STEP] + b * args[X_ROW]) * SIZE
            target = x_rows + (slot * rows + i) * inputs * SIZE
            if dropping:
                drop(target, source, inputs, t, b, args, scale, False)
            else:
                copy(target, source, inputs, inputs)
            if args[SKIP] != 0:
                gate = gates + (slot * gates_step + i * columns) * SIZE
                for g in range(args[GATES]):
                    copy(gate + g * padded * SIZE, target, units, padded)
        if ragged and args[SKIP] == 0 and live > 0:
            multiply(
                args, live, inputs, a + slot * a_step * SIZE, a_row, args[W_IH],
                gates + slot * gates_step * SIZE, columns, False, begin, end,
            )  # fmt: skip
    if ragged or args[SKIP] != 0:
        return
    if a_step == rows * a_row and gates_step == rows * columns:
        multiply(
            args, (last - first) * rows, inputs, a, a_row, args[W_IH], gates, columns, False, begin,
            end,
        )  # fmt: skip
    else:
        for slot in range(last - first):
            multiply(
                args, rows, inputs, a + slot * a_step * SIZE, a_row, args[W_IH],
                gates + slot * gates_step * SIZE, columns, False, begin, end,
            )  # fmt: skip


@njit(forceinline=True, error_model="numpy")
def load(args, group, b, hidden, others):
    """Puts a row's initial or fresh states in place; zeros where none are given."""
    outputs, units, padded = args[OUTPUTS], args[UNITS], args[PADDED]
    given = args[group]
    copy(hidden, given + b * outputs * SIZE if given != 0 else 0, outputs, args[WIDTH])
    for k in range(args[OTHERS]):
        given = args[group + 1 + k]
        source = given + b * units * SIZE if given != 0 else 0
        copy(others + k * padded * SIZE, source, units, padded)


@njit(forceinline=True, error_model="numpy")
def store(args, group, offset, hidden, others, begin, h_end, end):
    """Writes a row's states, without padding, at a row offset of their tensors.

    Of the emitted state the elements [begin, h_end), of others the units [begin, end).
    """
    outputs, units, padded = args[OUTPUTS], args[UNITS], args[PADDED]
    if args[group] != 0:
        target, count = args[group] + (offset * outputs + begin) * SIZE, h_end - begin
        copy(target, hidden + begin * SIZE, count, count)
    for k in range(args[OTHERS]):
        if args[group + 1 + k] != 0:
            target, count = args[group + 1 + k] + (offset * units + begin) * SIZE, end - begin
            copy(target, others + (k * padded + begin) * SIZE, count, count)


@njit(nogil=True, error_model="numpy")
def forward_tile(args, start, rows, scratch, scale, thread, threads, counter, phase):
    """All steps of the sequences at positions [start, start + rows), this thread's units of each.

    Returns the next phase of the team's barrier.
    """
    steps, batch, units, outputs = args[STEPS], args[BATCH], args[UNITS], args[OUTPUTS]
    padded, columns, width, chunk = args[PADDED], args[COLUMNS], args[WIDTH], args[CHUNK]
    states, kept_row, summed = 1 + args[OTHERS], args[KEPT] * padded, args[SUMMED] != 0
    initial, fresh, final, every = TAIL, TAIL + states, TAIL + 2 * states, TAIL + 3 * states
    other = (states - 1) * padded
    hidden = scratch  # [2, rows, width]
    ring = hidden + 2 * rows * width * SIZE  # [2, rows, other], unless there is a history
    entry = ring + 2 * rows * other * SIZE  # [rows, other]: states put in place before a step
    bias = entry + rows * other * SIZE  # [2, columns]: input side, recurrent side
    blank = bias + 2 * columns * SIZE  # [kept_row]: where kept values go that nobody wants
    r = blank + kept_row * SIZE  # [rows, columns], unless the gates take sums
    emitted = r + rows * columns * SIZE  # [rows, padded]: before the projection
    x_rows = emitted + rows * padded * SIZE  # [chunk * rows, inputs]
    gates, gates_step = x_rows + chunk * rows * args[INPUTS] * SIZE, rows * columns
    kept = args[KEPT_AT] != 0
    if kept:
        gates, gates_step = args[KEPT_AT] + start * columns * SIZE, batch * columns
    begin, end = 0, padded
    if threads > 1:
        begin, end = (
            share_of(padded, PANEL, thread, threads),
            share_of(padded, PANEL, thread + 1, threads),
        )
    mine, h_end, u_end = begin * SIZE, min(end, outputs), min(end, units)
    # the first recurrent product is zero where nothing is carried in
    starts_blank = args[initial] == 0 and (args[RESET] == 0 or args[fresh] == 0)

    bias_r = bias if summed else bias + columns * SIZE
    if thread == 0:
        if not summed and args[PACKED] == 0:
            copy(r, 0, 0, rows * columns)  # unpacked products leave the padding as it is
        copy(bias, 0, 0, 2 * columns)
        spread(bias, args[BIAS_X], args[GATES], units, padded, SIZE)
        spread(bias_r, args[BIAS_R], args[GATES], units, padded, SIZE)
        for i in range(rows):
            b, length = row_of(args, start + i), length_of(args, start + i)
            for t in range(length, steps):
                copy(args[Y] + (t * args[Y_STEP] + b * args[Y_ROW]) * SIZE, 0, 0, outputs)
                for k in range(states):
                    size = outputs if k == 0 else units
                    if args[every + k] != 0:
                        copy(args[every + k] + (t * batch + b) * size * SIZE, 0, 0, size)
            if length == 0:
                load(args, initial, b, hidden, entry)
                store(args, final, b, hidden, entry, 0, outputs, units)
    phase = barrier(counter, threads, phase)

    step_at: int = new_step()  # type: ignore[call-arg]  # numba's
    fields = int64_at(step_at)
    fields[of.UNITS], fields[of.STRIDE] = end - begin, padded
    fields[of.X_ROW], fields[of.R], fields[of.R_ROW] = columns, r + mine, columns
    fields[of.BIAS], fields[of.BIAS_R] = bias + mine, bias_r + mine
    fields[of.H_BEFORE_ROW], fields[of.BEFORE_ROW] = width, other
    fields[of.VECTORS] = args[VECTORS_AT] + mine
    fields[of.H_AFTER_ROW] = padded if args[W_HR] != 0 else width
    fields[of.AFTER_ROW], fields[of.KEPT] = other, blank + mine
    fields[of.KEPT_ROW] = kept_row if args[KEPT_R] != 0 else 0
    live = rows
    for first in range(0, steps, chunk):
        last = min(first + chunk, steps)
        # slots of this chunk start here; kept rows are counted from the first of all
        base = min(slot_of(args, first), slot_of(args, last - 1))
        rows_of_chunk = gates + base * gates_step * SIZE if kept else gates
        input_side(
            args, start, rows, live, first, last, base, rows_of_chunk, gates_step, x_rows, scale,
            begin, end,
        )  # fmt: skip
        for step in range(first, last):
            while live > 0 and length_of(args, start + live - 1) <= step:
                live -= 1
            if live == 0:
                break
            slot = slot_of(args, step)
            before = hidden + ((step + 1) & 1) * rows * width * SIZE
            after = hidden + (step & 1) * rows * width * SIZE
            gate = rows_of_chunk + (slot - base) * gates_step * SIZE
            # states other than the emitted one: where they are read, where they go
            old, new = entry, ring + (step & 1) * rows * other * SIZE
            if args[HISTORY] != 0:
                new = args[HISTORY] + (slot * batch + start) * other * SIZE
            if step > 0:
                old = ring + ((step + 1) & 1) * rows * other * SIZE
                if args[HISTORY] != 0:
                    previous = slot_of(args, step - 1) * batch + start
                    old = args[HISTORY] + previous * other * SIZE
            if step == 0 or args[RESET] != 0:
                for i in range(live):
                    b = row_of(args, start + i)
                    t = time_of(args, step, length_of(args, start + i))
                    target, others = before + i * width * SIZE, old + i * other * SIZE
                    if is_reset(args, step, t, b):
                        load(args, fresh, b, target, others)
                    elif step == 0:
                        load(args, initial, b, target, others)
            if step > 0 or not starts_blank:
                sums = gate if summed else r
                multiply(
                    args,
                    live,
                    outputs,
                    before,
                    width,
                    args[W_HH],
                    sums,
                    columns,
                    summed,
                    begin,
                    end,
                )
            elif not summed:
                copy(r, 0, 0, live * columns)
            h = after
            if args[W_HR] != 0:
                h = emitted
                if args[PROJECTED] != 0:
                    h = args[PROJECTED] + (slot * batch + start) * padded * SIZE
            fields[of.ROWS], fields[of.X] = live, gate + mine
            fields[of.H_BEFORE], fields[of.BEFORE] = before + mine, old + mine
            fields[of.H_AFTER], fields[of.AFTER] = h + mine, new + mine
            if args[KEPT_R] != 0:
                fields[of.KEPT] = args[KEPT_R] + (slot * batch + start) * kept_row * SIZE + mine
            call(args[ROWS], (step_at,))
            if args[W_HR] != 0:
                product(
                    live, units, width, h, padded, 1, args[W_HR], PANEL, PANEL * units, after,
                    width, False,
                )  # fmt: skip
            for i in range(live):
                b, length = row_of(args, start + i), length_of(args, start + i)
                t = time_of(args, step, length)
                hidden_row, others = after + i * width * SIZE, new + i * other * SIZE
                target = args[Y] + (t * args[Y_STEP] + b * args[Y_ROW]) * SIZE
                copy(target + mine, hidden_row + mine, h_end - begin, h_end - begin)
                store(args, every, t * batch + b, hidden_row, others, begin, h_end, u_end)
                if step == length - 1:
                    if ends_reset(args, b):
                        hidden_row, others = before + i * width * SIZE, entry + i * other * SIZE
                        load(args, fresh, b, hidden_row, others)
                    store(args, final, b, hidden_row, others, begin, h_end, u_end)
            phase = barrier(counter, threads, phase)
    return phase


def forward(args_at, task, running):
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
    for start in range(team * rows, args[BATCH], teams * rows):
        phase = forward_tile(
            args,
            start,
            min(rows, args[BATCH] - start),
            scratch,
            scale,
            thread,
            size,
            counter,
            phase,
        )
