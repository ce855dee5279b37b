"""Runs a function away from its caller's modes, in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Event, Lock, Thread
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

Result = TypeVar("Result")
_LOCK = Lock()  # of what is set for the whole process


def run(function: Callable[..., Result], *args: object) -> Result:
    """What the function returns where no mode of the caller is on.

    Grad mode, inference mode, autocast, the default device, function and dispatch modes, fake
    tensors and switched-off dispatch keys belong to a thread: a new one has none of them. Anomaly
    mode is the process's and off meanwhile. The default dtype is the process's, too, and stays:
    other threads may be making tensors.
    """
    _keep_fake_device_guard()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_without_anomaly_mode, function, *args).result()


@cache
def _keep_fake_device_guard() -> None:
    """Has a thread that never ends make the first fake tensors, where no GPU is visible.

    A CUDA build of PyTorch then replaces its device guard by a fake one, which belongs to the
    thread that makes the first fake tensors, as tracing does. Without pytorch/pytorch#178950, in
    PyTorch 2.11 and before, it is freed when that thread ends, and fake tensors of the next thread
    crash the process.
    """
    if not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return
    made = Event()

    def make() -> None:
        try:
            with FakeTensorMode():
                pass
        finally:
            made.set()
        Event().wait()

    Thread(target=make, name="openrnn-device-guard", daemon=True).start()
    made.wait()


def _without_anomaly_mode(function: Callable[..., Result], *args: object) -> Result:
    with _LOCK:
        enabled, checks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        if not enabled:
            return function(*args)
        torch.set_anomaly_enabled(False, checks)
        try:
            return function(*args)
        finally:
            torch.set_anomaly_enabled(True, checks)
