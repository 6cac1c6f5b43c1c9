"""Runs the command: `python -m mempipe`."""

import sys

from mempipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
