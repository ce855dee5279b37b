"""Addresses as typed pointers: compiled code gets int64 addresses and reads and writes there."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _pointer_to(element):
    @intrinsic
    def at(_, address):
        def emit(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), emit

    return at


float32_at = _pointer_to(types.float32)
float64_at = _pointer_to(types.float64)
uint32_at = _pointer_to(types.uint32)
int64_at = _pointer_to(types.int64)
bytes_at = _pointer_to(types.uint8)


@intrinsic
def no_overlap(_: Any) -> Any:
    """Stands first in a function: its pointer arguments do not overlap in memory.

    It sets LLVM's `noalias` on them, for which numba has no option. The loop vectoriser would
    otherwise compare all pairs of pointers at each call, and not vectorise where there are many.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for argument in builder.function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.void(), emit


def named(dtype: str) -> Any:
    """Puts the dtype into the name of a function that exists once for each dtype.

    The linker tells compiled functions apart by module, name, argument types and a count that
    starts at 0 in each process. Addresses have one type, whatever lies there, so of two kernels
    from the disk cache one could run a function of the other, compiled for another dtype.
    """

    def rename(function: Any) -> Any:
        function.__qualname__ = f"{function.__name__}_{dtype}"
        return function

    return rename
