"""Which rows are the same question."""

from __future__ import annotations

from dataclasses import replace

from result_builders import answered

from mempipe.data.objectives import joined_texts
from mempipe.evaluation.clusters import question_clusters
from mempipe.evaluation.results import ResultRow, result_row

(ROW,) = [result_row(group, growing=False, prompt_hash="p") for group in answered([True])]


def row(key: str, text: str, gold: str) -> ResultRow:
    return replace(ROW, question_id=key, question=text, golden_answers=[gold, "another way to write it"])


def test_the_same_words_and_answer_are_one_cluster_in_every_set():
    sets = {"short": [row("s-0", "Who?", "Ann"), row("s-1", "Where?", "Oslo")], "long": [row("l-1", "Where?", "Oslo")]}
    clusters = question_clusters(sets)
    assert clusters["long"] == clusters["short"][1:] and len(set(clusters["short"])) == 2


def test_the_same_words_with_another_answer_are_another_question():
    """Two synthetic worlds may ask alike of two people of one name."""
    clusters = question_clusters({"world": [row("0", "Who?", "Ann"), row("1", "Who?", "Bo")]})
    assert len(set(clusters["world"])) == 2


def test_a_joined_question_is_in_the_cluster_of_its_parts():
    one, two, three = row("0", "Who?", "Ann"), row("1", "Where?", "Oslo"), row("2", "When?", "1900")
    text = joined_texts([one.question, two.question])
    joined = replace(row("0+1", text, "Ann; Oslo"), em_by_objective=[1.0, 0.0])
    clusters = question_clusters({"x1": [one, two, three], "x2": [joined]})
    assert clusters["x1"][0] == clusters["x1"][1] == clusters["x2"][0] != clusters["x1"][2]


def test_a_joined_question_that_cannot_be_taken_apart_is_its_own():
    joined = replace(row("0+1", "Who; where?", "Ann; Oslo"), em_by_objective=[1.0, 0.0])
    assert question_clusters({"x2": [joined], "none": []}) == {"x2": [0], "none": []}
    assert question_clusters({"none": []}) == {"none": []}
