"""Runs an evaluation as a Ray job.

    mempipe submit jobs/configs/evaluate_search_qa.yaml output=/shared/evaluations [key=value ...]

`python -m jobs.evaluate` is the same job for manifests and for Ray's own command, as in `jobs.train`. Weights, index
and question files are absolute paths that all nodes see. After a kill the same submission resumes where the last one
stopped.
"""

import sys

from mempipe.cli import program

if __name__ == "__main__":
    sys.exit(program("evaluate"))
