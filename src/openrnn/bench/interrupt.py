"""Ctrl-C between two calls: inside a compiler it is lost, printed, or takes the process down."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, current_thread, main_thread

INTERRUPTED = 130  # what the shell calls a program that Ctrl-C ended
_pressed = Event()


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
    """Raises KeyboardInterrupt where Ctrl-C was pressed."""
    if _pressed.is_set():
        raise KeyboardInterrupt


def _note(*_: object) -> None:
    check()
    _pressed.set()
