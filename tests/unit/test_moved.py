"""Modules are found under the names that they had."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from mempipe.moved import MOVED

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_module_of_the_new_one_and_says_so(old):
    new = importlib.import_module(MOVED[old])
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        assert importlib.import_module(old) is new
    assert new.__name__ == MOVED[old] and new.__spec__.name == MOVED[old]


def test_no_module_stands_under_an_old_name():
    assert [old for old in MOVED if (ROOT / old.replace(".", "/")).with_suffix(".py").exists()] == []


def test_a_name_that_never_was_is_not_found():
    code = "import mempipe.planning.prices"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "No module named 'mempipe.planning.prices'" in done.stderr
