"""The command line as a module, for `python -m openrnn.cli` and torchrun; see `openrnn_command`."""

import sys

from openrnn_command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
