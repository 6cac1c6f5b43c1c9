"""Jobs on two Ray nodes in separate network namespaces: with a slow link that loses packets, and with one that is
interrupted for longer than Ray waits for a node."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.two_nodes import JOBS
from tools.processes import Marked, run

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists() or shutil.which("ip") is None,
        reason="network namespaces need root, /dev/net/tun and iproute2",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "jobs"),
    [
        (["--delay-ms", "10", "--loss", "0.01"], JOBS),
        (["--delay-ms", "1", "--loss", "0", "--cut", "100", "--jobs", "train"], ["train"]),
    ],
    ids=["lossy", "cut"],
)
def test_jobs_end_on_two_nodes(tmp_path, arguments, jobs):
    marked = Marked()
    command = [sys.executable, "-m", "benchmarks.two_nodes", *arguments]
    done = run(command, marked=marked, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^\| ([a-z]+) \| \d", done.stdout, re.MULTILINE) == jobs
    assert re.findall(r"^\| (\d+) \| ", done.stdout, re.MULTILINE) == ["2", "3", "4", "5", "6"]
    assert marked.survivors() == []
