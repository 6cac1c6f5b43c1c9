"""The text that benchmarks read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mempipe.data.corpus import read_corpus
from mempipe.data.plain_text import PYTHON_REFERENCE, is_plain_text, read_plain_text
from mempipe.types import Passage

_WIKI = Path(__file__).parents[2] / "shared" / "data" / "wiki_mini.jsonl"
CORPUS = str(_WIKI) if _WIKI.exists() else PYTHON_REFERENCE
"""Text of people: passages of Wikipedia next to this checkout, or what every Python carries."""


def read_passages(corpus: str) -> list[Passage]:
    """Returns the passages of a corpus, or those that are made of a text, a folder or `python-reference`."""
    return list(read_plain_text(corpus) if is_plain_text(corpus) else read_corpus(corpus))


def questions_about(passages: Sequence[Passage], seed: int, *, num_words: int = 6) -> Iterator[str]:
    """Yields words of a passage, one passage after the other by chance, without end."""
    rng = np.random.default_rng(seed)
    while True:
        words = re.findall(r"\w+", passages[int(rng.integers(len(passages)))].text)
        if words:
            yield " ".join(rng.choice(words, size=num_words).tolist())
