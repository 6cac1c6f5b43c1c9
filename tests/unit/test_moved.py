"""Modules are found under the names that they had."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mempipe.masking import documents
from mempipe.moved import GONE, MOVED

ROOT = Path(__file__).parents[2]
EARLIER = (ROOT / "tests/unit/modules_of_01ea679.txt").read_text().split()
"""The modules at the commit 01ea679, from which most others moved to where they are."""


@pytest.mark.filterwarnings("ignore:mempipe:DeprecationWarning")  # of the old package, where the module was in one
@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_module_of_the_new_one_and_says_so(old):
    new = importlib.import_module(MOVED[old])
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        assert importlib.import_module(old) is new
    assert new.__name__ == MOVED[old] and new.__spec__.name == MOVED[old]


def test_no_module_stands_under_an_old_name():
    assert [old for old in (*MOVED, *GONE) if is_here(old)] == []


def is_here(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_a_module_of_an_earlier_version_is_here_or_moved_or_gone_for_a_reason():
    assert [name for name in EARLIER if not (is_here(name) or name in MOVED or name in GONE)] == []


@pytest.mark.parametrize("module", GONE)
def test_a_module_that_is_gone_says_why_and_where_its_contents_are(module):
    assert module in EARLIER
    with pytest.raises(ModuleNotFoundError, match=re.escape(GONE[module])):
        importlib.import_module(module)
    assert all(is_here(place) for place in re.findall(r"mempipe[.\w]+", GONE[module]))


def test_a_class_is_found_under_its_old_name():
    assert documents.MemtrainConfig is documents.DocumentsConfig and documents.Document is documents.MaskedDocument


def test_a_name_that_never_was_is_not_found():
    code = "import mempipe.planning.prices"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "No module named 'mempipe.planning.prices'" in done.stderr
