"""Ctrl-C between two calls: inside a compiler it is lost, printed, or takes the process down."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, current_thread, main_thread
from time import monotonic

INTERRUPTED = 130  # what the shell calls a program that Ctrl-C ended
_pressed = Event()
_until = float("inf")  # when the time is over that a user gave, on time.monotonic


class OutOfTime(BaseException):
    """The time is over that a user gave; no failure of what it ends."""


@contextmanager
def limited(until: float) -> Iterator[None]:
    """Within, `check` raises OutOfTime once it is later than `until`."""
    global _until  # noqa: PLW0603
    _until = until
    try:
        yield
    finally:
        _until = float("inf")


@contextmanager
def deferred() -> Iterator[None]:
    """Within, a first Ctrl-C waits for `check`; a second one is heeded at once."""
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or before is not signal.default_int_handler:
        yield  # who runs this heeds Ctrl-C in a way of their own
        return
    signal.signal(signal.SIGINT, _note)
    try:
        yield
        check()
    finally:
        signal.signal(signal.SIGINT, before)
        _pressed.clear()


def check() -> None:
    """Raises KeyboardInterrupt where Ctrl-C was pressed, OutOfTime where the time is over."""
    if _pressed.is_set():
        raise KeyboardInterrupt
    if monotonic() > _until:
        raise OutOfTime


def _note(*_: object) -> None:
    check()
    _pressed.set()
    print("Ctrl-C: ends after this step, or by another Ctrl-C at once", file=sys.stderr)
