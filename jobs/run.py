"""Does what a config of any kind describes, as a Ray job: a training, an evaluation, a sweep, or a
user-defined kind.

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 --working-dir . -- \\
        python -m jobs.run CONFIG [key=value ...] [--resume]

Paths in the config are absolute and seen by all nodes, as `jobs.train` says.
"""

import sys

from mempipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
