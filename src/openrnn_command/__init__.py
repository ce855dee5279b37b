"""The command `openrnn`, outside the package: its help needs neither torch nor openrnn."""

import faulthandler
import sys
from collections.abc import Sequence

INTERRUPTED = 130  # what the shell calls a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 2 for any error that was foreseen.

    A crash of compiled code prints where Python was.
    """
    if sys.__stderr__ is not None:  # else there is nowhere to print
        faulthandler.enable(sys.__stderr__)
    try:
        from openrnn_command import app

        return app.run(arguments)
    except KeyboardInterrupt:  # while modules are imported
        print("openrnn: interrupted", file=sys.stderr)
        return INTERRUPTED
