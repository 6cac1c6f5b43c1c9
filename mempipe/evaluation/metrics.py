"""Answer metrics that published results are stated in. All take a prediction and its golds and give a number in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence

from mempipe.rl.rewards import answer_f1, exact_match, normalize_answer


def em(prediction: str, golden_answers: Sequence[str]) -> float:
    """Exact match after SQuAD normalisation: the main figure of MemSearcher (arXiv 2511.02805) and Search-R1 (arXiv 2503.09516)."""
    return exact_match(prediction, golden_answers)


def f1(prediction: str, golden_answers: Sequence[str]) -> float:
    """Best token F1; what MemSearcher trains on, and FlashRAG's f1."""
    return answer_f1(prediction, golden_answers)


def cover_em(prediction: str, golden_answers: Sequence[str]) -> float:
    """Whether a normalised gold stands inside the normalised prediction: FlashRAG's acc, also called sub-EM.

    Rewards long answers. A gold that normalises to nothing ("the") is covered by a prediction that does so too, not by every one.
    """
    predicted = normalize_answer(prediction)
    golds = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return float(any(gold in predicted if gold else not predicted for gold in map(normalize_answer, golds)))


def either_way_em(prediction: str, golden_answers: Sequence[str]) -> float:
    """Whether gold stands in prediction or prediction in gold: MemAgent's reported number on RULER-HQA (arXiv 2507.02259).

    Very lenient, and stated only to compare with published tables: "e" is right for "Einstein", and an empty prediction for anything.
    """
    predicted = normalize_answer(prediction)
    golds = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return float(any(gold in predicted or predicted in gold for gold in map(normalize_answer, golds)))
