"""Trains an agent as a Ray job.

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 --working-dir . -- \\
        python -m jobs.train jobs/configs/memsearcher_qwen2.5-3b.yaml output=/shared/runs [key=value ...] [--resume]

Submit from the root of the repository; `.git`, `.venv` and what .gitignore names are not uploaded. The job runs the
`python` with which the head node was started, so activate the environment before `ray start`. `output`, model, data and
index must be absolute paths that all nodes see, since the job runs in the uploaded copy. Ray's clusters ask for a token
(`ray get-auth-token`); RAY_AUTH_MODE=token makes the client send it.
"""

import sys

from mempipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
