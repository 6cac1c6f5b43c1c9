"""Sweeps memory budgets as a Ray job.

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 --working-dir . -- \\
        python -m jobs.sweep_memory_budget SWEEP.yaml output=/shared/sweeps [key=value ...] [--resume]

As in `jobs.train`, weights, indexes and question files are absolute paths that all nodes see. After a kill the same
submission with --resume runs the missing trials.
"""

import sys

from mempipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))
