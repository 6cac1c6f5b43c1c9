"""The documents name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (ROOT, ROOT / "mempipe", ROOT / "docs", ROOT / "examples" / "notebook_agent")
FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|yaml|md|jsonl))`|\]\(([\w./-]+\.md)\)")
NOT_FILES = {"NAME.py", "NAME.yaml", "test_NAME.py", "metrics.jsonl"}


@pytest.mark.parametrize(
    "document",
    [
        "architecture.md",
        "determinism.md",
        "extending.md",
        "memtrain.md",
        "methods.md",
        "reliability.md",
        "serving.md",
    ],
)
def test_every_file_that_a_document_names_is_there(document):
    named = {a or b for a, b in FILE.findall((ROOT / "docs" / document).read_text())}
    assert named
    missing = [name for name in named if Path(name).name not in NOT_FILES]
    missing = [name for name in missing if not any((place / name).exists() for place in PLACES)]
    assert not missing
