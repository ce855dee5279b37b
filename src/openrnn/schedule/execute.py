"""Runs a schedule: each operation by the method that its verb names, on its stream."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from openrnn.schedule.operations import MAIN, Operation, Schedule


class Runner(Protocol):
    """What a backend brings: a method for each verb of its schedules, and a side stream."""

    def side_stream(self) -> AbstractContextManager[object]:
        """Within it, what is launched goes to the side stream."""

    def abandon(self) -> None:
        """An operation failed: whatever runs on the side stream is waited for."""


def execute(schedule: Schedule, runner: Runner) -> None:
    """Runs the operations in their order."""
    try:
        for operation in schedule:
            run: Callable[[Operation], None] = getattr(runner, operation.verb)
            if operation.stream is MAIN:
                run(operation)
            else:
                with runner.side_stream():
                    run(operation)
    except BaseException:
        runner.abandon()
        raise
