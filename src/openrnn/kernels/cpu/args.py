"""The arguments of the CPU kernels: one table each, for compiled code and for launches.

A table is a class. Launches fill an object of it by name, which is the memory that the kernel
reads; compiled code reads the same fields through `args_type`. Every field is 8 bytes wide. Sizes
and strides count elements, addresses bytes. A field that is not set is 0, and an absent tensor has
address 0.
"""

import ctypes
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

LINE = 64  # bytes of a cache line
BARRIER = 2 * LINE  # bytes of a team's barrier: a counter, and what waiting threads poll
# units of a panel of int8 weights, [gates, panels, pairs of columns, INT8_PANEL, 2], everywhere
INT8_PANEL = 16
DIGEST_WORDS = 128  # of the digest of a part of a matrix
States = Sequence[int]  # an address for each state of the cell, the emitted one first
Table = TypeVar("Table", bound="type[Args]")


class Field(NamedTuple):
    """A field: `word` counts words of 8 bytes; of an array field arrays, after all numbers."""

    word: int
    kind: Any  # int, float or States
    meaning: str


class Args(ctypes.Structure):
    """Arguments of a kernel, given by name.

    Raises:
        AttributeError: a name that is not in the table is set.
    """

    __slots__ = ()
    fields: ClassVar[dict[str, Field]]
    arrays_at: ClassVar[int]  # the index of the first word of array fields

    def word_index(self, name: str, entry: int = 0) -> int:
        """The index of the word of 8 bytes that is a field, or an entry of an array field."""
        field = self.fields[name]
        if field.kind is States:
            return self.arrays_at + field.word * len(getattr(self, name)) + entry
        return field.word


def _table(cls: Table) -> Table:
    """Makes a table of a class whose annotations are (Python type, meaning)."""
    hints = get_type_hints(cls, include_extras=True)
    told = {name: get_args(hints[name]) for name in cls.__annotations__}
    numbers = [name for name, (kind, _) in told.items() if kind is not States]
    arrays = [name for name in told if name not in numbers]
    cls.fields = {
        name: Field(index, *told[name]) for group in (numbers, arrays)
        for index, name in enumerate(group)
    }  # fmt: skip
    cls.arrays_at = len(numbers)
    plain: dict[Any, Any] = {int: ctypes.c_int64, float: ctypes.c_double}
    cls._fields_ = [(name, plain[told[name][0]]) for name in numbers]
    return cls


@_table
class LoopArgs(Args):
    """Arguments of the time loops, forward and backward, of one layer and direction."""

    __slots__ = ()
    row_function: Annotated[int, "address of the cell's step or derivative: f(int64)"]

    steps: Annotated[int, "T"]
    batch: Annotated[int, "B"]
    inputs: Annotated[int, "width of x"]
    units: Annotated[int, "H"]
    outputs: Annotated[int, "O, the width of y"]
    padded: Annotated[int, "H rounded up to whole vectors"]
    columns: Annotated[int, "of a gate row: gates * padded, rounded up to whole panels"]
    h_width: Annotated[int, "O rounded up to whole panels"]
    x_width: Annotated[int, "the input width rounded up to whole panels"]
    widest: Annotated[int, "the most columns of a weight gradient, rounded up to whole panels"]

    gates: Annotated[int, "gates of the cell"]
    states: Annotated[int, "states of the cell; the others are all but the emitted one"]
    vectors: Annotated[int, "per-unit vectors of the cell"]
    saved_sides: Annotated[int, "gates whose recurrent side is saved apart"]
    summed: Annotated[int, "1: every gate reads only the sum x + r"]

    reverse: Annotated[int, "1: the reverse direction"]
    tile_rows: Annotated[int, "rows of a tile"]
    chunk: Annotated[int, "steps whose products are computed together"]
    packed: Annotated[int, "1: gate matrices are packed into panels"]
    skip: Annotated[int, "1: x goes to the gates as it is, there is no input matrix"]
    x_gate: Annotated[int, "without input matrix: elements of x from a gate to the next, or 0"]
    overwrite: Annotated[int, "1: the first products of a task overwrite its sums"]

    tasks: Annotated[int, "tasks that share the tiles"]
    team_size: Annotated[int, "tasks of a team, which share each of the team's tiles"]
    barriers: Annotated[int, "BARRIER bytes of 0 for each team, from a cache line on"]
    scratch: Annotated[int, "memory [teams, scratch_bytes]"]
    scratch_bytes: Annotated[int, "of one team"]

    drop: Annotated[int, "1: x has a dropout mask"]
    drop_low: Annotated[int, "of the mask's key"]
    drop_high: Annotated[int, "of the mask's key"]
    drop_word: Annotated[int, "the last word of the mask's counter"]
    drop_threshold: Annotated[int, "the smallest word whose value is not dropped"]
    drop_scale: Annotated[float, "what values that are not dropped are multiplied by"]

    x: Annotated[int, "[T, B, inputs], by strides"]
    x_step: Annotated[int, "from a step to the next"]
    x_row: Annotated[int, "from a row to the next"]
    y: Annotated[int, "[T, B, outputs], by strides"]
    y_step: Annotated[int, "from a step to the next"]
    y_row: Annotated[int, "from a row to the next"]

    w_ih: Annotated[int, "[gates * units, inputs], or panels of it"]
    w_hh: Annotated[int, "[gates * units, outputs], or panels of it; see `product`"]
    w_hr: Annotated[int, "panels of the projection [outputs, units]"]
    bias_x: Annotated[int, "[gates, units]"]
    bias_r: Annotated[int, "[gates, units]"]
    unit_vectors: Annotated[int, "[vectors, padded]"]

    scales_ih: Annotated[int, "w_ih is int8 panels with these scales"]
    scales_hh: Annotated[int, "w_hh is int8 panels with these scales"]
    product: Annotated[
        int, "address of the product with a matrix that is not float32, as it is or in panels; or 0"
    ]
    pairs_panels: Annotated[int, "backward: address of `pairs_panels`; 0: products of float32"]
    pairs_outer: Annotated[int, "backward: address of `pairs_outer`"]
    store_16bit: Annotated[
        int, "backward: address of what stores gradients of gate matrices in 16 bits; or 0"
    ]
    rounded: Annotated[int, "memory [tasks, rounded_bytes]: rows for a product, or of gradients"]
    rounded_bytes: Annotated[int, "of one task"]

    lengths: Annotated[int, "int64 [B]"]
    order: Annotated[int, "int64 [B]: rows by falling length"]
    reset: Annotated[int, "bytes [T, B]"]

    saved_gates: Annotated[int, "gate rows [T, B, columns]"]
    saved_recurrent: Annotated[int, "recurrent sides apart [T, B, saved_sides * padded]"]
    saved_states: Annotated[int, "the other states [T, B, (states - 1) * padded]"]
    saved_unprojected: Annotated[int, "outputs before the projection [T, B, padded]"]

    dy: Annotated[int, "backward: [T, B, outputs], by strides"]
    dy_step: Annotated[int, "from a step to the next"]
    dy_row: Annotated[int, "from a row to the next"]
    dx: Annotated[int, "backward: out [T, B, inputs], by strides"]
    dx_step: Annotated[int, "from a step to the next"]
    dx_row: Annotated[int, "from a row to the next"]
    dx_add: Annotated[int, "1: dx is added to what is there"]
    sums: Annotated[
        int,
        "backward: [teams, sums_bytes]: d_w_ih [columns, x_width], d_w_hh [columns, h_width], "
        "d_w_hr [outputs, padded], d_bias_x [columns], d_bias_r [columns], "
        "d_vectors [vectors, padded]",
    ]
    sums_bytes: Annotated[int, "of one team"]
    d_w_ih: Annotated[int, "of a single team: out, in place of the part of the sums; 0: that part"]
    d_w_hh: Annotated[int, "the same"]

    initial: Annotated[States, "before the first step"]
    reset_state: Annotated[States, "put in place by a reset"]
    final: Annotated[States, "after the last step"]
    all_states: Annotated[States, "after every step"]
    d_initial: Annotated[States, "backward: the gradient of `initial`, added to"]
    d_reset_state: Annotated[States, "backward: the gradient of `reset_state`, added to"]
    d_final: Annotated[States, "backward: the gradient of `final`"]
    d_all_states: Annotated[States, "backward: the gradient of `all_states`"]


@_table
class PackArgs(Args):
    """Arguments of `transpose` and `pack`, which write a matrix in panels."""

    __slots__ = ()
    tasks: Annotated[int, "tasks that share the panels"]
    matrix: Annotated[int, "[gates * rows, columns], contiguous"]
    gates: Annotated[int, ""]
    rows: Annotated[int, "of a gate"]
    padded: Annotated[int, "rows of a gate in the panels"]
    columns: Annotated[int, ""]
    out: Annotated[int, "the panels"]


@_table
class DigestArgs(Args):
    """Arguments of `digest`, which tells whether a matrix has changed."""

    __slots__ = ()
    tasks: Annotated[int, "tasks that share the matrix"]
    matrix: Annotated[int, "its memory"]
    words: Annotated[int, "of 4 bytes in it"]
    parts: Annotated[int, "of the matrix, each with a digest of its own"]
    out: Annotated[int, "[parts, DIGEST_WORDS] of 4 bytes"]


@_table
class CollectArgs(Args):
    """Arguments of `collect`, which adds up the gradients that teams made."""

    __slots__ = ()
    tasks: Annotated[int, "tasks that share the rows"]
    sums: Annotated[int, "[parts, gates, padded, width]"]
    parts: Annotated[int, "teams"]
    part: Annotated[int, "elements from one part to the next"]
    gates: Annotated[int, ""]
    padded: Annotated[int, "rows of a gate in the sums"]
    rows: Annotated[int, "of a gate"]
    width: Annotated[int, "columns of the sums"]
    columns: Annotated[int, "of the gradient"]
    out: Annotated[int, "[gates, rows, columns]"]


@_table
class RegionArgs(Args):
    """Arguments of `regions.share`: a kernel whose tasks the threads of a parallel region share."""

    __slots__ = ()
    kernel: Annotated[int, "address of f(args, task, running)"]
    args: Annotated[int, "address of the kernel's arguments"]
    tasks: Annotated[int, ""]
    thread_number: Annotated[int, "address of omp_get_thread_num"]
    thread_count: Annotated[int, "address of omp_get_num_threads"]


@_table
class TaskArgs(Args):
    """Arguments of `regions.run_alone`: a kernel of one task, which lacks some of its arguments."""

    __slots__ = ()
    kernel: Annotated[int, "address of f(args, task, running)"]
    args: Annotated[int, "the kernel's arguments, but for those that are lacking"]
    words: Annotated[int, "of 8 bytes in them"]
    lacking: Annotated[
        int, "int64 [count, 3]: a word's index, which value goes there, and what is added to it"
    ]
    count: Annotated[int, ""]


@_table
class TensorTasksArgs(Args):
    """Arguments of `python_call.run_on_tensors`: tasks, and where their addresses come from.

    Tasks choose from the same values: numbers, the addresses of tensors that a run gets, of those
    that it makes, and of scratch memory. Objects are addresses of Python's objects.
    """

    __slots__ = ()
    tasks: Annotated[int, "int64 [count]: addresses of `TaskArgs`, run one after the other"]
    count: Annotated[int, ""]
    words: Annotated[int, "of 8 bytes in the arguments of the largest one"]
    values: Annotated[int, "how many there are"]
    numbers: Annotated[int, "int64 [known]"]
    known: Annotated[int, ""]
    given: Annotated[int, "tensors that a run gets"]
    makers: Annotated[int, "int64 [values - known - given - 1]: objects, which make a tensor each"]
    scratch_bytes: Annotated[int, "a multiple of 8"]
    data_ptr: Annotated[int, "the object Tensor.data_ptr"]


def loop_args(states: int) -> type[LoopArgs]:
    """The table of the loops of a cell with this number of states: its array fields are as long."""
    array = ctypes.c_int64 * states
    fields = [(name, array) for name, field in LoopArgs.fields.items() if field.kind is States]
    return type("LoopArgs", (LoopArgs,), {"__slots__": (), "_fields_": fields})
