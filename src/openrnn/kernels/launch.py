"""Runs a kernel's tasks on threads; each task writes its own rows, scratch and sums."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

PACK_FROM = 48

Kernel = Callable[[Any, int, int, float], None]

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    # a forked child has the object but not the threads
    global _pool  # noqa: PLW0603  # one pool a process
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _threads(count: int) -> ThreadPoolExecutor:
    global _pool  # noqa: PLW0603  # one pool a process
    if _pool is None or _pool._max_workers < count:
        _pool = ThreadPoolExecutor(count, thread_name_prefix="openrnn")
    return _pool


def _task(kernel: Kernel, job: Any, task: int, tasks: int, scale: float, hold: object) -> None:
    # `hold` keeps the memory behind the job's addresses alive, whatever happens to the caller
    kernel(job, task, tasks, scale)


def run(kernel: Kernel, job: Any, tasks: int, scale: float, hold: object) -> None:
    """Runs `tasks` tasks of a kernel, the first of them here, and waits for all."""
    if tasks == 1:
        kernel(job, 0, 1, scale)
        return
    pool = _threads(tasks - 1)
    others: list[Future[None]] = [
        pool.submit(_task, kernel, job, task, tasks, scale, hold) for task in range(1, tasks)
    ]
    try:
        kernel(job, 0, tasks, scale)
    finally:
        wait(others)
    for other in others:
        other.result()


def packs(steps: int, batch: int) -> bool:
    """Whether a forward run has rows enough for packing the matrices to pay."""
    return steps * batch >= PACK_FROM


def threads() -> int:
    """How many threads a call may use: as many as torch's own operators."""
    return torch.get_num_threads()
