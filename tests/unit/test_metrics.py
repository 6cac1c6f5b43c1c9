"""Metrics by hand-worked values, and what holds for every answer."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempipe.evaluation.metrics import (
    METRICS,
    acc,
    definitions,
    em,
    f1,
    math_match,
    precision,
    recall,
    score_objectives,
    sub_em_two_way,
)
from mempipe.types import Question


def question(*golds: str, objectives: list[list[str]] | None = None) -> Question:
    return Question(id="q", text="?", golden_answers=list(golds), objectives=objectives or [])


def mean_scores(answer: str | None, asked: Question) -> dict[str, float]:
    rows = score_objectives(answer, asked)
    return {name: fmean(row[name] for row in rows) for name in METRICS}


NAMES = ("em", "f1", "acc", "precision", "recall", "sub_em_two_way", "math_match")
PAIR = question("Paris; Rome", objectives=[["Paris"], ["Rome", "Roma"]])


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        (
            "Paris, France",
            ["Paris"],
            [0, 2 / 3, 1, 1 / 2, 1, 1, 0],
        ),
        ("The Beatles", ["Beatles"], [1, 1, 1, 1, 1, 1, 0]),
        ("New", ["New York City"], [0, 1 / 2, 0, 1, 1 / 3, 1, 0]),
        ("yes it is", ["yes"], [0, 0, 1, 0, 0, 1, 0]),
        ("", ["Paris"], [0, 0, 0, 0, 0, 1, 0]),
        ("b c", ["a b", "c d e"], [0, 2 / 3, 1, 1 / 2, 1, 1, 0]),
        ("New York City", ["York", "New York City Hall"], [0, 6 / 7, 1, 1, 1, 1, 0]),  # each takes its best gold
        ("Paris", [], [0, 0, 0, 0, 0, 0, 0]),
        ("A", ["A"], [1, 1, 1, 1, 1, 1, 1]),  # SQuAD's normalisation leaves nothing of it
    ],
)
def test_each_metric_gives_the_value_worked_out_by_hand(prediction, golds, expected):
    assert {name: metric(prediction, golds) for name, metric in METRICS.items()} == pytest.approx(
        dict(zip(NAMES, expected, strict=True))
    )


def test_a_math_match_reads_fractions_and_keeps_articles():
    assert math_match("1/2", ["\\frac12"]) == math_match("new york", ["NewYork"]) == 1.0
    assert math_match("The Beatles", ["Beatles"]) == 0.0


def test_no_answer_scores_nothing_also_where_an_empty_one_would():
    assert sub_em_two_way("", ["Paris"]) == 1.0
    assert mean_scores(None, question("Paris")) == dict.fromkeys(METRICS, 0.0)


def test_objectives_are_scored_in_order_and_averaged():
    assert mean_scores("Paris; Roma", PAIR)["em"] == 1.0
    assert mean_scores("Rome; Paris", PAIR)["em"] == 0.0
    assert [row["em"] for row in score_objectives("x; Rome", PAIR)] == [0.0, 1.0]
    assert mean_scores("x; Rome", PAIR)["em"] == 0.5


def test_a_missing_objective_scores_nothing_and_extra_answers_are_left_out():
    assert mean_scores("Paris", PAIR)["em"] == 0.5
    assert mean_scores("Paris", PAIR)["sub_em_two_way"] == 0.5
    assert mean_scores("Paris; Rome; Lima", PAIR)["em"] == 1.0
    assert mean_scores(None, PAIR)["em"] == 0.0
    assert [row["sub_em_two_way"] for row in score_objectives("; Rome", PAIR)] == [0.0, 1.0]


def test_a_semicolon_separates_only_where_there_are_objectives():
    assert mean_scores("a; b", question("a; b"))["em"] == 1.0


def test_a_single_gold_given_as_a_text_is_one_answer():
    assert precision("N", "Nile") == recall("N", "Nile") == math_match("N", "Nile") == 0.0


def test_every_metric_says_what_it_is():
    assert definitions().keys() == METRICS.keys()
    assert all(text.endswith(".") for text in definitions().values())


TEXT = st.text(alphabet="ab the.;{}\\1/", max_size=15)


@given(prediction=TEXT, golds=st.lists(TEXT, max_size=3))
def test_every_metric_is_a_share_and_the_lenient_ones_contain_the_strict_ones(prediction, golds):
    values = {name: metric(prediction, golds) for name, metric in METRICS.items()}
    assert all(0 <= value <= 1 for value in values.values())
    assert em(prediction, golds) <= acc(prediction, golds) <= sub_em_two_way(prediction, golds)
    assert f1(prediction, golds) <= max(values["precision"], values["recall"]) + 1e-12
    assert mean_scores(prediction, question(*golds)) == values
