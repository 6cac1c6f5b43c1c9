"""Does what a config of any kind describes, as a Ray job: a training, an evaluation, a sweep, or a
user-defined kind.

    mempipe submit CONFIG [key=value ...] [--resume]

`python -m jobs.run` is the same job for manifests and for Ray's own command, as in `jobs.train`. Paths in the config
are absolute and seen by all nodes.
"""

import sys

from mempipe.cli import program

if __name__ == "__main__":
    sys.exit(program("run"))
