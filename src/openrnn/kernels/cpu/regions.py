"""How kernels are started: their tasks on the threads of an OpenMP library, or a single one.

A kernel is a C function `kernel(args_at, task, running)` of three int64: the address of its
arguments, which task this is, and how many tasks run at the same time.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from openrnn.kernels.cpu import cell_args
from openrnn.kernels.cpu.args_type import region_args_at, task_args_at
from openrnn.kernels.cpu.memory import int64_at

INT = ir.IntType(64)


@intrinsic
def call(_, function, arguments):  # type: ignore[no-untyped-def]
    """function(*arguments) of a C function's address; the arguments are int64, in a tuple."""

    def emit(context: Any, builder: Any, _: Any, args: list[ir.Value]) -> ir.Value:
        given = cgutils.unpack_tuple(builder, args[1])
        kind = ir.FunctionType(ir.VoidType(), [INT] * len(given))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), emit


@intrinsic
def new_cell_args(_):  # type: ignore[no-untyped-def]
    """The address of room for `cell_args`, on the stack of the function that calls this."""

    def emit(_: Any, builder: Any, __: Any, ___: list[ir.Value]) -> ir.Value:
        room = cgutils.alloca_once(builder, ir.ArrayType(INT, cell_args.COUNT))
        return builder.ptrtoint(room, INT)

    return types.int64(), emit


@intrinsic
def new_words(_, count):  # type: ignore[no-untyped-def]
    """The address of room for so many int64, on the stack of the function that calls this."""

    def emit(_: Any, builder: Any, __: Any, args: list[ir.Value]) -> ir.Value:
        return builder.ptrtoint(builder.alloca(INT, size=args[0]), INT)

    return types.int64(types.int64), emit


@intrinsic
def _ask(_, function):  # type: ignore[no-untyped-def]
    """What a C function `int function(void)` at this address returns."""

    def emit(_: Any, builder: Any, __: Any, args: list[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), []), INT)

    return types.int64(types.int64), emit


def share(region):  # type: ignore[no-untyped-def]
    """Runs one thread's tasks of the `RegionArgs` at an address."""
    args = region_args_at(region)
    # more threads run than there are tasks, or fewer where the runtime starts less than was asked
    running = min(_ask(args.thread_count), args.tasks)  # type: ignore[call-arg]  # numba's
    for task in range(_ask(args.thread_number), args.tasks, running):
        call(args.kernel, (args.args, task, running))


@njit(error_model="numpy")
def run_at(task, values, at):  # type: ignore[no-untyped-def]
    """As `run_alone`, with room for the arguments at an address."""
    alone = task_args_at(task)
    args, known = int64_at(at), int64_at(alone.args)
    for index in range(alone.words):
        args[index] = known[index]
    lacking, given = int64_at(alone.lacking), int64_at(values)
    for k in range(alone.count):
        args[lacking[3 * k]] = given[lacking[3 * k + 1]] + lacking[3 * k + 2]
    call(alone.kernel, (at, 0, 1))  # type: ignore[call-arg]  # numba's


def run_alone(task, values):  # type: ignore[no-untyped-def]
    """Runs the `TaskArgs` at an address, with the values at another for what is lacking."""
    alone = task_args_at(task)
    at: int = new_words(alone.words)  # type: ignore[call-arg]  # numba's
    run_at(task, values, at)
