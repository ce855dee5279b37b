"""Runs a function away from its caller's modes, in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import torch

Result = TypeVar("Result")
_LOCK = Lock()  # of what is set for the whole process


def run(function: Callable[..., Result], *args: object) -> Result:
    """What the function returns where no mode of the caller is on.

    Grad mode, inference mode, autocast, the default device, function and dispatch modes, fake
    tensors and switched-off dispatch keys belong to a thread: a new one has none of them. Anomaly
    mode is the process's and off meanwhile. The default dtype is the process's, too, and stays:
    other threads may be making tensors.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_without_anomaly_mode, function, *args).result()


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
