"""Takes the place of the agent that measures a Ray node. A raylet ends with its agent, and waits for the ports of one:
this program tells it that there are none, and ends with it. It imports nothing that takes time.
"""

import os
import sys
import time
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NONE = "-1"


def main(arguments: list[str]) -> None:
    """Takes the arguments of Ray's agent, and returns when its raylet has ended."""
    named = dict(each.split("=", 1) for each in arguments if "=" in each)
    for port in PORTS:
        file = Path(named["--session-dir"], f"{port}_{named['--node-id']}")
        part = file.with_name(f"{file.name}.part")
        part.write_text(NONE)
        part.rename(file)
    raylet = os.getppid()
    while os.getppid() == raylet:
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv)
