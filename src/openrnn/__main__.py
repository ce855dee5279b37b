"""`python -m openrnn` is the command `openrnn`."""

import sys

from openrnn.cli import main

if __name__ == "__main__":
    sys.exit(main())
