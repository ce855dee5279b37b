"""Addresses as typed pointers: a kernel gets numbers and reads arrays without bounds."""

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
int64_at = _pointer_to(types.int64)
bytes_at = _pointer_to(types.uint8)


@intrinsic
def no_overlap(_: Any) -> Any:
    """Said first in a function: none of its pointer arguments reach the same memory.

    It sets LLVM's `noalias` on them, for which numba has no option; the loop vectoriser would
    otherwise compare all pairs of pointers at each call, and give up where they are many.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for argument in builder.function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.void(), emit


def named(dtype: str) -> Any:
    """Puts the type into the name of a function that is made once for each.

    The linker knows a compiled function by module, name, argument types and a count that starts
    anew in each process. Addresses have one type, so of two kernels that came from the disk cache
    one would otherwise run the other's function, made for numbers of another size.
    """

    def rename(function: Any) -> Any:
        function.__qualname__ = f"{function.__name__}_{dtype}"
        return function

    return rename
