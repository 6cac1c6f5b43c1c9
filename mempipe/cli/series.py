"""Runs evaluations one after another in one process: `python -m mempipe.cli.series`. The trials of a sweep share it.

Each line of stdin is a JSON list of two paths: the config of an evaluation, and the file that its output is added to.
The answer on stdout is a line with the exit code of `mempipe evaluate CONFIG`. After one that failed the process ends.
"""

from __future__ import annotations

import json
import os
import sys

from mempipe.cli import main as run_command


def main() -> int:
    """Runs the evaluations until stdin ends. Returns the exit code of the last one."""
    from pipelines.evaluate import in_series

    answers, code = os.dup(sys.stdout.fileno()), 0
    os.set_inheritable(answers, False)
    with in_series():
        for line in iter(sys.stdin.readline, ""):
            config, log = json.loads(line)
            _write_to(log)
            code = run_command(["evaluate", config])
            _flush()
            os.write(answers, f"{code}\n".encode())
            if code:
                break
    return code


def _write_to(log: str) -> None:
    """Makes the file the end of stdout and stderr of this process, and of those that it starts from now on."""
    _flush()
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.close(file)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
