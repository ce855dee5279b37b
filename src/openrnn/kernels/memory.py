"""Addresses as typed pointers: what a kernel gets is numbers, what it reads are arrays without bounds."""

from numba import types
from numba.extending import intrinsic


def _pointer_to(element):  # type: ignore[no-untyped-def]  # numba's own objects are untyped
    @intrinsic
    def at(_, address):  # type: ignore[no-untyped-def]
        def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), emit

    return at


float32_at = _pointer_to(types.float32)
float64_at = _pointer_to(types.float64)
int64_at = _pointer_to(types.int64)
bytes_at = _pointer_to(types.uint8)
