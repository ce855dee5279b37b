"""Runs a schedule: each operation by the method that its verb names, on its stream."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import groupby
from operator import attrgetter
from typing import Protocol

from openrnn.schedule.operations import MAIN, Operation, Schedule


class Runner(Protocol):
    """What a backend brings: a method for each verb of its schedules, and side streams."""

    def on_stream(self, number: int) -> AbstractContextManager[object]:
        """Within it, what is launched goes to a side stream."""

    def on_failure(self) -> None:
        """An operation failed: the main stream waits for whatever runs on side streams."""


def execute(schedule: Schedule, runner: Runner) -> None:
    """Runs the operations in their order."""
    try:
        for stream, operations in groupby(schedule, attrgetter("stream")):
            if stream == MAIN:
                _run(operations, runner)
            else:  # entered once for all that follow each other: it costs the host 5 us
                with runner.on_stream(stream):
                    _run(operations, runner)
    except BaseException:
        runner.on_failure()
        raise


def _run(operations: Iterable[Operation], runner: Runner) -> None:
    for operation in operations:
        run: Callable[[Operation], None] = getattr(runner, operation.verb)
        run(operation)
