"""The forward time loop of one layer and direction, the same for every cell.

One of the kernel's arguments is the address of the cell's `step_rows`, which `codegen.numba`
prints. `loops` compiles the text of this file once for each dtype, put in place of float32.
"""

from typing import NamedTuple

from numba import int64, njit

from openrnn.kernels.cpu import cell_args as field
from openrnn.kernels.cpu.args_type import loop_args_at
from openrnn.kernels.cpu.memory import int64_at
from openrnn.kernels.cpu.product import dots_float32 as dots
from openrnn.kernels.cpu.product import product_float32 as product
from openrnn.kernels.cpu.regions import call, new_cell_args
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.rows import drop_float32 as drop
from openrnn.kernels.cpu.rows import ends_reset, is_reset, length_of, row_of, slot_of, time_of
from openrnn.kernels.cpu.rows import spread_float32 as spread
from openrnn.kernels.cpu.states import load_float32 as load
from openrnn.kernels.cpu.team import barrier, part_of, team_of
from openrnn.kernels.cpu.vectors import PANEL as PANELS
from openrnn.kernels.cpu.vectors import SIZES

SIZE, PANEL = SIZES["float32"], PANELS["float32"]


class Tile(NamedTuple):
    """Sequences that run together, the units of one thread, and addresses of what it writes."""

    start: int  # the position of the first sequence
    rows: int
    begin: int  # this thread's units: [begin, end)
    end: int
    first: int  # this thread's columns of y: [first, last), its units unless there is a projection
    last: int
    hidden: int  # [2, rows, h_width]: the emitted state, by steps in turn
    others: int  # [2, rows, other]: the other states, unless there is a history
    entry: int  # [rows, other]: states put in place before the first step
    bias: int  # [2, columns]: input side, recurrent side
    unwanted: int  # [saved_sides * padded]: for recurrent sides that nobody reads
    r: int  # [rows, columns]: the recurrent side, unless the gates take sums
    emitted: int  # [rows, padded]: before the projection
    x_rows: int  # [chunk * rows, inputs], with an input matrix
    gates: int  # [steps or chunk, rows or batch, columns]: saved, or scratch
    gates_step: int  # elements from one step's gate rows to those of the next
    rounded: int  # memory for rows that are rounded, this thread's


@njit(forceinline=True, error_model="numpy")
def tile_of(args, start, rows, scratch, team, rounded):
    """A tile whose rows lie in this scratch."""
    padded, columns, other = args.padded, args.columns, (args.states - 1) * args.padded
    begin, end = part_of(padded, PANEL, team)
    first, last = begin, min(end, args.outputs)
    if args.w_hr != 0:
        first, last = part_of(args.h_width, PANEL, team)
        last = min(last, args.outputs)
    hidden = scratch
    others = hidden + 2 * rows * args.h_width * SIZE
    entry = others + 2 * rows * other * SIZE
    bias = entry + rows * other * SIZE
    unwanted = bias + 2 * columns * SIZE
    r = unwanted + args.saved_sides * padded * SIZE
    emitted = r + rows * columns * SIZE
    x_rows = emitted + rows * padded * SIZE
    gates, gates_step = x_rows + args.chunk * rows * args.inputs * SIZE, rows * columns
    if args.saved_gates != 0:
        gates, gates_step = args.saved_gates + start * columns * SIZE, args.batch * columns
    return Tile(
        start, rows, begin, end, first, last, hidden, others, entry, bias, unwanted, r, emitted,
        x_rows, gates, gates_step, rounded,
    )  # fmt: skip


@njit(nogil=True, error_model="numpy")
def multiply(args, tile, shape, a, weight, scales, c, accumulate, backwards):
    """C (+)= A times the transposed gate matrix: in panels of any kind, or as it is.

    Of each gate the units of the thread: whole panels, unless it has them all. Shape is (rows,
    inner); a and c are (address, elements from row to row). Every other step goes backwards through
    R, so that it begins with what the step before has left in the caches.
    """
    rows, inner = shape
    c_at, columns = c
    begin, end, padded = tile.begin, tile.end, args.padded
    sizes = (args.gates, args.units, padded)
    if args.product != 0:
        given = (
            rows, inner, args.gates, args.units, padded, begin, end, a[0], a[1], weight, scales,
            c_at, columns, int64(accumulate), tile.rounded, int64(backwards),
        )  # fmt: skip
        call(args.product, given)  # type: ignore[call-arg]  # numba's
    elif args.packed == 0:
        units = (begin, min(end, args.units))
        dots(shape, sizes, units, a, (weight, inner), c, accumulate, backwards)
    elif end - begin == padded:
        b = (weight, PANEL, PANEL * inner)
        product((rows, inner, columns), (a[0], a[1], 1), b, c, accumulate, backwards)
    else:
        for turn in range(args.gates):
            g = args.gates - 1 - turn if backwards else turn
            first = g * padded + begin
            b = (weight + first * inner * SIZE, PANEL, PANEL * inner)
            target = (c_at + first * SIZE, columns)
            shape = (rows, inner, end - begin)
            product(shape, (a[0], a[1], 1), b, target, accumulate, backwards)


@njit(nogil=True, error_model="numpy")
def gather_inputs(args, tile, step, live, slot, gates):
    """Copies a step's rows of x together, dropped; without an input matrix, to the gates."""
    inputs, units, padded = args.inputs, args.units, args.padded
    for i in range(live):
        b = row_of(args, tile.start + i)
        t = time_of(args, step, length_of(args, tile.start + i))
        source = args.x + (t * args.x_step + b * args.x_row) * SIZE
        if args.skip != 0:  # of layer 0 alone, where nothing is dropped
            gate = gates + (slot * tile.gates_step + i * args.columns + tile.begin) * SIZE
            count = min(tile.end, units) - tile.begin
            for g in range(args.gates):
                part = source + (g * args.x_gate + tile.begin) * SIZE
                copy(gate + g * padded * SIZE, part, count, tile.end - tile.begin)
            continue
        target = tile.x_rows + (slot * tile.rows + i) * inputs * SIZE
        if args.drop != 0:
            drop(target, source, inputs, t, b, args, False)
        else:
            copy(target, source, inputs, inputs)


@njit(nogil=True, error_model="numpy")
def input_side(args, tile, first, last, live, base, gates):
    """Input products of the steps [first, last) into gate rows; `base` is the slot of the first."""
    inputs, columns, rows = args.inputs, args.columns, tile.rows
    ragged, dropping = args.lengths != 0, args.drop != 0
    gather = ragged or dropping or args.skip != 0
    a = args.x + (base * args.x_step + tile.start * args.x_row) * SIZE
    a_step, a_row = args.x_step, args.x_row
    if gather:
        a, a_step, a_row = tile.x_rows, rows * inputs, inputs
    elif rows == 1:
        a_row = a_step
    for step in range(first, last if gather else first):
        while live > 0 and length_of(args, tile.start + live - 1) <= step:
            live -= 1
        slot = slot_of(args, step) - base
        gather_inputs(args, tile, step, live, slot, gates)
        if ragged and args.skip == 0 and live > 0:
            source = (a + slot * a_step * SIZE, a_row)
            target = (gates + slot * tile.gates_step * SIZE, columns)
            shape, scales = (live, inputs), args.scales_ih
            multiply(args, tile, shape, source, args.w_ih, scales, target, False, False)
    if ragged or args.skip != 0:
        return
    if a_step == rows * a_row and tile.gates_step == rows * columns:
        shape = ((last - first) * rows, inputs)
        source, target = (a, a_row), (gates, columns)
        multiply(args, tile, shape, source, args.w_ih, args.scales_ih, target, False, False)
    else:
        for slot in range(last - first):
            source = (a + slot * a_step * SIZE, a_row)
            target = (gates + slot * tile.gates_step * SIZE, columns)
            shape, scales = (rows, inputs), args.scales_ih
            multiply(args, tile, shape, source, args.w_ih, scales, target, False, False)


@njit(forceinline=True, error_model="numpy")
def store(args, tile, group, offset, hidden, others):
    """Writes this thread's part of a row's states, at a row offset of their tensors."""
    outputs, units, padded, begin = args.outputs, args.units, args.padded, tile.begin
    at = int64_at(group)
    if at[0] != 0:
        target, count = at[0] + (offset * outputs + tile.first) * SIZE, tile.last - tile.first
        copy(target, hidden + tile.first * SIZE, count, count)
    for k in range(args.states - 1):
        if at[1 + k] != 0:
            count = min(tile.end, units) - begin
            target = at[1 + k] + (offset * units + begin) * SIZE
            copy(target, others + (k * padded + begin) * SIZE, count, count)


@njit(nogil=True, error_model="numpy")
def store_reset(args, tile, b):
    """Writes what a reset after the last step puts in place of this thread's final states."""
    to, given = int64_at(args.final), int64_at(args.reset_state)
    for k in range(args.states):
        size, first, last = args.outputs, tile.first, tile.last
        if k > 0:
            size, first, last = args.units, tile.begin, min(tile.end, args.units)
        at = (b * size + first) * SIZE
        if to[k] != 0:
            copy(to[k] + at, given[k] + at if given[k] != 0 else 0, last - first, last - first)


@njit(nogil=True, error_model="numpy")
def store_all(args, group, offset, hidden, others):
    """Writes a row's states, the units of all threads, at a row offset of their tensors."""
    outputs, units = args.outputs, args.units
    at = int64_at(group)
    for k in range(args.states):
        size, source = (outputs, hidden) if k == 0 else (units, 0)
        if k > 0 and others != 0:
            source = others + (k - 1) * args.padded * SIZE
        if at[k] != 0:
            copy(at[k] + offset * size * SIZE, source, size, size)


@njit(nogil=True, error_model="numpy")
def prepare(args, tile, bias_r):
    """What one thread of a team does before the first step.

    Adds up the biases, clears what lies past the ends of sequences, and passes the initial states
    of sequences without steps on to the final ones.
    """
    if args.summed == 0 and args.packed == 0:
        # unpacked products leave the padding as it is
        copy(tile.r, 0, 0, tile.rows * args.columns)
    copy(tile.bias, 0, 0, 2 * args.columns)
    spread(tile.bias, args.bias_x, args.gates, args.units, args.padded)
    spread(bias_r, args.bias_r, args.gates, args.units, args.padded)
    for i in range(tile.rows):
        b, length = row_of(args, tile.start + i), length_of(args, tile.start + i)
        for t in range(length, args.steps):
            copy(args.y + (t * args.y_step + b * args.y_row) * SIZE, 0, 0, args.outputs)
            store_all(args, args.all_states, t * args.batch + b, 0, 0)
        if length == 0:
            load(args, args.initial, b, tile.hidden, tile.entry)
            store_all(args, args.final, b, tile.hidden, tile.entry)


@njit(forceinline=True, error_model="numpy")
def fill_cell_args(args, tile, cell_args, bias_r):
    """The arguments of the cell's step that are the same in all steps."""
    other, mine = (args.states - 1) * args.padded, tile.begin * SIZE
    cell_args[field.UNITS], cell_args[field.STRIDE] = tile.end - tile.begin, args.padded
    cell_args[field.X_ROW] = args.columns
    cell_args[field.R], cell_args[field.R_ROW] = tile.r + mine, args.columns
    cell_args[field.BIAS], cell_args[field.BIAS_R] = tile.bias + mine, bias_r + mine
    cell_args[field.H_BEFORE_ROW], cell_args[field.BEFORE_ROW] = args.h_width, other
    cell_args[field.VECTORS] = args.unit_vectors + mine
    cell_args[field.H_AFTER_ROW] = args.padded if args.w_hr != 0 else args.h_width
    cell_args[field.AFTER_ROW], cell_args[field.SAVED] = other, tile.unwanted + mine
    cell_args[field.SAVED_ROW] = args.saved_sides * args.padded if args.saved_recurrent != 0 else 0


@njit(forceinline=True, error_model="numpy")
def others_at(args, tile, step):
    """Where the states other than the emitted one lie before and after a step."""
    other = (args.states - 1) * args.padded
    before, after = tile.entry, tile.others + (step & 1) * tile.rows * other * SIZE
    if args.saved_states != 0:
        slot = slot_of(args, step)
        after = args.saved_states + (slot * args.batch + tile.start) * other * SIZE
    if step > 0:
        before = tile.others + ((step + 1) & 1) * tile.rows * other * SIZE
        if args.saved_states != 0:
            slot = slot_of(args, step - 1)
            before = args.saved_states + (slot * args.batch + tile.start) * other * SIZE
    return before, after


@njit(forceinline=True, error_model="numpy")
def load_before(args, tile, step, live, hidden, others):
    """Puts the states in place that a step does not have from the step before."""
    h_width, other = args.h_width, (args.states - 1) * args.padded
    for i in range(live):
        b = row_of(args, tile.start + i)
        t = time_of(args, step, length_of(args, tile.start + i))
        if is_reset(args, step, t, b):
            load(args, args.reset_state, b, hidden + i * h_width * SIZE, others + i * other * SIZE)
        elif step == 0:
            load(args, args.initial, b, hidden + i * h_width * SIZE, others + i * other * SIZE)


@njit(forceinline=True, error_model="numpy")
def store_after(args, tile, step, live, after, others):
    """Writes a step's output, and its states where they are wanted."""
    h_width, other = args.h_width, (args.states - 1) * args.padded
    mine, count = tile.first * SIZE, tile.last - tile.first
    for i in range(live):
        b, length = row_of(args, tile.start + i), length_of(args, tile.start + i)
        t = time_of(args, step, length)
        hidden, rest = after + i * h_width * SIZE, others + i * other * SIZE
        target = args.y + (t * args.y_step + b * args.y_row) * SIZE
        copy(target + mine, hidden + mine, count, count)
        store(args, tile, args.all_states, t * args.batch + b, hidden, rest)
        if step == length - 1:
            if ends_reset(args, b):
                store_reset(args, tile, b)
            else:
                store(args, tile, args.final, b, hidden, rest)


@njit(forceinline=True, error_model="numpy")
def forward_step(args, tile, team, step, live, gate, cell_args_at, phase):
    """One step of the live rows: recurrent product, cell, projection, results.

    Returns the barrier's next phase.
    """
    h_width, columns, padded = args.h_width, args.columns, args.padded
    cell_args, summed, mine = int64_at(cell_args_at), args.summed != 0, tile.begin * SIZE
    before = tile.hidden + ((step + 1) & 1) * tile.rows * h_width * SIZE
    after = tile.hidden + (step & 1) * tile.rows * h_width * SIZE
    others_before, others_after = others_at(args, tile, step)
    row = slot_of(args, step) * args.batch + tile.start
    if step == 0 or args.reset != 0:
        load_before(args, tile, step, live, before, others_before)
    # the first recurrent product is zero where nothing is carried in
    if (
        step > 0
        or int64_at(args.initial)[0] != 0
        or (args.reset != 0 and int64_at(args.reset_state)[0] != 0)
    ):
        target = (gate if summed else tile.r, columns)
        shape = (live, args.outputs)
        source, backwards = (before, h_width), (step & 1) != 0
        multiply(
            args, tile, shape, source, args.w_hh, args.scales_hh, target, summed, backwards
        )  # fmt: skip
    elif not summed:
        copy(tile.r, 0, 0, live * columns)
    h = after
    if args.w_hr != 0:
        h = tile.emitted
        if args.saved_unprojected != 0:
            h = args.saved_unprojected + row * padded * SIZE
    cell_args[field.ROWS], cell_args[field.X] = live, gate + mine
    cell_args[field.H_BEFORE], cell_args[field.BEFORE] = before + mine, others_before + mine
    cell_args[field.H_AFTER], cell_args[field.AFTER] = h + mine, others_after + mine
    if args.saved_recurrent != 0:
        cell_args[field.SAVED] = (
            args.saved_recurrent + row * args.saved_sides * padded * SIZE + mine
        )
    call(args.row_function, (cell_args_at,))  # type: ignore[call-arg]  # numba's
    if args.w_hr != 0:
        phase = barrier(team, phase)  # each thread's columns of y need all units
        units, first, last = args.units, tile.first, tile.last
        if last > first:
            b = (args.w_hr + first * units * SIZE, PANEL, PANEL * units)
            target = (after + first * SIZE, h_width)
            shape = (live, units, (last - first + PANEL - 1) // PANEL * PANEL)
            product(shape, (h, padded, 1), b, target, False, False)
    store_after(args, tile, step, live, after, others_after)
    return phase


@njit(nogil=True, error_model="numpy")
def forward_tile(args, tile, team, phase):
    """All steps of a tile's sequences, this thread's units; returns the barrier's next phase."""
    bias_r = tile.bias if args.summed != 0 else tile.bias + args.columns * SIZE
    if team.thread == 0:
        prepare(args, tile, bias_r)
    phase = barrier(team, phase)
    cell_args_at: int = new_cell_args()  # type: ignore[call-arg]  # numba's
    fill_cell_args(args, tile, int64_at(cell_args_at), bias_r)
    live, steps, chunk = tile.rows, args.steps, args.chunk
    for first in range(0, steps, chunk):
        last = min(first + chunk, steps)
        base = min(slot_of(args, first), slot_of(args, last - 1))
        # saved gate rows are those of all steps, others those of this chunk
        before = base * tile.gates_step * SIZE if args.saved_gates != 0 else 0
        gates = tile.gates + before
        input_side(args, tile, first, last, live, base, gates)
        for step in range(first, last):
            while live > 0 and length_of(args, tile.start + live - 1) <= step:
                live -= 1
            if live == 0:
                break
            gate = gates + (slot_of(args, step) - base) * tile.gates_step * SIZE
            phase = forward_step(args, tile, team, step, live, gate, cell_args_at, phase)
            phase = barrier(team, phase)
    return phase


def forward(args_at, task, running):
    """A task's share of the batch tiles: every `tasks`-th one, or its part of its team's tiles."""
    args, phase = loop_args_at(args_at), int64(1)
    number, teams, team = team_of(args, task, running)
    if team.thread >= team.threads:
        return
    rows = args.tile_rows
    scratch = args.scratch + number * args.scratch_bytes
    rounded = args.rounded + task * args.rounded_bytes
    for start in range(number * rows, args.batch, teams * rows):
        tile = tile_of(args, start, min(rows, args.batch - start), scratch, team, rounded)
        phase = forward_tile(args, tile, team, phase)
