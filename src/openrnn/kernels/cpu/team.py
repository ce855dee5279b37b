"""Thread teams, which share a tile: their barrier, and which units each thread computes.

Only threads that run at the same time may form one; see `launch`.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import int64, njit, types
from numba.extending import intrinsic

from openrnn.kernels.cpu.args import BARRIER, LINE

__all__ = ["Team", "barrier", "part_of", "share_of", "team_of"]

SPINS = 4000  # reads of a flag before a waiting thread yields its core
INT = ir.IntType(64)


@intrinsic
def _arrive(_, counter):  # type: ignore[no-untyped-def]
    """Adds 1 to a counter and returns what it was.

    What this thread wrote before is visible to who reads the sum.
    """

    def emit(_: Any, builder: ir.IRBuilder, __: Any, args: list[ir.Value]) -> ir.Value:
        pointer = builder.inttoptr(args[0], INT.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(INT, 1), "acq_rel")

    return types.int64(types.int64), emit


@intrinsic
def _publish(_, flag, phase):  # type: ignore[no-untyped-def]
    """Writes a flag; who reads it also sees what this thread has seen and written."""

    def emit(_: Any, builder: ir.IRBuilder, __: Any, args: list[ir.Value]) -> ir.Value:
        pointer = builder.inttoptr(args[0], INT.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return args[1]

    return types.int64(types.int64, types.int64), emit


@intrinsic
def _published(_, flag):  # type: ignore[no-untyped-def]
    """Reads a flag; what this thread reads later is not older."""

    def emit(_: Any, builder: ir.IRBuilder, __: Any, args: list[ir.Value]) -> ir.Value:
        pointer = builder.inttoptr(args[0], INT.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def _yield_core(_):  # type: ignore[no-untyped-def]
    """Lets another thread run on this core."""

    def emit(context: Any, builder: ir.IRBuilder, _: Any, __: Any) -> ir.Value:
        kind = ir.FunctionType(ir.IntType(32), [])
        found = builder.module.globals.get("sched_yield")
        builder.call(found or ir.Function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), emit


class Team(NamedTuple):
    """One thread of a team.

    Args:
        thread: which one it is; threads: how many there are.
        counter: the address of the barrier's counter, and a cache line further of its flag, both 0
            at first.
    """

    thread: int
    threads: int
    counter: int


@njit(nogil=True, error_model="numpy")
def barrier(team, phase):  # type: ignore[no-untyped-def]
    """Waits until every thread is here for the phase-th time, from 1 on; returns the next phase.

    Threads that wait poll the flag, so that they do not take the counter's line from those that
    still arrive. A barrier of log2(threads) rounds, in which each thread has flags of its own, took
    longer where threads share cores (benchmarks/log/cpu.md).
    """
    if team.threads == 1:
        return phase
    flag = team.counter + LINE
    if _arrive(team.counter) == team.threads * phase - 1:  # type: ignore[call-arg]  # numba's
        _publish(flag, phase)
        return phase + 1
    reads = 0
    while _published(flag) < phase:
        reads += 1
        if reads > SPINS:
            _yield_core()
    return phase + 1


@njit(forceinline=True, error_model="numpy")
def team_of(args, task, running):  # type: ignore[no-untyped-def]
    """Which team a task belongs to, how many teams there are, and its place in the team.

    A task whose thread is not below the team's `threads` has nothing to do.
    """
    size = args.team_size
    number, thread, teams = task // size, task % size, args.tasks // size
    if running != args.tasks:
        # threads of a team that do not run together would wait for ever: the first does it all
        size = int64(1)
    return number, teams, Team(thread, size, args.barriers + number * BARRIER)


@njit(forceinline=True, error_model="numpy")
def part_of(count, unit, team):  # type: ignore[no-untyped-def]
    """[begin, end), a thread's part of `count`; all of it, whole units or not, if it is alone."""
    begin, end = share_of(count, unit, team.thread, team.threads), count
    if team.threads > 1:
        end = share_of(count, unit, team.thread + 1, team.threads)
    return begin, end


@njit(nogil=True, error_model="numpy")
def share_of(count, unit, thread, threads):  # type: ignore[no-untyped-def]
    """Where a thread's share of `count` begins, a multiple of `unit`.

    The share of thread `threads`, which does not exist, begins where the last one ends.
    """
    return count // unit * thread // threads * unit
