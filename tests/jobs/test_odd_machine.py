"""A training on a machine and in a folder that are not as those of whoever wrote it."""

from __future__ import annotations

import json
import subprocess

import pytest
from miniature import FEW_PROCESSES, train_command

from tools.processes import Marked, run

DEAD = "http://127.0.0.1:9"
"""A proxy that answers nobody."""
WITH_LITTLE_SHARED_MEMORY = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"', "sh"]
"""Starts a command with less of it than the weights take."""


def may_have_little_shared_memory() -> bool:
    """Returns whether this user may mount something where no other process sees it."""
    try:
        return subprocess.run([*WITH_LITTLE_SHARED_MEMORY, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.jobs
def test_a_training_ends_well_behind_a_proxy_without_shared_memory_in_a_folder_of_any_name(tmp_path):
    folder = tmp_path / "feature%2Fa b#é?c"  # build servers write branches so, and in a URI %2F is a slash
    folder.mkdir()
    marked = Marked(dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), DEAD))
    command = train_command(folder / "runs", [*FEW_PROCESSES, "num_steps=2"])
    if may_have_little_shared_memory():
        command = WITH_LITTLE_SHARED_MEMORY + command
    try:
        ended = run(["sh", "-c", 'umask 077; exec "$@"', "sh", *command], marked=marked, cwd=folder)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert marked.survivors() == []
    finally:
        marked.end()
    (state,) = (folder / "runs").glob("*/state.json")
    assert json.loads(state.read_text())["finished"]
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["mlartifacts", "mlflow.db", "quickstart"]
