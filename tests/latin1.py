"""A locale whose encoding is not UTF-8, made for a test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools.processes import ROOT

NAME = "en_US.ISO-8859-1"


def latin1_variables(folder: Path) -> dict[str, str]:
    """Returns the environment of a process with such a locale, kept in `folder`. Skips where none can be made."""
    try:
        subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(folder / NAME)], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine cannot make a locale")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUTF8"}
    return kept | {"LOCPATH": str(folder), "LC_ALL": NAME, "PYTHONPATH": str(ROOT)}
