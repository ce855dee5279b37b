"""The forward time loop of one layer and direction, the same for every cell.

A job has the address of the cell's `step_rows`, which `codegen.numba` prints. `loops` reads this
file with another dtype in place of float32.
"""

from numba import njit

from openrnn.kernels.cpu import steps as of
from openrnn.kernels.cpu.crew import LINE, meet, share_of
from openrnn.kernels.cpu.jobs import *  # the fields of a job, all of them constants
from openrnn.kernels.cpu.memory import float64_at, int64_at
from openrnn.kernels.cpu.product import dots_float32 as dots
from openrnn.kernels.cpu.product import product_float32 as product
from openrnn.kernels.cpu.regions import call, new_step
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.rows import drop_float32 as drop
from openrnn.kernels.cpu.rows import ends_reset, is_reset, length_of, row_of, slot_of, time_of
from openrnn.kernels.cpu.rows import spread_float32 as spread
from openrnn.kernels.cpu.vectors import PANEL as PANELS
from openrnn.kernels.cpu.vectors import SIZES

SIZE, PANEL = SIZES["float32"], PANELS["float32"]


@njit(nogil=True, error_model="numpy")
def multiply(job, rows, inner, a, a_row, weight, c, columns, accumulate, begin, end):
    """c (+)= rows of A times the transposed gate matrix, packed in panels or as it is.

    Of each gate the units [begin, end), whole panels unless they are all.
    """
    padded = job[PADDED]
    if job[PACKED] == 0:
        dots(
            rows, inner, job[GATES], job[UNITS], a, a_row, weight, inner, c, columns, padded,
            accumulate, begin, min(end, job[UNITS]),
        )  # fmt: skip
    elif end - begin == padded:
        product(
            rows, inner, columns, a, a_row, 1, weight, PANEL, PANEL * inner, c, columns, accumulate
        )
    else:
        for g in range(job[GATES]):
            first = g * padded + begin
            product(
                rows, inner, end - begin, a, a_row, 1, weight + first * inner * SIZE, PANEL,
                PANEL * inner, c + first * SIZE, columns, accumulate,
            )  # fmt: skip


@njit(nogil=True, error_model="numpy")
def input_side(
    job, start, rows, live, first, last, base, gates, gates_step, x_rows, scale, begin, end
):
    """Gate rows of the steps [first, last): the input product, of the units [begin, end)."""
    inputs, columns, units, padded = job[INPUTS], job[COLUMNS], job[UNITS], job[PADDED]
    ragged, dropping = job[LENGTHS] != 0, job[DROP] != 0
    gather = ragged or dropping or job[SKIP] != 0
    a = job[X] + (base * job[X_STEP] + start * job[X_ROW]) * SIZE
    a_step, a_row = job[X_STEP], job[X_ROW]
    if gather:
        a, a_step, a_row = x_rows, rows * inputs, inputs
    elif rows == 1:
        a_row = a_step
    for step in range(first, last):
        if not gather:
            break
        while live > 0 and length_of(job, start + live - 1) <= step:
            live -= 1
        slot = slot_of(job, step) - base
        for i in range(live):
            b = row_of(job, start + i)
            t = time_of(job, step, length_of(job, start + i))
            source = job[X] + (t * job[X_STEP] + b * job[X_ROW]) * SIZE
            target = x_rows + (slot * rows + i) * inputs * SIZE
            if dropping:
                drop(target, source, inputs, t, b, job, scale, False)
            else:
                copy(target, source, inputs, inputs)
            if job[SKIP] != 0:
                gate = gates + (slot * gates_step + i * columns) * SIZE
                for g in range(job[GATES]):
                    copy(gate + g * padded * SIZE, target, units, padded)
        if ragged and job[SKIP] == 0 and live > 0:
            multiply(
                job, live, inputs, a + slot * a_step * SIZE, a_row, job[W_IH],
                gates + slot * gates_step * SIZE, columns, False, begin, end,
            )  # fmt: skip
    if ragged or job[SKIP] != 0:
        return
    if a_step == rows * a_row and gates_step == rows * columns:
        multiply(
            job, (last - first) * rows, inputs, a, a_row, job[W_IH], gates, columns, False, begin,
            end,
        )  # fmt: skip
    else:
        for slot in range(last - first):
            multiply(
                job, rows, inputs, a + slot * a_step * SIZE, a_row, job[W_IH],
                gates + slot * gates_step * SIZE, columns, False, begin, end,
            )  # fmt: skip


@njit(forceinline=True, error_model="numpy")
def load(job, group, b, hidden, others):
    """Puts a row's initial or fresh states in place; zeros where none are given."""
    outputs, units, padded = job[OUTPUTS], job[UNITS], job[PADDED]
    given = job[group]
    copy(hidden, given + b * outputs * SIZE if given != 0 else 0, outputs, job[WIDTH])
    for k in range(job[OTHERS]):
        given = job[group + 1 + k]
        source = given + b * units * SIZE if given != 0 else 0
        copy(others + k * padded * SIZE, source, units, padded)


@njit(forceinline=True, error_model="numpy")
def store(job, group, offset, hidden, others, begin, h_end, end):
    """Writes a row's states, without padding, at a row offset of their tensors.

    Of the emitted state the elements [begin, h_end), of others the units [begin, end).
    """
    outputs, units, padded = job[OUTPUTS], job[UNITS], job[PADDED]
    if job[group] != 0:
        target, count = job[group] + (offset * outputs + begin) * SIZE, h_end - begin
        copy(target, hidden + begin * SIZE, count, count)
    for k in range(job[OTHERS]):
        if job[group + 1 + k] != 0:
            target, count = job[group + 1 + k] + (offset * units + begin) * SIZE, end - begin
            copy(target, others + (k * padded + begin) * SIZE, count, count)


@njit(nogil=True, error_model="numpy")
def forward_tile(job, start, rows, scratch, scale, part, parts, counter, turn):
    """All steps of the sequences at positions [start, start + rows), this part's units of each.

    Returns the parts' next meeting.
    """
    steps, batch, units, outputs = job[STEPS], job[BATCH], job[UNITS], job[OUTPUTS]
    padded, columns, width, chunk = job[PADDED], job[COLUMNS], job[WIDTH], job[CHUNK]
    states, kept_row, summed = 1 + job[OTHERS], job[KEPT] * padded, job[SUMMED] != 0
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
    gates, gates_step = x_rows + chunk * rows * job[INPUTS] * SIZE, rows * columns
    kept = job[KEPT_AT] != 0
    if kept:
        gates, gates_step = job[KEPT_AT] + start * columns * SIZE, batch * columns
    begin, end = 0, padded
    if parts > 1:
        begin, end = share_of(padded, PANEL, part, parts), share_of(padded, PANEL, part + 1, parts)
    mine, h_end, u_end = begin * SIZE, min(end, outputs), min(end, units)
    # the first recurrent product is zero where nothing is carried in
    starts_blank = job[initial] == 0 and (job[RESET] == 0 or job[fresh] == 0)

    bias_r = bias if summed else bias + columns * SIZE
    if part == 0:
        if not summed and job[PACKED] == 0:
            copy(r, 0, 0, rows * columns)  # unpacked products leave the padding as it is
        copy(bias, 0, 0, 2 * columns)
        spread(bias, job[BIAS_X], job[GATES], units, padded, SIZE)
        spread(bias_r, job[BIAS_R], job[GATES], units, padded, SIZE)
        for i in range(rows):
            b, length = row_of(job, start + i), length_of(job, start + i)
            for t in range(length, steps):
                copy(job[Y] + (t * job[Y_STEP] + b * job[Y_ROW]) * SIZE, 0, 0, outputs)
                for k in range(states):
                    size = outputs if k == 0 else units
                    if job[every + k] != 0:
                        copy(job[every + k] + (t * batch + b) * size * SIZE, 0, 0, size)
            if length == 0:
                load(job, initial, b, hidden, entry)
                store(job, final, b, hidden, entry, 0, outputs, units)
    turn = meet(counter, parts, turn)

    step_at: int = new_step()  # type: ignore[call-arg]  # numba's
    fields = int64_at(step_at)
    fields[of.UNITS], fields[of.STRIDE] = end - begin, padded
    fields[of.X_ROW], fields[of.R], fields[of.R_ROW] = columns, r + mine, columns
    fields[of.BIAS], fields[of.BIAS_R] = bias + mine, bias_r + mine
    fields[of.H_BEFORE_ROW], fields[of.BEFORE_ROW] = width, other
    fields[of.VECTORS] = job[VECTORS_AT] + mine
    fields[of.H_AFTER_ROW] = padded if job[W_HR] != 0 else width
    fields[of.AFTER_ROW], fields[of.KEPT] = other, blank + mine
    fields[of.KEPT_ROW] = kept_row if job[KEPT_R] != 0 else 0
    live = rows
    for first in range(0, steps, chunk):
        last = min(first + chunk, steps)
        # slots of this chunk start here; kept rows are counted from the first of all
        base = min(slot_of(job, first), slot_of(job, last - 1))
        rows_of_chunk = gates + base * gates_step * SIZE if kept else gates
        input_side(
            job, start, rows, live, first, last, base, rows_of_chunk, gates_step, x_rows, scale,
            begin, end,
        )  # fmt: skip
        for step in range(first, last):
            while live > 0 and length_of(job, start + live - 1) <= step:
                live -= 1
            if live == 0:
                break
            slot = slot_of(job, step)
            before = hidden + ((step + 1) & 1) * rows * width * SIZE
            after = hidden + (step & 1) * rows * width * SIZE
            gate = rows_of_chunk + (slot - base) * gates_step * SIZE
            # states other than the emitted one: where they are read, where they go
            old, new = entry, ring + (step & 1) * rows * other * SIZE
            if job[HISTORY] != 0:
                new = job[HISTORY] + (slot * batch + start) * other * SIZE
            if step > 0:
                old = ring + ((step + 1) & 1) * rows * other * SIZE
                if job[HISTORY] != 0:
                    previous = slot_of(job, step - 1) * batch + start
                    old = job[HISTORY] + previous * other * SIZE
            if step == 0 or job[RESET] != 0:
                for i in range(live):
                    b = row_of(job, start + i)
                    t = time_of(job, step, length_of(job, start + i))
                    target, others = before + i * width * SIZE, old + i * other * SIZE
                    if is_reset(job, step, t, b):
                        load(job, fresh, b, target, others)
                    elif step == 0:
                        load(job, initial, b, target, others)
            if step > 0 or not starts_blank:
                sums = gate if summed else r
                multiply(
                    job, live, outputs, before, width, job[W_HH], sums, columns, summed, begin, end
                )
            elif not summed:
                copy(r, 0, 0, live * columns)
            h = after
            if job[W_HR] != 0:
                h = emitted
                if job[PROJECTED] != 0:
                    h = job[PROJECTED] + (slot * batch + start) * padded * SIZE
            fields[of.ROWS], fields[of.X] = live, gate + mine
            fields[of.H_BEFORE], fields[of.BEFORE] = before + mine, old + mine
            fields[of.H_AFTER], fields[of.AFTER] = h + mine, new + mine
            if job[KEPT_R] != 0:
                fields[of.KEPT] = job[KEPT_R] + (slot * batch + start) * kept_row * SIZE + mine
            call(job[ROWS], (step_at,))
            if job[W_HR] != 0:
                product(
                    live, units, width, h, padded, 1, job[W_HR], PANEL, PANEL * units, after, width,
                    False,
                )  # fmt: skip
            for i in range(live):
                b, length = row_of(job, start + i), length_of(job, start + i)
                t = time_of(job, step, length)
                hidden_row, others = after + i * width * SIZE, new + i * other * SIZE
                target = job[Y] + (t * job[Y_STEP] + b * job[Y_ROW]) * SIZE
                copy(target + mine, hidden_row + mine, h_end - begin, h_end - begin)
                store(job, every, t * batch + b, hidden_row, others, begin, h_end, u_end)
                if step == length - 1:
                    if ends_reset(job, b):
                        hidden_row, others = before + i * width * SIZE, entry + i * other * SIZE
                        load(job, fresh, b, hidden_row, others)
                    store(job, final, b, hidden_row, others, begin, h_end, u_end)
            turn = meet(counter, parts, turn)
    return turn


def forward(job_at, task, team):
    """A task's share of the batch tiles: one out of TASKS, or of its crew's part of them."""
    job, scale = int64_at(job_at), float64_at(job_at)[DROP_SCALE]
    rows, crew = job[TILE_ROWS], job[CREW]
    group, part, groups, turn = task // crew, task % crew, job[TASKS] // crew, 1
    if team != job[TASKS]:
        # a crew whose members do not run together would wait for ever: the first does it all
        if part > 0:
            return
        crew = 1
    scratch = job[SCRATCH] + group * job[SCRATCH_BYTES]
    counter = job[COUNTERS] + group * LINE * 8
    for start in range(group * rows, job[BATCH], groups * rows):
        turn = forward_tile(
            job, start, min(rows, job[BATCH] - start), scratch, scale, part, crew, counter, turn
        )
