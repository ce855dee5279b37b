"""A line on a terminal about what takes over two seconds, such as a first compilation."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Thread
from time import monotonic

PATIENCE = 2.0  # seconds of silence before a line
LOG = logging.getLogger("openrnn")


class Job:
    """What runs now; `doing` may change."""

    def __init__(self, doing: str) -> None:
        self.doing = doing


class Teller:
    """Says what runs, on a terminal: a line once jobs of a burst took `PATIENCE` seconds together.

    One thread waits for all of them; without a terminal there is none.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._running: list[Job] = []
        self._thread: Thread | None = None
        self._silent_since = self._ended = float("-inf")

    def begin(self, job: Job) -> None:
        """A job begins; one that begins soon after another goes on with its wait."""
        with self._changed:
            now = monotonic()
            if not self._running and now - self._ended > PATIENCE:
                self._silent_since = now
            self._running.append(job)
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=self._wait, name="openrnn-progress", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # this system starts no thread, or the interpreter ends
                    self._thread = None
            self._changed.notify()

    def end(self, job: Job) -> None:
        """A job has ended."""
        with self._changed:
            self._running.remove(job)
            self._ended = monotonic()
            self._changed.notify()

    def _wait(self) -> None:
        with self._changed:
            while self._running:
                left = self._silent_since + PATIENCE - monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                said = dict.fromkeys(job.doing for job in self._running)
                print(*(f"openrnn: {doing}" for doing in said), sep="\n", file=sys.stderr)
                self._silent_since = monotonic() + 9 * PATIENCE  # the next line is not soon
            self._thread = None


_TELLER = Teller()


@contextmanager
def told(doing: str) -> Iterator[Job]:
    """Around a job that may take long: a line on stderr where that is a terminal, and a log entry.

    Args:
        doing: such as "compiling cell lstm for float32, once".
    """
    LOG.info(doing)
    job = Job(doing)
    if sys.stderr is None or not sys.stderr.isatty():
        yield job
        return
    _TELLER.begin(job)
    try:
        yield job
    finally:
        _TELLER.end(job)
