"""Vector instructions for the CPU kernels, written as LLVM IR.

A vector is as wide as the processor's registers, see `host`. Addresses are int64; strides count
elements.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from openrnn.kernels.cpu.host import LANES, PANEL, REGISTERS, SIZES

__all__ = [
    "LANES", "PANEL", "REGISTERS", "SIZES", "Emitter", "compiled", "intrinsic", "number",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """`function` compiled by numba where it is called."""
    return njit(function, nogil=True, error_model="numpy")  # type: ignore[no-any-return]


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for compiled code that writes its own LLVM IR."""
    return numba_intrinsic(prefer_literal=True)(function)


_SCALARS = {"float32": ir.FloatType(), "float64": ir.DoubleType()}


def number(value: int, bits: int = 64) -> ir.Constant:
    """An integer constant, for addresses and counts unless `bits` says otherwise."""
    return ir.Constant(ir.IntType(bits), value)


class Emitter:
    """Writes the vector instructions of one dtype into the body of an intrinsic."""

    def __init__(self, builder: ir.IRBuilder, dtype: str) -> None:
        self.builder = builder
        self.scalar = _SCALARS[dtype]
        self.size = SIZES[dtype]
        self.lanes = LANES[dtype]
        self.vector = ir.VectorType(self.scalar, self.lanes)

    def at(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        """The pointer `base` plus the sum of `offsets`, in elements; `base` may be an address."""
        if base.type == ir.IntType(64):
            base = self.builder.inttoptr(base, self.scalar.as_pointer())
        for offset in offsets:
            base = self.builder.gep(base, [offset], source_etype=self.scalar)
        return base

    def load(self, pointer: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """The vector at `pointer`; where `mask` is false nothing is read and the lane is 0."""
        vector = self.vector if mask is None else ir.VectorType(self.scalar, mask.type.count)
        pointer = self.builder.bitcast(pointer, vector.as_pointer())
        if mask is None:
            return self.builder.load(pointer, align=self.size)
        return self.masked_load(vector, pointer, mask, self.size)

    def masked_load(
        self, vector: ir.Type, pointer: ir.Value, mask: ir.Value, align: int
    ) -> ir.Value:
        """A vector of any type; where `mask` is false nothing is read and the lane is 0."""
        given = pointer, number(align, 32), mask, vector(None)
        return self._call("masked.load", ".p0", vector, *given)

    def store(
        self, value: ir.Value, pointer: ir.Value, mask: ir.Value | None = None, align: int = 0
    ) -> None:
        """Writes a vector of any type, but not where `mask` is false.

        align: bytes that the pointer is a multiple of; 0 stands for the size of an element.
        """
        pointer = self.builder.bitcast(pointer, value.type.as_pointer())
        if mask is None:
            self.builder.store(value, pointer, align=align or self.size)
        else:
            given = value, pointer, number(align or self.size, 32), mask
            self._call("masked.store", ".p0", ir.VoidType(), *given)

    def prefetch(self, pointer: ir.Value) -> None:
        """Asks for the cache line of `pointer`, which need not be memory of ours."""
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        declared = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(self.builder.module, declared, "llvm.prefetch.p0")
        # to read, into all caches, of data
        how = number(0, 32), number(3, 32), number(1, 32)
        self.builder.call(function, [self.builder.bitcast(pointer, byte), *how])

    def multiply_add(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z, fused where the machine can."""
        return self._call("fmuladd", "", x.type, x, y, z)

    def splat(self, value: ir.Value, lanes: int) -> ir.Value:
        first = ir.VectorType(value.type, lanes)(ir.Undefined)
        first = self.builder.insert_element(first, value, number(0, 32))
        return self.shuffle(first, first, [0] * lanes)

    def shuffle(self, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
        return self.builder.shuffle_vector(x, y, mask)

    def below(self, count: ir.Value, lanes: int) -> ir.Value:
        """The mask of `lanes` lanes of which the first `count` are true."""
        limits = self.splat(self.builder.trunc(count, ir.IntType(32)), lanes)
        return self.builder.icmp_signed("<", limits.type(list(range(lanes))), limits)

    def zeros(self, count: int) -> list[ir.Value]:
        """Stack slots that hold zero vectors; LLVM turns them into registers."""
        slots = [cgutils.alloca_once(self.builder, self.vector) for _ in range(count)]
        for slot in slots:
            self.builder.store(self.vector(None), slot)
        return slots

    def add_product(self, slot: ir.Value, x: ir.Value, y: ir.Value) -> None:
        self.builder.store(self.multiply_add(x, y, self.builder.load(slot)), slot)

    def lane_sums(self, vectors: list[ir.Value]) -> ir.Value:
        """The vector of the sums over the lanes of each of `vectors`, whose number is 2**n.

        Each addition adds lanes that are half a group apart, however many vectors there are, so the
        number of vectors does not change the order of the additions.
        """
        group = self.lanes  # neighbouring lanes that still belong to one sum
        while group > 1 or len(vectors) > 1:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=False)) or [
                (vectors[0], vectors[0])
            ]
            width = vectors[0].type.count * min(2, len(vectors))
            low = [lane for lane in range(width) if lane % group < (group + 1) // 2]
            high = [lane + group // 2 for lane in low]
            vectors = [self.shuffle(x, y, low) for x, y in pairs]
            if group > 1:
                halves = [self.shuffle(x, y, high) for x, y in pairs]
                vectors = [self.builder.fadd(x, y) for x, y in zip(vectors, halves, strict=True)]
                group //= 2
        return vectors[0]

    @contextmanager
    def loop(self, count: ir.Value) -> Iterator[ir.Value]:
        """The body of a loop over 0 .. count - 1; yields the index.

        LLVM is told not to unroll it. Where strides are constants it would, and load what the next
        round multiplies before this one is done: twenty sums fill the registers, so half of the
        time went to spills.
        """
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index
        _, latch = loop.index.incomings[-1]
        module = self.builder.module
        no_unroll = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
        loop_id = module.add_metadata([no_unroll])
        loop_id.operands = (loop_id, no_unroll)  # a loop's metadata begins with itself
        latch.terminator.set_metadata("llvm.loop", loop_id)

    def whole_vectors(
        self, count: ir.Value, look: Callable[[ir.Value, ir.Value | None], None]
    ) -> None:
        """`look` at the offset of each vector of a row, of the last one with a mask."""
        builder, lanes = self.builder, number(self.lanes)
        with cgutils.for_range(builder, builder.udiv(count, lanes)) as loop:
            look(builder.mul(loop.index, lanes), None)
        tail = builder.urem(count, lanes)
        with builder.if_then(builder.icmp_signed(">", tail, number(0))):
            look(builder.sub(count, tail), self.below(tail, self.lanes))

    @contextmanager
    def cases(self, value: ir.Value) -> Iterator[Callable[[int], None]]:
        """A switch: inside, `case(n)` starts the code for `value` n; other values do nothing."""
        end = self.builder.append_basic_block("end")
        switch = self.builder.switch(value, end)

        def case(n: int) -> None:
            if not self.builder.block.is_terminated:
                self.builder.branch(end)
            block = self.builder.append_basic_block("case")
            switch.add_case(number(n), block)
            self.builder.position_at_end(block)

        yield case
        self.builder.branch(end)
        self.builder.position_at_end(end)

    def _call(self, name: str, suffix: str, returned: ir.Type, *args: ir.Value) -> ir.Value:
        vector = args[0].type if isinstance(args[0].type, ir.VectorType) else returned
        letter = "f" if isinstance(vector.element, (ir.FloatType, ir.DoubleType)) else "i"
        bits = vector.element.width if letter == "i" else 8 * self.size
        kind = f"v{vector.count}{letter}{bits}"
        declared = ir.FunctionType(returned, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(
            self.builder.module, declared, f"llvm.{name}.{kind}{suffix}"
        )
        return self.builder.call(function, args)
