"""The command `openrnn`, outside the package: Ctrl-C is one line even while that is imported."""

import sys


def main() -> int:
    """Runs the command line; returns the exit code."""
    try:
        from openrnn import cli

        return cli.main()
    except KeyboardInterrupt:
        print("openrnn: interrupted", file=sys.stderr)
        return 130
