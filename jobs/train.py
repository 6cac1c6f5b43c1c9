"""Training as a Ray job.

ray job submit --address http://127.0.0.1:8265 --working-dir . -- python -m jobs.train jobs/configs/memsearcher_qwen2.5-3b.yaml [key=value ...] [--resume]
"""

import sys

from mempipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
