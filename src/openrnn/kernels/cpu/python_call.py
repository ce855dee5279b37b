"""Runs tasks from tensors to tensors, compiled, by Python's API for C.

Objects are addresses here. Whoever gets a new reference releases it.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from openrnn.kernels.cpu.args import LINE
from openrnn.kernels.cpu.args_type import tensor_tasks_args_at
from openrnn.kernels.cpu.memory import int64_at
from openrnn.kernels.cpu.regions import new_words, run_at

INT = ir.IntType(64)


def _function(symbol: str, takes: int, bits: int = 64) -> Any:
    """A function of Python's, of addresses and int64, which returns a number of so many bits."""

    @intrinsic
    def ask(_, arguments):  # type: ignore[no-untyped-def]
        def emit(_: Any, builder: Any, __: Any, args: list[ir.Value]) -> ir.Value:
            kind = ir.FunctionType(ir.IntType(bits), [INT] * takes)
            found = cgutils.get_or_insert_function(builder.module, kind, symbol)
            made = builder.call(found, cgutils.unpack_tuple(builder, args[0]))
            return builder.sext(made, INT) if bits < 64 else made

        return types.int64(arguments), emit

    return ask


def _procedure(symbol: str) -> Any:
    """A function of Python's, of an address, which returns nothing."""

    @intrinsic
    def do(_, address):  # type: ignore[no-untyped-def]
        def emit(context: Any, builder: Any, __: Any, args: list[ir.Value]) -> ir.Value:
            kind = ir.FunctionType(ir.VoidType(), [INT])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), args)
            return context.get_dummy_value()

        return types.void(types.int64), emit

    return do


_number_of = _function("PyLong_AsLongLong", 1)
_item = _function("PySequence_GetItem", 2)
_called = _function("PyObject_CallNoArgs", 1)
_called_with = _function("PyObject_CallOneArg", 2)
_new_list = _function("PyList_New", 1)
_append = _function("PyList_Append", 2, bits=32)
_error = _function("PyErr_Occurred", 0)
_release = _procedure("Py_DecRef")
_free_lock = _function("PyEval_SaveThread", 0)
_take_lock = _procedure("PyEval_RestoreThread")


def run_on_tensors(args, tensors) -> int:  # type: ignore[no-untyped-def]
    """Runs `TensorTasksArgs`, whose address is a Python int; returns a list of what it made.

    `tensors` is a sequence. The list is empty, and nothing has run, where one has no memory. 0
    stands for an error that Python has raised. The GIL is released while tasks run.
    """
    run: int = _number_of((args,))
    own = tensor_tasks_args_at(run)
    made: int = _new_list((0,))
    if made == 0:
        return 0
    scratch_words = (own.scratch_bytes + LINE) // 8
    at: int = new_words(own.values + own.words + scratch_words)  # type: ignore[call-arg]  # numba's
    if not _take_addresses(run, tensors, made, at):
        if _error(()) == 0:
            return made
        _release(made)
        return 0
    begin = at + 8 * own.values
    values, scratch = int64_at(at), begin + 8 * own.words
    values[own.values - 1] = scratch + (-scratch) % LINE
    lock = _free_lock(())
    tasks = int64_at(own.tasks)
    for task in range(own.count):
        run_at(tasks[task], at, begin)
    _take_lock(lock)
    return made


@njit(error_model="numpy")
def _take_addresses(run, tensors, made, at):  # type: ignore[no-untyped-def]
    """Makes the results and writes all values but scratch; False where that cannot be done."""
    own = tensor_tasks_args_at(run)
    values, numbers, makers = int64_at(at), int64_at(own.numbers), int64_at(own.makers)
    for index in range(own.known):
        values[index] = numbers[index]
    first_result = own.known + own.given
    for index in range(own.known, first_result):
        values[index] = _take_address(own.data_ptr, _item((tensors, index - own.known)))
        if values[index] == 0:
            return False
    for index in range(first_result, own.values - 1):
        tensor = _called((makers[index - first_result],))
        if tensor == 0:
            return False
        if _append((made, tensor)) != 0:
            _release(tensor)
            return False
        values[index] = _take_address(own.data_ptr, tensor)
        if values[index] == 0 and _error(()) != 0:
            return False
    return True


@njit(error_model="numpy")
def _take_address(data_ptr, tensor):  # type: ignore[no-untyped-def]
    """The address of a tensor's elements, 0 without any; releases the tensor, if there is one."""
    if tensor == 0:
        return 0
    number = _called_with((data_ptr, tensor))
    _release(tensor)
    if number == 0:
        return 0
    address = _number_of((number,))
    _release(number)
    return 0 if address == -1 else address  # -1: an error
