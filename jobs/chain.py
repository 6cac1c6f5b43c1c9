"""Runs a chain of trainings and its evaluation as a Ray job.

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 --working-dir . -- \\
        python -m jobs.chain jobs/configs/chain_memtrain_memagent.yaml output=/shared/runs [key=value ...]

As in `jobs.train`, models, data and indexes are absolute paths that all nodes see. After a kill the same submission
resumes where the last one stopped.
"""

import sys

from mempipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["chain", *sys.argv[1:]]))
