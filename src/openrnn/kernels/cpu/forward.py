"""The forward time loop of one layer and direction, the same for every cell.

One of the kernel's arguments is the address of the cell's `step_rows`, which `codegen.numba`
prints. `loops` compiles the text of this file once for each dtype, put in place of float32.
"""

from typing import NamedTuple

from numba import int64, njit

from openrnn.kernels.cpu import cell_args as field
from openrnn.kernels.cpu.args import *  # the places of the arguments, all of them constants
from openrnn.kernels.cpu.memory import float64_at, int64_at
from openrnn.kernels.cpu.product import dots_float32 as dots
from openrnn.kernels.cpu.product import product_float32 as product
from openrnn.kernels.cpu.regions import call, new_cell_args
from openrnn.kernels.cpu.rows import copy_float32 as copy
from openrnn.kernels.cpu.rows import drop_float32 as drop
from openrnn.kernels.cpu.rows import ends_reset, is_reset, length_of, row_of, slot_of, time_of
from openrnn.kernels.cpu.rows import spread_float32 as spread
from openrnn.kernels.cpu.states import group_of
from openrnn.kernels.cpu.states import load_float32 as load
from openrnn.kernels.cpu.team import COUNTER_STRIDE, Team, barrier, share_of
from openrnn.kernels.cpu.vectors import PANEL as PANELS
from openrnn.kernels.cpu.vectors import SIZES

SIZE, PANEL = SIZES["float32"], PANELS["float32"]


class Tile(NamedTuple):
    """Sequences that run together, the units of one thread, and addresses of what it writes."""

    start: int  # the position of the first sequence
    rows: int
    begin: int  # this thread's units: [begin, end)
    end: int
    hidden: int  # [2, rows, width]: the emitted state, by steps in turn
    others: int  # [2, rows, other]: the other states, unless there is a history
    entry: int  # [rows, other]: states put in place before the first step
    bias: int  # [2, columns]: input side, recurrent side
    unwanted: int  # [kept_row]: where kept values go that nobody reads
    r: int  # [rows, columns]: the recurrent side, unless the gates take sums
    emitted: int  # [rows, padded]: before the projection
    x_rows: int  # [chunk * rows, inputs]
    gates: int  # [steps or chunk, rows or batch, columns]: what is kept, or scratch
    gates_step: int  # elements from one step's gate rows to those of the next


@njit(forceinline=True, error_model="numpy")
def tile_of(args, start, rows, scratch, team):
    """A tile whose rows lie in this scratch."""
    padded, columns, other = args[PADDED], args[COLUMNS], args[OTHERS] * args[PADDED]
    begin, end = share_of(padded, PANEL, team.thread, team.threads), padded
    if team.threads > 1:
        end = share_of(padded, PANEL, team.thread + 1, team.threads)
    hidden = scratch
    others = hidden + 2 * rows * args[WIDTH] * SIZE
    entry = others + 2 * rows * other * SIZE
    bias = entry + rows * other * SIZE
    unwanted = bias + 2 * columns * SIZE
    r = unwanted + args[KEPT] * padded * SIZE
    emitted = r + rows * columns * SIZE
    x_rows = emitted + rows * padded * SIZE
    gates, gates_step = x_rows + args[CHUNK] * rows * args[INPUTS] * SIZE, rows * columns
    if args[KEPT_AT] != 0:
        gates, gates_step = args[KEPT_AT] + start * columns * SIZE, args[BATCH] * columns
    return Tile(
        start, rows, begin, end, hidden, others, entry, bias, unwanted, r, emitted, x_rows, gates,
        gates_step,
    )  # fmt: skip


@njit(nogil=True, error_model="numpy")
def multiply(args, tile, shape, a, weight, c, accumulate):
    """C (+)= A times the transposed gate matrix, packed in panels or as it is.

    Of each gate the units of the thread: whole panels, unless it has them all. Shape is (rows,
    inner); a and c are (address, elements from row to row).
    """
    rows, inner = shape
    c_at, columns = c
    begin, end, padded = tile.begin, tile.end, args[PADDED]
    if args[PACKED] == 0:
        sizes, wanted = (args[GATES], args[UNITS], padded), (begin, min(end, args[UNITS]))
        dots(shape, sizes, wanted, a, (weight, inner), c, accumulate)
    elif end - begin == padded:
        b = (weight, PANEL, PANEL * inner)
        product((rows, inner, columns), (a[0], a[1], 1), b, c, accumulate)
    else:
        for g in range(args[GATES]):
            first = g * padded + begin
            b = (weight + first * inner * SIZE, PANEL, PANEL * inner)
            target = (c_at + first * SIZE, columns)
            product((rows, inner, end - begin), (a[0], a[1], 1), b, target, accumulate)


@njit(nogil=True, error_model="numpy")
def gather_inputs(args, tile, step, live, slot, gates, scale):
    """Copies a step's rows of x together, dropped; with skip input, they are each gate's too."""
    inputs, units, padded = args[INPUTS], args[UNITS], args[PADDED]
    for i in range(live):
        b = row_of(args, tile.start + i)
        t = time_of(args, step, length_of(args, tile.start + i))
        source = args[X] + (t * args[X_STEP] + b * args[X_ROW]) * SIZE
        target = tile.x_rows + (slot * tile.rows + i) * inputs * SIZE
        if args[DROP] != 0:
            drop(target, source, inputs, t, b, args, scale, False)
        else:
            copy(target, source, inputs, inputs)
        if args[SKIP] != 0:
            gate = gates + (slot * tile.gates_step + i * args[COLUMNS]) * SIZE
            for g in range(args[GATES]):
                copy(gate + g * padded * SIZE, target, units, padded)


@njit(nogil=True, error_model="numpy")
def input_side(args, tile, first, last, live, base, gates, scale):
    """Input products of the steps [first, last) into gate rows; `base` is the slot of the first."""
    inputs, columns, rows = args[INPUTS], args[COLUMNS], tile.rows
    ragged, dropping = args[LENGTHS] != 0, args[DROP] != 0
    gather = ragged or dropping or args[SKIP] != 0
    a = args[X] + (base * args[X_STEP] + tile.start * args[X_ROW]) * SIZE
    a_step, a_row = args[X_STEP], args[X_ROW]
    if gather:
        a, a_step, a_row = tile.x_rows, rows * inputs, inputs
    elif rows == 1:
        a_row = a_step
    for step in range(first, last):
        if not gather:
            break
        while live > 0 and length_of(args, tile.start + live - 1) <= step:
            live -= 1
        slot = slot_of(args, step) - base
        gather_inputs(args, tile, step, live, slot, gates, scale)
        if ragged and args[SKIP] == 0 and live > 0:
            source = (a + slot * a_step * SIZE, a_row)
            target = (gates + slot * tile.gates_step * SIZE, columns)
            multiply(args, tile, (live, inputs), source, args[W_IH], target, False)
    if ragged or args[SKIP] != 0:
        return
    if a_step == rows * a_row and tile.gates_step == rows * columns:
        shape = ((last - first) * rows, inputs)
        multiply(args, tile, shape, (a, a_row), args[W_IH], (gates, columns), False)
    else:
        for slot in range(last - first):
            source = (a + slot * a_step * SIZE, a_row)
            target = (gates + slot * tile.gates_step * SIZE, columns)
            multiply(args, tile, (rows, inputs), source, args[W_IH], target, False)


@njit(forceinline=True, error_model="numpy")
def store(args, tile, group, offset, hidden, others):
    """Writes this thread's units of a row's states, at a row offset of their tensors."""
    outputs, units, padded, begin = args[OUTPUTS], args[UNITS], args[PADDED], tile.begin
    at = group_of(args, group)
    if args[at] != 0:
        target, count = args[at] + (offset * outputs + begin) * SIZE, min(tile.end, outputs) - begin
        copy(target, hidden + begin * SIZE, count, count)
    for k in range(args[OTHERS]):
        if args[at + 1 + k] != 0:
            count = min(tile.end, units) - begin
            target = args[at + 1 + k] + (offset * units + begin) * SIZE
            copy(target, others + (k * padded + begin) * SIZE, count, count)


@njit(nogil=True, error_model="numpy")
def store_all(args, group, offset, hidden, others):
    """Writes a row's states, the units of all threads, at a row offset of their tensors."""
    outputs, units = args[OUTPUTS], args[UNITS]
    at = group_of(args, group)
    for k in range(1 + args[OTHERS]):
        size, source = (outputs, hidden) if k == 0 else (units, 0)
        if k > 0 and others != 0:
            source = others + (k - 1) * args[PADDED] * SIZE
        if args[at + k] != 0:
            copy(args[at + k] + offset * size * SIZE, source, size, size)


@njit(nogil=True, error_model="numpy")
def prepare(args, tile, bias_r):
    """What one thread of a team does before the first step.

    Adds up the biases, clears what lies past the ends of sequences, and passes the initial states
    of sequences without steps on to the final ones.
    """
    if args[SUMMED] == 0 and args[PACKED] == 0:
        # unpacked products leave the padding as it is
        copy(tile.r, 0, 0, tile.rows * args[COLUMNS])
    copy(tile.bias, 0, 0, 2 * args[COLUMNS])
    spread(tile.bias, args[BIAS_X], args[GATES], args[UNITS], args[PADDED])
    spread(bias_r, args[BIAS_R], args[GATES], args[UNITS], args[PADDED])
    for i in range(tile.rows):
        b, length = row_of(args, tile.start + i), length_of(args, tile.start + i)
        for t in range(length, args[STEPS]):
            copy(args[Y] + (t * args[Y_STEP] + b * args[Y_ROW]) * SIZE, 0, 0, args[OUTPUTS])
            store_all(args, EVERY, t * args[BATCH] + b, 0, 0)
        if length == 0:
            load(args, INITIAL, b, tile.hidden, tile.entry)
            store_all(args, FINAL, b, tile.hidden, tile.entry)


@njit(forceinline=True, error_model="numpy")
def fill_cell_args(args, tile, cell_args, bias_r):
    """The arguments of the cell's step that are the same in all steps."""
    other, mine = args[OTHERS] * args[PADDED], tile.begin * SIZE
    cell_args[field.UNITS], cell_args[field.STRIDE] = tile.end - tile.begin, args[PADDED]
    cell_args[field.X_ROW] = args[COLUMNS]
    cell_args[field.R], cell_args[field.R_ROW] = tile.r + mine, args[COLUMNS]
    cell_args[field.BIAS], cell_args[field.BIAS_R] = tile.bias + mine, bias_r + mine
    cell_args[field.H_BEFORE_ROW], cell_args[field.BEFORE_ROW] = args[WIDTH], other
    cell_args[field.VECTORS] = args[VECTORS_AT] + mine
    cell_args[field.H_AFTER_ROW] = args[PADDED] if args[W_HR] != 0 else args[WIDTH]
    cell_args[field.AFTER_ROW], cell_args[field.KEPT] = other, tile.unwanted + mine
    cell_args[field.KEPT_ROW] = args[KEPT] * args[PADDED] if args[KEPT_R] != 0 else 0


@njit(forceinline=True, error_model="numpy")
def others_at(args, tile, step):
    """Where the states other than the emitted one lie before and after a step."""
    other = args[OTHERS] * args[PADDED]
    before, after = tile.entry, tile.others + (step & 1) * tile.rows * other * SIZE
    if args[HISTORY] != 0:
        slot = slot_of(args, step)
        after = args[HISTORY] + (slot * args[BATCH] + tile.start) * other * SIZE
    if step > 0:
        before = tile.others + ((step + 1) & 1) * tile.rows * other * SIZE
        if args[HISTORY] != 0:
            slot = slot_of(args, step - 1)
            before = args[HISTORY] + (slot * args[BATCH] + tile.start) * other * SIZE
    return before, after


@njit(forceinline=True, error_model="numpy")
def load_before(args, tile, step, live, hidden, others):
    """Puts the states in place that a step does not have from the step before."""
    width, other = args[WIDTH], args[OTHERS] * args[PADDED]
    for i in range(live):
        b = row_of(args, tile.start + i)
        t = time_of(args, step, length_of(args, tile.start + i))
        if is_reset(args, step, t, b):
            load(args, FRESH, b, hidden + i * width * SIZE, others + i * other * SIZE)
        elif step == 0:
            load(args, INITIAL, b, hidden + i * width * SIZE, others + i * other * SIZE)


@njit(forceinline=True, error_model="numpy")
def store_after(args, tile, step, live, before, after, others):
    """Writes a step's output, and its states where they are wanted."""
    width, outputs, other = args[WIDTH], args[OUTPUTS], args[OTHERS] * args[PADDED]
    mine, count = tile.begin * SIZE, min(tile.end, outputs) - tile.begin
    for i in range(live):
        b, length = row_of(args, tile.start + i), length_of(args, tile.start + i)
        t = time_of(args, step, length)
        hidden, rest = after + i * width * SIZE, others + i * other * SIZE
        target = args[Y] + (t * args[Y_STEP] + b * args[Y_ROW]) * SIZE
        copy(target + mine, hidden + mine, count, count)
        store(args, tile, EVERY, t * args[BATCH] + b, hidden, rest)
        if step == length - 1:
            if ends_reset(args, b):
                hidden, rest = before + i * width * SIZE, tile.entry + i * other * SIZE
                load(args, FRESH, b, hidden, rest)
            store(args, tile, FINAL, b, hidden, rest)


@njit(forceinline=True, error_model="numpy")
def forward_step(args, tile, step, live, gate, cell_args_at):
    """One step of the live rows: recurrent product, cell, projection, results."""
    width, columns, padded = args[WIDTH], args[COLUMNS], args[PADDED]
    cell_args, summed, mine = int64_at(cell_args_at), args[SUMMED] != 0, tile.begin * SIZE
    before = tile.hidden + ((step + 1) & 1) * tile.rows * width * SIZE
    after = tile.hidden + (step & 1) * tile.rows * width * SIZE
    others_before, others_after = others_at(args, tile, step)
    row = slot_of(args, step) * args[BATCH] + tile.start
    if step == 0 or args[RESET] != 0:
        load_before(args, tile, step, live, before, others_before)
    # the first recurrent product is zero where nothing is carried in
    if (
        step > 0
        or args[group_of(args, INITIAL)] != 0
        or (args[RESET] != 0 and args[group_of(args, FRESH)] != 0)
    ):
        target = (gate if summed else tile.r, columns)
        shape = (live, args[OUTPUTS])
        multiply(args, tile, shape, (before, width), args[W_HH], target, summed)
    elif not summed:
        copy(tile.r, 0, 0, live * columns)
    h = after
    if args[W_HR] != 0:
        h = tile.emitted
        if args[PROJECTED] != 0:
            h = args[PROJECTED] + row * padded * SIZE
    cell_args[field.ROWS], cell_args[field.X] = live, gate + mine
    cell_args[field.H_BEFORE], cell_args[field.BEFORE] = before + mine, others_before + mine
    cell_args[field.H_AFTER], cell_args[field.AFTER] = h + mine, others_after + mine
    if args[KEPT_R] != 0:
        cell_args[field.KEPT] = args[KEPT_R] + row * args[KEPT] * padded * SIZE + mine
    call(args[ROW_FUNCTION], (cell_args_at,))  # type: ignore[call-arg]  # numba's
    if args[W_HR] != 0:
        units = args[UNITS]
        b = (args[W_HR], PANEL, PANEL * units)
        product((live, units, width), (h, padded, 1), b, (after, width), False)
    store_after(args, tile, step, live, before, after, others_after)


@njit(nogil=True, error_model="numpy")
def forward_tile(args, tile, team, scale, phase):
    """All steps of a tile's sequences, this thread's units; returns the barrier's next phase."""
    bias_r = tile.bias if args[SUMMED] != 0 else tile.bias + args[COLUMNS] * SIZE
    if team.thread == 0:
        prepare(args, tile, bias_r)
    phase = barrier(team, phase)
    cell_args_at: int = new_cell_args()  # type: ignore[call-arg]  # numba's
    fill_cell_args(args, tile, int64_at(cell_args_at), bias_r)
    live, steps, chunk = tile.rows, args[STEPS], args[CHUNK]
    for first in range(0, steps, chunk):
        last = min(first + chunk, steps)
        base = min(slot_of(args, first), slot_of(args, last - 1))
        # kept gate rows are those of all steps, others those of this chunk
        kept = base * tile.gates_step * SIZE if args[KEPT_AT] != 0 else 0
        gates = tile.gates + kept
        input_side(args, tile, first, last, live, base, gates, scale)
        for step in range(first, last):
            while live > 0 and length_of(args, tile.start + live - 1) <= step:
                live -= 1
            if live == 0:
                break
            gate = gates + (slot_of(args, step) - base) * tile.gates_step * SIZE
            forward_step(args, tile, step, live, gate, cell_args_at)
            phase = barrier(team, phase)
    return phase


def forward(args_at, task, running):
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
    for start in range(place * rows, args[BATCH], teams * rows):
        tile = tile_of(args, start, min(rows, args[BATCH] - start), scratch, team)
        phase = forward_tile(args, tile, team, scale, phase)
