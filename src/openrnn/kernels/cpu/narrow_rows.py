"""Products of few float32 rows with a matrix of 16 bits as it is, W[units, inner]; float32 sums.

A step reads half as many bytes as of a float32 copy, which need not be made. Sums are added up in
the order of `dots`, so the bits are those of such a copy. Each kernel is one of its own, which time
loops call by address: those of other dtypes lack it.
"""

from typing import Any

from llvmlite import ir

from openrnn.kernels.cpu.memory import named
from openrnn.kernels.cpu.product import Elements, make_dots
from openrnn.kernels.cpu.vectors import Emitter

_HALF, _WORD = ir.IntType(16), ir.IntType(32)


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
    builder, words = emitter.builder, ir.VectorType(_WORD, emitter.lanes)
    bits = builder.zext(_bits(emitter, pointer, mask), words)
    return builder.bitcast(builder.shl(bits, words([16] * emitter.lanes)), emitter.vector)


def _float16(emitter: Emitter, pointer: ir.Value, mask: ir.Value | None = None) -> ir.Value:
    """Numbers of float16: one instruction where `host.WIDENS_FLOAT16`."""
    numbers = ir.VectorType(ir.HalfType(), emitter.lanes)
    bits = emitter.builder.bitcast(_bits(emitter, pointer, mask), numbers)
    return emitter.builder.fpext(bits, emitter.vector)


def _kernel(name: str, load: Any) -> Any:
    made = make_dots("float32", name, Elements(2, _at, load))

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


bfloat16_dots, float16_dots = _kernel("bfloat16", _bfloat16), _kernel("float16", _float16)
