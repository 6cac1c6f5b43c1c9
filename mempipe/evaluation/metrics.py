"""Metrics of answers that published results are stated in. Each takes a prediction and its golds and returns a number
from 0 to 1.

`METRICS` names them all; `score_objectives` applies them to one attempt. A question that was not answered scores 0 and
stays in the denominator. With several objectives a question scores the mean over them, so that the mean over questions
is the papers' sum / n.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence

from mempipe.rl import rewards
from mempipe.rl.rewards import answer_f1, as_list, exact_match, f1_text, normalize_answer, split_answers
from mempipe.text import split_words
from mempipe.types import EndReason, Question, Trajectory

Metric = Callable[[str, Sequence[str]], float]


def em(prediction: str, golden_answers: Sequence[str]) -> float:
    """Exact match after SQuAD normalisation: the main figure of MemSearcher (arXiv 2511.02805), MEM1 (arXiv
    2506.15841) and Search-R1 (arXiv 2503.09516)."""
    return exact_match(prediction, golden_answers)


def f1(prediction: str, golden_answers: Sequence[str]) -> float:
    """Best token F1 over the golds; what MemSearcher trains on, and FlashRAG's f1."""
    return answer_f1(prediction, golden_answers)


def precision(prediction: str, golden_answers: Sequence[str]) -> float:
    """Best share of the prediction's words that a gold has: FlashRAG's precision, reported with f1 in MemSearcher's
    evaluation.
    """
    return max((_shared(prediction, gold)[0] for gold in as_list(golden_answers)), default=0.0)


def recall(prediction: str, golden_answers: Sequence[str]) -> float:
    """Best share of a gold's words that the prediction has: FlashRAG's recall, reported with f1 in MemSearcher's
    evaluation.
    """
    return max((_shared(prediction, gold)[1] for gold in as_list(golden_answers)), default=0.0)


def acc(prediction: str, golden_answers: Sequence[str]) -> float:
    """Cover-EM, whether the normalised prediction contains a normalised gold answer: FlashRAG's acc and Search-R1's
    subem.

    Rewards long answers. A gold that normalises to nothing ("the") is covered by a prediction that does so too, not by
    every one.
    """
    predicted = normalize_answer(prediction)
    return float(
        any(gold in predicted if gold else not predicted for gold in map(normalize_answer, as_list(golden_answers)))
    )


def sub_em_two_way(prediction: str, golden_answers: Sequence[str]) -> float:
    """Returns 1 if the prediction contains the gold answer or the reverse, else 0: the number that MemAgent (arXiv
    2507.02259) reports on RULER-HQA.

    Very lenient, and stated only to compare with published tables: "e" is right for "Einstein", and an empty prediction
    for anything.
    """
    predicted = normalize_answer(prediction)
    return float(any(gold in predicted or predicted in gold for gold in map(normalize_answer, as_list(golden_answers))))


def math_match(prediction: str, golden_answers: Sequence[str]) -> float:
    """Equality as MATH (arXiv 2103.03874) compares boxed answers, case aside: what MemAgent trains on.

    Spaces, units and LaTeX variants do not count; articles and punctuation do: "The Beatles" is not "Beatles".
    """
    return rewards.math_match(prediction, golden_answers)


METRICS: dict[str, Metric] = {
    metric.__name__: metric for metric in (em, f1, acc, precision, recall, sub_em_two_way, math_match)
}


def right_answers(trajectory: Trajectory, question: Question) -> list[bool]:
    """Returns for each objective (one without objectives is a single one) whether its answer is an exact match."""
    if not question.objectives:
        return [trajectory.em == 1]
    answer = trajectory.answer if trajectory.end_reason is EndReason.ANSWERED else None
    return [scores["em"] == 1 for scores in score_objectives(answer, question)]


def definitions() -> dict[str, str]:
    """Returns the definition of each metric, for reports and for the files that hold its values."""
    return {name: " ".join((inspect.getdoc(metric) or "").split()) for name, metric in METRICS.items()}


def score_objectives(answer: str | None, question: Question) -> list[dict[str, float]]:
    """Returns every metric for each objective of a question (one without objectives is a single one), 0 without an
    answer.

    With objectives the answer is split at ";". A missing or empty part does not count as an answer; surplus parts are
    skipped.
    """
    golds = question.objectives or [question.golden_answers]
    answers: list[str | None] = [answer]
    if question.objectives:
        answers = split_answers(answer or "", len(golds))
    return [
        {name: 0.0 if text is None else metric(text, gold) for name, metric in METRICS.items()}
        for text, gold in zip(answers, golds, strict=True)
    ]


def _shared(prediction: str, gold: str) -> tuple[float, float]:
    """Returns precision and recall of the normalised words; 0 where `answer_f1` finds nothing right (yes and no match
    only themselves).
    """
    if not answer_f1(prediction, [gold]):
        return 0.0, 0.0
    predicted, expected = split_words(f1_text(prediction)), split_words(f1_text(gold))
    shared = (Counter(predicted) & Counter(expected)).total()
    return shared / len(predicted), shared / len(expected)
