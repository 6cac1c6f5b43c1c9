"""Runs an evaluation as a Ray job.

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 --working-dir . -- \\
        python -m jobs.evaluate jobs/configs/evaluate_search_qa.yaml output=/shared/evaluations [key=value ...]

As in `jobs.train`, weights, index and question files are absolute paths that all nodes see. After a kill the same
submission resumes where the last one stopped.
"""

import sys

from mempipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
