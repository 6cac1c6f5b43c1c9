"""Runs a chain of trainings and its evaluation as a Ray job.

    mempipe submit jobs/configs/chain_memtrain_memagent.yaml output=/shared/runs [key=value ...]

`python -m jobs.chain` is the same job for manifests and for Ray's own command, as in `jobs.train`. Models, data and
indexes are absolute paths that all nodes see. After a kill the same submission resumes where the last one stopped.
"""

import sys

from mempipe.cli import program

if __name__ == "__main__":
    sys.exit(program("chain"))
