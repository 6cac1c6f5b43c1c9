"""Reciprocal rank fusion, by hand and by its invariants."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempipe.retrieval.fusion import reciprocal_rank_fusion

rankings = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=12), max_size=5)


def test_a_row_scores_one_over_60_plus_its_rank_in_every_ranking_that_holds_it():
    assert reciprocal_rank_fusion([[7, 3, 5], [3, 9]]) == [(3, 1 / 62 + 1 / 61), (7, 1 / 61), (9, 1 / 62), (5, 1 / 63)]
    assert reciprocal_rank_fusion([[4, 2]], constant=0) == [(4, 1.0), (2, 0.5)]


def test_equal_scores_are_ordered_by_row():
    assert [row for row, _ in reciprocal_rank_fusion([[8, 1], [1, 8], [5], [2]])] == [1, 8, 2, 5]


@pytest.mark.parametrize("nothing", [[], [[]], [[], []]])
def test_nothing_ranked_is_nothing_fused(nothing):
    assert reciprocal_rank_fusion(nothing) == []


@given(rankings)
def test_scores_are_the_exact_sums_to_the_last_digit(rankings):
    """The exact sum of the rounded shares, rounded once."""
    exact: dict[int, Fraction] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking, start=1):
            exact[row] = exact.get(row, Fraction(0)) + Fraction(1 / (60 + rank))
    assert dict(reciprocal_rank_fusion(rankings)) == {row: float(score) for row, score in exact.items()}


@given(rankings, st.randoms())
def test_the_order_of_the_rankings_changes_nothing(rankings, random):
    shuffled = random.sample(rankings, len(rankings))
    assert reciprocal_rank_fusion(shuffled) == reciprocal_rank_fusion(rankings)


@given(st.lists(st.lists(st.integers(1, 30), unique=True, max_size=12), min_size=1, max_size=5))
def test_a_row_that_every_ranking_puts_first_is_first(rankings):
    assert reciprocal_rank_fusion([[0, *ranking] for ranking in rankings])[0][0] == 0


@given(st.lists(st.integers(0, 30), unique=True))
def test_one_ranking_keeps_its_order(ranking):
    assert [row for row, _ in reciprocal_rank_fusion([ranking])] == ranking
