"""What an attempt earns: SQuAD-style token F1 or exact match of its answer, and MemTrain's recall bonus.

Whether a trajectory has an answer is for its agent to say (`mempipe.agents`): training and evaluation score the same one. Everything
here is total: no answer or gold, however long or odd, raises.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mempipe.config import RewardConfig
from mempipe.types import EndReason

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Each in [0, 1]. `reward` is what is optimised; `em` and `f1` are 0 unless the trajectory ended with an answer."""

    reward: float
    em: float
    f1: float


def score(answer: str | None, golden_answers: Sequence[str], *, end_reason: EndReason, config: RewardConfig) -> Scores:
    """What a trajectory earns: nothing unless it ended with an answer; then F1 (or EM), and `wrong_answer` where that is 0.

    As published the reward is not monotone: an F1 between 0 and `wrong_answer` earns less than an answer that is all wrong.
    With `config.monotone` it earns `wrong_answer` as well.
    """
    if answer is None or end_reason is not EndReason.ANSWERED:
        return Scores(reward=0.0, em=0.0, f1=0.0)
    em, f1 = exact_match(answer, golden_answers), answer_f1(answer, golden_answers)
    reward = f1 if config.answer == "f1" else em
    if reward == 0 or (config.monotone and reward < config.wrong_answer):
        reward = config.wrong_answer
    return Scores(reward=reward, em=em, f1=f1)


def answer_f1(prediction: str, golden_answers: Sequence[str]) -> float:
    """The best token F1 (harmonic mean of precision and recall over normalised words) against any gold; 0 without one.

    "yes", "no" and "noanswer" are whole answers: they count only when both sides are the same.
    """
    return max((_f1(normalize_answer(prediction), normalize_answer(gold)) for gold in _as_list(golden_answers)), default=0.0)


def exact_match(prediction: str, golden_answers: Sequence[str]) -> float:
    """1.0 when the normalised prediction is one of the normalised golds, else 0.0."""
    normalized = normalize_answer(prediction)
    return float(any(normalized == normalize_answer(gold) for gold in _as_list(golden_answers)))


def normalize_answer(text: str) -> str:
    """Lower case without ASCII punctuation, English articles and surplus spaces (SQuAD, arXiv 1606.05250). Accents stay."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def recall_reward(answer_score: float, recall_scores: Sequence[float], *, weight: float = 0.5) -> float:
    """MemTrain's reward of an end-to-end rollout: its own score plus `weight` times the mean score of the recall samples that
    questioned its memory. With scores in [0, 1] it is in [0, 1 + weight]."""
    return answer_score + (weight * sum(recall_scores) / len(recall_scores) if recall_scores else 0.0)


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and (prediction in _WHOLE_ANSWERS or gold in _WHOLE_ANSWERS):
        return 0.0
    predicted, expected = prediction.split(), gold.split()
    shared = (Counter(predicted) & Counter(expected)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def _as_list(golden_answers: Sequence[str]) -> Sequence[str]:
    """A single gold given as a string is one answer, not its letters."""
    return [golden_answers] if isinstance(golden_answers, str) else golden_answers
