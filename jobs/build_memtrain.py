"""Making masked documents of an index as a Ray job; the same command again resumes where a killed one stopped.

    mempipe submit jobs/configs/memtrain_wiki18.yaml index=/shared/wiki18_e5 output=/shared/runs

`python -m jobs.build_memtrain` is the same job for manifests and for Ray's own command, as in `jobs.train`. The index
and `output` must be paths that all nodes see.
"""

import sys

from mempipe.cli import program

if __name__ == "__main__":
    sys.exit(program("data", "memtrain"))
