"""The command `openrnn`, outside the package: its help needs neither torch nor openrnn."""

import sys
from collections.abc import Sequence

INTERRUPTED = 130  # what the shell calls a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 2 for any error that was foreseen."""
    try:
        from openrnn_command import app

        return app.run(arguments)
    except KeyboardInterrupt:  # while modules are imported
        print("openrnn: interrupted", file=sys.stderr)
        return INTERRUPTED
