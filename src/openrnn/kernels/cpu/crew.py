"""Threads that share a tile: each computes some units of every step and waits for the others.

Only threads that run at the same time may do so; see `launch`.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from openrnn.kernels.cpu.host import LINE, YIELDS

__all__ = ["LINE", "POSSIBLE", "meet", "share_of"]

POSSIBLE = YIELDS
SPINS = 4000  # looks before a thread lets others have its core
INT = ir.IntType(64)


@intrinsic
def _arrive(_, counter):  # type: ignore[no-untyped-def]
    """Adds 1 to a counter, after all that this thread wrote."""

    def emit(_: Any, builder: ir.IRBuilder, __: Any, args: list[ir.Value]) -> ir.Value:
        pointer = builder.inttoptr(args[0], INT.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(INT, 1), "acq_rel")

    return types.int64(types.int64), emit


@intrinsic
def _arrived(_, counter):  # type: ignore[no-untyped-def]
    """A counter, before all that this thread reads next."""

    def emit(_: Any, builder: ir.IRBuilder, __: Any, args: list[ir.Value]) -> ir.Value:
        pointer = builder.inttoptr(args[0], INT.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def _give_way(_):  # type: ignore[no-untyped-def]
    """Lets another thread run on this core."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, __: Any) -> ir.Value:
        kind = ir.FunctionType(ir.IntType(32), [])
        found = builder.module.globals.get("sched_yield")
        builder.call(found or ir.Function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), emit


@njit(nogil=True, error_model="numpy")
def meet(counter, members, turn):  # type: ignore[no-untyped-def]
    """Waits for the other members, who meet for the turn-th time; returns the next turn.

    The counter begins at 0, the turns at 1.
    """
    if members == 1:
        return turn
    _arrive(counter)  # type: ignore[call-arg]  # numba's
    looks = 0
    while _arrived(counter) < members * turn:
        looks += 1
        if looks > SPINS:
            _give_way()
    return turn + 1


@njit(nogil=True, error_model="numpy")
def share_of(count, unit, part, parts):  # type: ignore[no-untyped-def]
    """Where a part's share of `count` begins, in whole units; part `parts` begins where all end."""
    return count // unit * part // parts * unit
