"""Builds an index as a Ray job.

    mempipe submit jobs/configs/index_wiki18_e5.yaml corpus=[/shared/wiki-18.jsonl.gz] output=/shared/wiki18_e5

`python -m jobs.build_index` is the same job for manifests and for Ray's own command, as in `jobs.train`. `output` must
be a path that all nodes see. There is an encoder for every GPU of the cluster, or for every two CPUs (`num_encoders`
sets another number). After a kill the same submission resumes where the last one stopped.
"""

import sys

from mempipe.cli import program

if __name__ == "__main__":
    sys.exit(program("index", "build"))
