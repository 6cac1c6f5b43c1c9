"""Making questions of a corpus as a Ray job. RAY_AUTH_MODE is token or disabled, as the cluster is (docs/cluster.md).

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 --working-dir . -- \\
        python -m jobs.build_cloze /shared/wiki-18.jsonl.gz /shared/wiki18_cloze two_passages=0.5

Both paths must be ones that all nodes see.
"""

import sys

from mempipe.cli import program

if __name__ == "__main__":
    sys.exit(program("data", "cloze"))
