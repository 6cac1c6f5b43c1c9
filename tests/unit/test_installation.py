"""A project that has a module `pipelines` of its own: Python finds it before that of mempipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = "import mempipe; mempipe.train({'model': {'path': 'no-such-model'}})"


@pytest.fixture(params=["pipelines/__init__.py", "pipelines.py"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    own = tmp_path / request.param
    own.parent.mkdir(exist_ok=True)
    own.write_text("raise RuntimeError('the module of the project was imported')\n")
    (tmp_path / "script.py").write_text(TRAIN)
    return tmp_path


def test_a_script_beside_it_is_told_before_anything_is_imported(project):
    ended = run(project, "script.py")
    assert f"{project / 'pipelines'}" in ended.stderr and "hides the package `pipelines` of mempipe" in ended.stderr
    assert "python -P" in ended.stderr and "was imported" not in ended.stderr


def test_so_is_a_command_that_python_starts_there(project):
    ended = run(project, "-m", "mempipe.cli", "doctor", "none.yaml")
    assert ended.returncode == 2 and ended.stderr.startswith(f"error: {project / 'pipelines'}")


def test_what_the_message_advises_works(project):
    """The config is looked at."""
    assert "no-such-model" in run(project, "-P", "script.py").stderr
    assert "none.yaml" in run(project, "-P", "-m", "mempipe.cli", "doctor", "none.yaml").stderr


def test_a_folder_of_that_name_with_other_files_hides_nothing(tmp_path):
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "nightly.yaml").touch()
    assert "none.yaml" in run(tmp_path, "-m", "mempipe.cli", "doctor", "none.yaml").stderr


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Starts Python with the arguments in the folder."""
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
