"""The functions of an exported layer, as text that numba compiles beside the layer's kernels."""

from typing import NamedTuple

from openrnn.backends.cpu.baked import CONSTANTS, Baked
from openrnn.backends.cpu.program import WORKSPACE, SlotRef
from openrnn.kernels.cpu.args import LINE

WORD = 8  # bytes of an argument
# symbols within the object, which no program sees
LOOP, ROW, DATA = "openrnn_loop", "openrnn_row", "openrnn_data"

_TEXT = """
from numba import int64

from openrnn.kernels.cpu.memory import bytes_at, int64_at
from openrnn.kernels.cpu.regions import call
from openrnn.kernels.cpu.symbols import data_at, function_at

data_of = data_at("{data}")
loop_of, row_of = function_at("{loop}", 3), function_at("{row_function}", 1)


def reset(state):
    at = bytes_at(state)
    for i in range({states}):
        at[i] = 0


def step(state, x, y, steps):
    data, work = data_of(), (state + {states} + {line} - 1) // {line} * {line}
    first = int64(0)
    while first < steps:
        count = min(int64({block}), steps - first)
{loops}
        first += {block}
"""

_LOOP = """
        args, given = int64_at(work + {at}), int64_at(data + {template})
        for i in range({words}):
            args[i] = given[i]
        args[{row}] = row_of()
        args[{steps}] = count
{values}
        call(loop_of(), (work + {at}, int64(0), int64(1)))
"""


class Functions(NamedTuple):
    """What is compiled.

    Attributes:
        text: defines `reset(state)` and `step(state, x, y, steps)`, of addresses.
        data: constants: weights, and arguments of loops.
        states: bytes of the states, which the memory of the caller begins with.
        work: bytes that follow them.
    """

    text: str
    data: bytes
    states: int
    work: int


def functions(baked: Baked, block: int) -> Functions:
    """The functions of a layer that multiplies the inputs of so many steps at a time."""
    spec, size = baked.spec, baked.size
    starts, states = [], 0
    for width in spec.state_sizes:
        starts.append(states)
        states += spec.chains * width * size
    data, loops, at = bytearray(baked.data), [], 0
    sizes = [-(-len(bytes(loop.args)) // LINE) * LINE for loop in baked.loops]
    scratch = sum(sizes)  # the arguments of all loops come first
    for loop, room in zip(baked.loops, sizes):
        template, words = len(data), bytes(loop.args)
        data += words + bytes(-len(words) % LINE)
        values = "\n".join(
            f"        args[{index}] = {_expression(value, starts, scratch, baked)}"
            for index, value in loop.given
        )
        found = {
            "row": loop.args.word_index("row_function"),
            "steps": loop.args.word_index("steps"),
        }
        count = len(words) // WORD
        loops.append(_LOOP.format(at=at, template=template, words=count, values=values, **found))
        at += room
    text = _TEXT.format(
        data=DATA, loop=LOOP, row_function=ROW, states=states, line=LINE, block=block,
        loops="".join(loops),
    )  # fmt: skip
    return Functions(text, bytes(data), states, scratch + baked.workspace.size + LINE)


def _expression(value: SlotRef, starts: list[int], scratch: int, baked: Baked) -> str:
    """The value of a slot in the text of `step`."""
    spec, size = baked.spec, baked.size
    slot, offset = value
    if slot in ("x_step", "x_row"):
        return str(spec.input_size)
    if slot == "x":
        return f"x + first * {spec.input_size * size} + {offset}"
    if slot == "y":
        return f"y + first * {spec.output_size * size} + {offset}"
    if slot == WORKSPACE:
        return f"work + {scratch + offset}"
    if slot == CONSTANTS:
        return f"data + {offset}"
    if isinstance(slot, tuple) and slot[0] in ("state", "final"):
        return f"state + {starts[slot[1]] + offset}"
    raise ValueError(f"no program without Python has a {slot}")
