"""Whatever happens to a file that mempipe keeps or reads, it is a sentence and no traceback; a changed byte beside a
checksum is never another value (tests/chaos/mutations.py).
"""

from __future__ import annotations

import random

import pytest
from mutations import check_mutations, mutate


@pytest.mark.slow
def test_every_damaged_file_is_refused_in_a_sentence_or_changes_nothing():
    assert check_mutations(150, seed=1).count(",") == 2


def test_a_mutation_is_drawn_by_the_seed_alone(tmp_path):
    said = []
    for _ in range(2):
        (tmp_path / "a.json").write_text('{"step": 1, "seconds": {"train": 2.5}}')
        said.append((mutate(tmp_path / "a.json", random.Random(3)), (tmp_path / "a.json").read_bytes()))
    assert said[0] == said[1]
