"""Entities that are useless to mask, because they could be named without reading: the rules that questions about
passages (`mempipe.masking.cloze`) and masked documents (`mempipe.masking.documents`) share.
"""

from __future__ import annotations

import re

import polars as pl

from mempipe.masking.entities import Kind, can_be_read
from mempipe.spelling import letters

WORDS = re.compile(r"\w+(?:['’.-]\w+)*")
LEAST_COMMON = 20
"""Passages that may name an answer, however small the corpus."""
GUESSABLE = (5, 0.5)
"""The words around a gap betray it when they occur this often, and with this answer in this share of them."""


def trivial_rule(answer: str, kind: Kind, title: str) -> str | None:
    """Returns the rule that an entity breaks in any passage of this title: "short", "in_title", or None."""
    if len(letters(answer)) < 2:
        return "short"
    if can_be_read(title, answer, kind) or can_be_read(answer, title, "person"):  # any title may be a person's name
        return "in_title"
    return None


def around(text: str, start: int, answer: str) -> str:
    """Returns two words on either side of `text[start : start + len(answer)]`, as a pattern that recurs in a corpus."""
    before = WORDS.findall(text[:start].lower())[-2:]
    after = WORDS.findall(text[start + len(answer) :].lower())[:2]
    return " ".join([*before, "_", *after])


def answer_key() -> pl.Expr:
    """Returns the key of equal answers: the column `answer` in lower case."""
    return pl.col("answer").str.to_lowercase().alias("key")


def common_answers(candidates: pl.LazyFrame, num_passages: int, max_passage_share: float) -> pl.LazyFrame:
    """Returns the keys of the answers that too many of `num_passages` name; they could be guessed without reading.

    `candidates` has the columns `passage_id`, `answer` and `around`, one row per entity.
    """
    limit = max(max_passage_share * num_passages, LEAST_COMMON)
    counted = candidates.group_by(answer_key()).agg(pl.col("passage_id").n_unique().alias("in_passages"))
    return counted.filter(pl.col("in_passages") > limit).select("key")


def guessable_answers(candidates: pl.LazyFrame) -> pl.LazyFrame:
    """Returns the patterns (`around`) that nearly always hold the same answer (`key`)."""
    least, share = GUESSABLE
    with_answer = candidates.group_by("around", answer_key()).agg(pl.len().alias("with_answer"))
    seen = with_answer.group_by("around").agg(pl.col("with_answer").sum().alias("seen"))
    return (
        with_answer.join(seen, on="around")
        .filter(
            (pl.col("seen") >= least) & (pl.col("with_answer") > share * pl.col("seen")) & (pl.col("around") != "_")
        )
        .select("around", "key")
    )
