"""Making masked documents of an index as a Ray job; the same command again resumes where a killed one stopped.

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 --working-dir . -- \\
        python -m jobs.build_memtrain jobs/configs/memtrain_wiki18.yaml output=/shared/runs

The index and `output` must be paths that all nodes see.
"""

import sys

from mempipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "memtrain", *sys.argv[1:]]))
