"""A parallel region: the tasks of a kernel on the threads of an OpenMP library.

A kernel here is a C function `kernel(job, task, team)` of three int64; team is how many tasks run
at the same time.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from openrnn.kernels.memory import int64_at

INT = ir.IntType(64)


@intrinsic
def _call(_, function, job, task, team):  # type: ignore[no-untyped-def]
    """function(job, task, team), of a function's address."""

    def emit(context: Any, builder: Any, _: Any, args: list[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [INT, INT, INT])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic
def _ask(_, function):  # type: ignore[no-untyped-def]
    """What `int function(void)` says, of a function's address."""

    def emit(_: Any, builder: Any, __: Any, args: list[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), []), INT)

    return types.int64(types.int64), emit


def share(region):  # type: ignore[no-untyped-def]
    """One thread's tasks. A region: kernel, job, tasks, omp_get_thread_num, omp_get_num_threads."""
    field = int64_at(region)
    # a runtime may give fewer threads than were asked for
    team: int = _ask(field[4])  # type: ignore[call-arg]  # numba's
    for task in range(_ask(field[3]), field[2], team):
        _call(field[0], field[1], task, team)
