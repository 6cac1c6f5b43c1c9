"""Sweeps memory budgets as a Ray job.

    mempipe submit SWEEP.yaml output=/shared/sweeps [key=value ...] [--resume]

`python -m jobs.sweep_memory_budget` is the same job for manifests and for Ray's own command, as in `jobs.train`.
Weights, indexes and question files are absolute paths that all nodes see. After a kill the same submission with
--resume runs the missing trials.
"""

import sys

from mempipe.cli import program

if __name__ == "__main__":
    sys.exit(program("sweep"))
