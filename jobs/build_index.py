"""Building an index as a Ray job; the same command again goes on where a killed one stopped.

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 --working-dir . -- \\ python -m jobs.build_index
        jobs/configs/index_wiki18_e5.yaml corpus=[/shared/wiki-18.jsonl.gz] output=/shared/wiki18_e5

`output` must be a path that all nodes see. Encoders take every GPU of the cluster (`num_encoders` takes fewer), or two
CPUs each.
"""

import sys

from mempipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["index", "build", *sys.argv[1:]]))
