"""What the benchmark of searches asks, and whom."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.corpora import questions_about, read_passages
from benchmarks.retrieval import rate_of, tantivy_search
from mempipe.types import Passage

PASSAGES = [
    Passage(id="a", title="Paris", text="Paris OR Lyon: a capital, NOT both."),
    Passage(id="b", title="?", text="…"),
]


def test_every_machine_has_a_corpus_and_questions_have_words_of_a_passage():
    assert len(read_passages("python-reference")) > 500
    asked = list(itertools.islice(questions_about(PASSAGES, seed=1), 20))
    assert len(set(asked)) > 10
    assert {word for text in asked for word in text.split()} <= {"Paris", "OR", "Lyon", "a", "capital", "NOT", "both"}


def test_a_rate_counts_searches_in_a_second():
    asked = []
    assert rate_of(asked.append, itertools.repeat("q"), seconds=0.05) <= len(asked) / 0.05
    assert asked[0] == "q"


def test_tantivy_finds_a_passage_by_any_of_its_words_whatever_else_is_asked():
    pytest.importorskip("tantivy", reason="an older environment: `make setup` installs it")
    search = tantivy_search(PASSAGES)
    assert [hit["title"] for hit in search("OR capital NOT nothing")] == [["Paris"]]
