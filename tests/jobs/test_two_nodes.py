"""Jobs on two Ray nodes in separate network namespaces: with a slow link that loses packets, and with one that is
interrupted for longer than Ray waits for a node."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.two_nodes import JOBS, missing
from tools.processes import Marked, run

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(bool(missing()), reason=f"two network namespaces need {missing()}"),
]


@pytest.mark.parametrize(
    ("arguments", "jobs"),
    [
        (["--delay-ms", "10", "--loss", "0.01"], JOBS),
        (["--delay-ms", "1", "--loss", "0", "--cut", "train", "100", "--jobs", "train"], ["train"]),
    ],
    ids=["lossy", "cut"],
)
def test_jobs_end_on_two_nodes(arguments, jobs):
    marked = Marked()
    with tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp") as folder:
        command = [sys.executable, "-m", "benchmarks.two_nodes", *arguments, "--folder", folder]
        done = run(command, marked=marked, cwd=Path(folder))
        assert (Path(folder) / "runs" / "two-nodes" / "huggingface").is_dir()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^\| ([a-z]+) \| \d", done.stdout, re.MULTILINE) == jobs
    assert re.findall(r"^\| (\d+) \| ", done.stdout, re.MULTILINE) == ["2", "3", "4", "5", "6"]
    assert marked.survivors() == []
