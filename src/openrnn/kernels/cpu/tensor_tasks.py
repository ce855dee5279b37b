"""A function that runs tasks from tensors to tensors, all of it compiled.

What Python does around a short kernel takes longer than the kernel: memory of results, addresses,
arguments. `python_call` does it by the functions that Python has for programs in C.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from openrnn.kernels.cpu import launch
from openrnn.kernels.cpu.args import LINE, TensorTasksArgs

# bytes of scratch, which is on the stack: little of that, by default 8 MiB on Linux
MAX_SCRATCH = 1 << 15
_TAKES_ONE = 8  # METH_O of a `PyMethodDef`: a function of one argument


class _Method(ctypes.Structure):
    """A `PyMethodDef`, of which Python makes a builtin function."""

    _fields_: ClassVar = [
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]  # fmt: skip


def runner(
    tasks: Sequence[launch.Task], known: Sequence[int], given: int,
    makers: Sequence[Callable[[], Tensor]], scratch: int,
) -> Callable[[Sequence[Tensor]], list[Tensor]]:  # fmt: skip
    """Runs tasks on tensors and returns the results it made; no result where one has no memory.

    Several threads may run it at a time. Values of tasks are numbers, then the addresses of the
    tensors, of results and of scratch.

    Args:
        known: the numbers.
        given: how many tensors a run gets.
        makers: each makes a result.
        scratch: bytes, at most `MAX_SCRATCH`.
    """
    data_ptr = Tensor.data_ptr
    addresses, numbers = _array([task.at for task in tasks]), _array(known)
    objects = _array([id(maker) for maker in makers])
    args = TensorTasksArgs(
        tasks=ctypes.addressof(addresses), count=len(tasks),
        words=max(task.words for task in tasks), values=len(known) + given + len(makers) + 1,
        numbers=ctypes.addressof(numbers), known=len(known), given=given,
        makers=ctypes.addressof(objects), scratch_bytes=-(-scratch // LINE) * LINE,
        data_ptr=id(data_ptr),
    )  # fmt: skip
    memory = tuple(tasks), tuple(makers), data_ptr, addresses, numbers, objects, args
    return _builtin(ctypes.addressof(args), memory)


def _builtin(args: int, memory: object) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """`run_on_tensors` of these arguments, which holds their memory.

    A call of a builtin function takes 0.3 us less than one by ctypes.
    """
    run = launch.starters().run_on_tensors
    if run is None:
        raise RuntimeError("this Python lacks functions that `python_call` calls")
    method = _Method(b"run_on_tensors", run.address, _TAKES_ONE, None)
    objects = ctypes.py_object, ctypes.py_object
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, *objects)(
        ("PyCFunction_NewEx", ctypes.pythonapi)
    )
    # the last one is its module, which it keeps as long as it lives
    made: Callable[[Sequence[Tensor]], list[Tensor]] = make(
        ctypes.addressof(method), args, (method, memory)
    )
    return made


def _array(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)
