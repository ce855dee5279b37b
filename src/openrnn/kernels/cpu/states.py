"""The states of one batch row, in scratch memory and in the tensors of a call, and their gradients.

`hidden` is the address of the emitted state [h_width], `others` of the others [states - 1, padded].
`group` is one of the array fields of `LoopArgs`; where a tensor is absent nothing is done.
"""

from numba import njit

from openrnn.kernels.cpu import rows
from openrnn.kernels.cpu.host import SIZES
from openrnn.kernels.cpu.memory import int64_at, named


def _for(dtype):
    size, copy, add = SIZES[dtype], getattr(rows, f"copy_{dtype}"), getattr(rows, f"add_{dtype}")

    @njit(forceinline=True, error_model="numpy")
    @named(dtype)
    def load(args, group, row, hidden, others):
        """Puts the states of a batch row in place; zeros where they are absent."""
        outputs, units, padded = args.outputs, args.units, args.padded
        at = int64_at(group)
        given = at[0]
        copy(hidden, given + row * outputs * size if given != 0 else 0, outputs, args.h_width)
        for k in range(args.states - 1):
            given = at[1 + k]
            source = given + row * units * size if given != 0 else 0
            copy(others + k * padded * size, source, units, padded)

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def clear(args, hidden, others):
        """Sets a row's gradients to zero."""
        copy(hidden, 0, 0, args.h_width)
        copy(others, 0, 0, (args.states - 1) * args.padded)

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def add_from(args, group, offset, hidden, others):
        """Adds a group's gradients, at a row offset of its tensors, to those of a row."""
        outputs, units, padded = args.outputs, args.units, args.padded
        at = int64_at(group)
        if at[0] != 0:
            add(hidden, at[0] + offset * outputs * size, outputs)
        for k in range(args.states - 1):
            if at[1 + k] != 0:
                source = at[1 + k] + offset * units * size
                add(others + k * padded * size, source, units)

    @njit(nogil=True, error_model="numpy")
    @named(dtype)
    def add_to(args, group, offset, hidden, others):
        """Adds a row's gradients to a group's, at a row offset of its tensors."""
        outputs, units, padded = args.outputs, args.units, args.padded
        at = int64_at(group)
        if at[0] != 0:
            add(at[0] + offset * outputs * size, hidden, outputs)
        for k in range(args.states - 1):
            if at[1 + k] != 0:
                target = at[1 + k] + offset * units * size
                add(target, others + k * padded * size, units)

    return load, clear, add_from, add_to


load_float32, clear_float32, add_from_float32, add_to_float32 = _for("float32")
load_float64, clear_float64, add_from_float64, add_to_float64 = _for("float64")
