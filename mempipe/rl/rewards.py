"""What an attempt earns: SQuAD-style token F1 and exact match, MemSearcher's format rules, MemTrain's recall bonus.

Everything here is total: no answer, message or gold, however long or odd, raises.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mempipe.agents.protocol import last_boxed
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


class FormatFault(StrEnum):
    """Why a conversation earns nothing, in the order in which the rules are applied."""

    NOT_STOPPED = "the last message does not end with the stop token"
    NO_MESSAGE = "there is no assistant message"
    THOUGHT_UNPAIRED = "<think> and </think> are not equally many"
    NO_THOUGHT = "the first message has no <think>"
    CALL_UNPAIRED = "<tool_call> and </tool_call> are not equally many"
    CALL_FIELDS = "a tool call of the first message lacks name or arguments"
    CALL_JSON = "a tool call of the first message is not JSON"
    NO_BOX = "the last message has no \\boxed"
    BOX_UNREADABLE = "the \\boxed of the last message does not close, or is another box"


_END_REASONS = {
    FormatFault.NOT_STOPPED: EndReason.LENGTH,
    FormatFault.CALL_UNPAIRED: EndReason.INVALID_CALL,
    FormatFault.CALL_FIELDS: EndReason.INVALID_CALL,
    FormatFault.CALL_JSON: EndReason.INVALID_CALL,
}


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


def memsearcher_reward(messages: Sequence[str], golden_answers: Sequence[str], *, stopped: bool, config: RewardConfig) -> Scores:
    """The reward of the final conversation of a trajectory from the texts of its assistant messages (arXiv 2511.02805).

    `messages` are what the engine sampled, one text per message without its stop token. They are never cut out of a decoded
    transcript, so nothing that a passage contains can count as a message. `stopped` tells whether the last one ended by itself.
    """
    fault = format_fault(messages, stopped=stopped)
    if fault is not None:
        return score(None, golden_answers, end_reason=_END_REASONS.get(fault, EndReason.NO_ACTION), config=config)
    return score(last_boxed(messages[-1].strip()), golden_answers, end_reason=EndReason.ANSWERED, config=config)


def format_fault(messages: Sequence[str], *, stopped: bool) -> FormatFault | None:
    """The first of MemSearcher's format rules that the assistant messages of a conversation break; None: well-formed, with an answer."""
    if not stopped:
        return FormatFault.NOT_STOPPED
    if not messages:
        return FormatFault.NO_MESSAGE
    for index, message in enumerate(messages):
        fault = _message_fault(message, first=index == 0)
        if fault is not None:
            return fault
    last = messages[-1].strip()
    if "\\box" not in last:
        return FormatFault.NO_BOX
    return FormatFault.BOX_UNREADABLE if last_boxed(last) is None else None


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


def _message_fault(message: str, *, first: bool) -> FormatFault | None:
    num_thoughts = message.count("<think>")
    if num_thoughts != message.count("</think>"):
        return FormatFault.THOUGHT_UNPAIRED
    if first and not num_thoughts:
        return FormatFault.NO_THOUGHT
    if message.count("<tool_call>") != message.count("</tool_call>"):
        return FormatFault.CALL_UNPAIRED
    return _calls_fault(message) if first else None


def _calls_fault(message: str) -> FormatFault | None:
    start = message.find("<tool_call>")
    while start >= 0 and (end := message.find("</tool_call>", start)) >= 0:
        call = message[start + len("<tool_call>") : end].strip()
        if '"name"' not in call or '"arguments"' not in call:
            return FormatFault.CALL_FIELDS
        try:
            json.loads(call)
        except (ValueError, RecursionError):  # ValueError: also numbers of more digits than Python converts
            return FormatFault.CALL_JSON
        start = message.find("<tool_call>", end)
    return None


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
