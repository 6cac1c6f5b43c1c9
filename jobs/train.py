"""Trains an agent as a Ray job.

    mempipe submit jobs/configs/memsearcher_qwen2.5-3b.yaml output=/shared/runs [key=value ...] [--resume]

This module is the same job for manifests such as jobs/rayjob.yaml, and for Ray's own command. RAY_AUTH_MODE is token or
disabled, as the cluster is (docs/cluster.md):

    RAY_AUTH_MODE=token ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python -m jobs.train jobs/configs/memsearcher_qwen2.5-3b.yaml output=/shared/runs [key=value ...] [--resume]

Submit from the root of the repository; `.git`, `.venv` and what .gitignore names are not uploaded. The job runs the
`python` with which the head node was started, so activate the environment before `ray start`. `output`, model, data and
index must be absolute paths that all nodes see, since the job runs in the uploaded copy.
"""

import sys

from mempipe.cli import program

if __name__ == "__main__":
    sys.exit(program("train"))
