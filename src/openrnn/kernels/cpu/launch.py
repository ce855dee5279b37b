"""Runs a kernel's tasks on threads; each task writes its own rows, scratch and sums.

The threads are those of the OpenMP library that torch runs on. After each of torch's operators they
spin for milliseconds. Other threads would compete with them for the cores: with a thread pool of
our own, two threads between torch's layers were no faster than one. We use such a pool only where
torch does not run on OpenMP.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from openrnn.kernels.cpu.args import Args, RegionArgs, TaskArgs

if TYPE_CHECKING:
    from openrnn.kernels.cpu.objects import CompiledFunction

# rows T x B from which on packed matrices pay: at 64 rows and 256 to 1,024 units calls that read
# them in place take 5 to 20% less, with AVX2 and AVX-512; at 128 they take more as often as less
PACK_FROM = 96
# steps from which on bfloat16 panels pay for fewer rows, too. With AVX2, at B 1, I = H of 256 to
# 1,024, kept ones take 0.8 of the time of float32 at T 8 and 0.7 at T 16, where a call that packs
# takes 0.8 to 1.3 of it. At T 1 the digest that tells whether they are right takes as long as a
# step that reads float32
BF16_STEPS = 16

Address = int

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    # a forked child has the object but not the threads
    global _pool  # noqa: PLW0603  # one pool a process
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


@lru_cache(maxsize=1)
def openmp() -> tuple[Any, Address, Address] | None:
    """GOMP_parallel, and the addresses of omp_get_thread_num and omp_get_num_threads; or None."""
    if "OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        # symbols of the library that torch has loaded; LLVM's and Intel's have this name, too
        library = ctypes.CDLL(None)
        start = library.GOMP_parallel
        questions = (library.omp_get_thread_num, library.omp_get_num_threads)
    except (OSError, TypeError, AttributeError):
        return None
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    number, count = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in questions)
    return start, number, count


def has_python_calls() -> bool:
    """Whether this Python has the functions that `python_call` calls: all versions from 3.11 on."""
    return hasattr(ctypes.pythonapi, "PyObject_CallOneArg")


class Starters(NamedTuple):
    """Compiled functions that start kernels; `run_on_tensors`: None unless `has_python_calls`."""

    share: "CompiledFunction"
    run_alone: "CompiledFunction"
    run_on_tensors: "CompiledFunction | None" = None


@lru_cache(maxsize=1)
def starters() -> Starters:
    """Those of `regions` and `python_call`, compiled."""
    from openrnn.kernels.cpu import objects

    names = ["share", "run_alone"]
    source = f"from openrnn.kernels.cpu.regions import {', '.join(names)}\n"
    if has_python_calls():
        names.append("run_on_tensors")
        source += "from openrnn.kernels.cpu.python_call import run_on_tensors\n"
    return Starters(*objects.kernels(source, names, "what starts kernels"))


@lru_cache(maxsize=1)
def _run_alone() -> Any:
    # bytes go as their address; an array of ctypes that Python fills takes a call 0.7 us more
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)(starters().run_alone.address)


def _choosing(indices: Sequence[int]) -> Callable[[Sequence[int]], Sequence[int]]:
    """A function that returns the values at these indices, all of them as one sequence."""
    if len(indices) > 1:
        return itemgetter(*indices)
    # itemgetter would return one value without a sequence around it, and takes no empty list
    return lambda values: [values[index] for index in indices]


class Task:
    """A kernel of one task, whose arguments lack some values.

    Args:
        args: its arguments as memory.
        lacking: where each one goes, in units of 8 bytes, which value of a run it is, and what is
            added to that.

    Attributes:
        at: the address of its `TaskArgs`, which live as long as this object.
        words: of 8 bytes in its arguments.
    """

    def __init__(
        self, kernel: "CompiledFunction", args: bytes, lacking: Sequence[tuple[int, int, int]]
    ) -> None:
        self.words = len(args) // 8
        known = (ctypes.c_int64 * self.words).from_buffer_copy(args)
        added = (ctypes.c_int64 * (3 * len(lacking)))(*chain.from_iterable(lacking))
        task = TaskArgs(
            kernel=kernel.address, args=ctypes.addressof(known), words=self.words,
            lacking=ctypes.addressof(added), count=len(lacking),
        )  # fmt: skip
        self._memory = known, added, task
        self.at = ctypes.addressof(task)


class Alone:
    """Runs a kernel of one task; for the arguments see `Task`."""

    def __init__(
        self, kernel: "CompiledFunction", args: bytes, lacking: Sequence[tuple[int, int, int]]
    ) -> None:
        chosen = [(index, k, offset) for k, (index, _, offset) in enumerate(lacking)]
        self._task, self._start = Task(kernel, args, chosen), _run_alone()
        self._at = self._task.at
        self._chosen = _choosing([value for _, value, _ in lacking])
        self._pack = Struct(f"={len(lacking)}q").pack

    def run(self, values: Sequence[int]) -> None:
        """Runs it and waits; several threads may do so at a time."""
        self._start(self._at, self._pack(*self._chosen(values)))


def run(kernel: "CompiledFunction", args: Args, tasks: int) -> None:
    """Runs tasks 0, 1, .. of a kernel with these arguments and waits for all.

    The kernel's last argument is the number of tasks that run at the same time. A parallel region
    has as many threads as torch's own, whatever the tasks: libgomp ends the threads that a smaller
    region does not need, and the next larger one starts them anew.
    """
    at = ctypes.addressof(args)
    if tasks == 1:
        kernel.ctypes(at, 0, 1)
        return
    runtime = openmp()
    if runtime is None:
        _run_in_pool(kernel, at, tasks)
        return
    start, number, count = runtime
    region = RegionArgs(
        kernel=kernel.address, args=at, tasks=tasks, thread_number=number, thread_count=count
    )
    start(starters().share.address, ctypes.addressof(region), max(tasks, threads()), 0)


def _run_in_pool(kernel: "CompiledFunction", at: Address, tasks: int) -> None:
    global _pool  # noqa: PLW0603  # one pool a process
    if _pool is None or _pool._max_workers < tasks:
        _pool = ThreadPoolExecutor(tasks, thread_name_prefix="openrnn")
    others = [_pool.submit(kernel.ctypes, at, task, 1) for task in range(1, tasks)]
    try:
        kernel.ctypes(at, 0, 1)
    finally:
        # the memory of the arguments must outlive every task, whatever interrupts this one
        while not all(other.done() for other in others):
            wait(others)
    for other in others:
        other.result()


def packs(steps: int, batch: int) -> bool:
    """Whether a pass has rows enough for packing the matrices to pay."""
    return steps * batch >= PACK_FROM


def packs_bf16(steps: int, batch: int) -> bool:
    """Whether a forward run has steps or rows enough for panels of bfloat16 to pay."""
    return steps >= BF16_STEPS or packs(steps, batch)


# how many threads a call may use: as many as torch's own operators
threads: Callable[[], int] = torch.get_num_threads
