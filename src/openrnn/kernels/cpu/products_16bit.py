"""Products of few float32 rows with a matrix of 16 bits as it is; sums are float32.

A step reads half as many bytes as of a float32 copy, which need not be made. Sums are added up in
the order of `product`, so the bits are those of such a copy. Weight gradients are rounded to 16
bits while they are near, as torch rounds. Each kernel is one of its own, which time loops call by
address: those of other dtypes lack it.
"""

from typing import Any

from llvmlite import ir
from numba import types

from openrnn.kernels.cpu.bf16 import SIXTEEN, WORDS, rounded_halves
from openrnn.kernels.cpu.memory import named
from openrnn.kernels.cpu.product import ElementType, make_dots, make_product
from openrnn.kernels.cpu.vectors import PANEL, Emitter, intrinsic

_HALF = ir.IntType(16)
_PANEL: int = PANEL["float32"]


def _at(emitter: Emitter, base: ir.Value, *offsets: ir.Value) -> ir.Value:
    """`Emitter.at` for elements of 16 bits."""
    if base.type == ir.IntType(64):
        base = emitter.builder.inttoptr(base, _HALF.as_pointer())
    for offset in offsets:
        base = emitter.builder.gep(base, [offset], source_etype=_HALF)
    return base


def _bits(emitter: Emitter, pointer: ir.Value, mask: ir.Value | None) -> ir.Value:
    """`Emitter.load` for 16 bits a lane, as integers."""
    halves = ir.VectorType(_HALF, emitter.lanes)
    pointer = emitter.builder.bitcast(pointer, halves.as_pointer())
    if mask is None:
        return emitter.builder.load(pointer, align=2)
    return emitter.masked_load(halves, pointer, mask, 2)


def _bfloat16(emitter: Emitter, pointer: ir.Value, mask: ir.Value | None = None) -> ir.Value:
    """Numbers of bfloat16, the upper halves of float32."""
    builder = emitter.builder
    bits = builder.zext(_bits(emitter, pointer, mask), WORDS)
    return builder.bitcast(builder.shl(bits, SIXTEEN), emitter.vector)


def _float16(emitter: Emitter, pointer: ir.Value, mask: ir.Value | None = None) -> ir.Value:
    """Numbers of float16: one instruction where `host.WIDENS_FLOAT16`."""
    numbers = ir.VectorType(ir.HalfType(), emitter.lanes)
    bits = emitter.builder.bitcast(_bits(emitter, pointer, mask), numbers)
    return emitter.builder.fpext(bits, emitter.vector)


def _to_float16(emitter: Emitter, vector: ir.Value) -> ir.Value:
    """The bits of the nearest numbers of float16, ties to even."""
    numbers = emitter.builder.fptrunc(vector, ir.VectorType(ir.HalfType(), emitter.lanes))
    return emitter.builder.bitcast(numbers, ir.VectorType(_HALF, emitter.lanes))


def _dots(name: str, load: Any) -> Any:
    made = make_dots("float32", name, ElementType(2, _at, load))

    @named(name)
    def dots(  # type: ignore[no-untyped-def]
        rows, inner, gates, units, padded, first, end, a_at, a_row, w, scales, c_at, c_row,
        accumulate, memory, backwards,
    ):  # fmt: skip
        """C[i, g padded + u] (+)= A[i, :] . W[g units + u, :], for the units [first, end) of gates.

        Args:
            rows, inner: of A. Strides `a_row` and `c_row` count elements.
            units, padded: the units of a gate in W and in C.
            scales, memory: unused, as `int8_product` has them.
            backwards: from the last units of the last gate to the first, with the same results.
        """
        made(
            (rows, inner), (gates, units, padded), (first, min(end, units)), (a_at, a_row),
            (w, inner), (c_at, c_row), accumulate != 0, backwards != 0,
        )  # fmt: skip

    return dots


def _product(name: str, load: Any) -> Any:
    made = make_product("float32", name, ElementType(2, _at, load))

    @named(name)
    def product(  # type: ignore[no-untyped-def]
        rows, inner, gates, units, padded, first, end, a_at, a_row, w, scales, c_at, c_row,
        accumulate, memory, backwards,
    ):  # fmt: skip
        """C[i, j] (+)= sum over k of A[i, k] W[k, j], for the columns [first, end), whole panels.

        Args:
            rows, inner: of A. Strides `a_row` and `c_row` count elements.
            units: the columns of W.
            gates, padded, scales, memory: unused, as other products have them.
            backwards: from the last panels to the first, with the same results.
        """
        made(
            (rows, inner, end - first), (a_at, a_row, 1), (w + first * 2, units, _PANEL),
            (c_at + first * 4, c_row), accumulate != 0, backwards != 0,
        )  # fmt: skip

    return product


def _store(name: str, narrowed: Any) -> Any:
    @intrinsic
    def stored(_, source, target, count):  # type: ignore[no-untyped-def]
        def emit(context: Any, builder: ir.IRBuilder, _: Any, args: list[ir.Value]) -> ir.Value:
            emitter = Emitter(builder, "float32")
            source, target, count = args

            def store(offset: ir.Value, mask: ir.Value | None) -> None:
                numbers = emitter.load(emitter.at(source, offset), mask)
                pointer = _at(emitter, target, offset)
                emitter.store(narrowed(emitter, numbers), pointer, mask, align=2)

            emitter.whole_vectors(count, store)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), emit

    @named(name)
    def store(source, target, count):  # type: ignore[no-untyped-def]
        """target[0:count] = source, float32 numbers rounded to 16 bits."""
        stored(source, target, count)

    return store


bfloat16_dots, float16_dots = _dots("bfloat16", _bfloat16), _dots("float16", _float16)
bfloat16_product, float16_product = (
    _product("bfloat16", _bfloat16), _product("float16", _float16),
)  # fmt: skip
bfloat16_store, float16_store = (
    _store("bfloat16", rounded_halves), _store("float16", _to_float16),
)  # fmt: skip
