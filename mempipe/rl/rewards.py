"""Rewards: token F1 or exact match of the answer, Search-R1's reward of answer and form, MemTrain's recall bonus, and
what a memory is worth: information gain and a cost per token.

Whether a trajectory has an answer is for its agent to say (`mempipe.agents`): training and evaluation score the same
one. Every function here returns a number for every answer and gold, however long or odd they are.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mempipe.rl.config import RewardConfig
from mempipe.text import split_words
from mempipe.types import EndReason

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WIDE_PUNCTUATION = "".join(chr(ord(sign) + 0xFEE0) for sign in string.punctuation) + "。、｡､・「」『』《》〈〉【】〔〕"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + _WIDE_PUNCTUATION)
WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})
"""Normalised answers that are right as a whole only."""
_TAG = re.compile("(</?(?:think|search|information|answer)>)")
_SEARCH_TURN = ["<think>", "</think>", "<search>", "</search>", "<information>", "</information>"]
_LAST_TURN = ["<think>", "</think>", "<answer>", "</answer>"]
# What MATH (arXiv 2103.03874) takes for the same answer, as replacements in this order.
_MATH_FORMS = [
    (re.compile(pattern), form)
    for pattern, form in (
        (r"\n|\\!", ""),
        (r"\\\\", r"\\"),
        (r"\\[td]frac", r"\\frac"),
        (r"\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$", ""),
        (r"\\text\{ .*", ""),  # a unit
        (r"\\%", ""),
        (r"(^|[ {])\.", r"\g<1>0."),
        (r"^[^=]{0,2}=([^=]*)$", r"\1"),  # "x = 5"
        (r"\\sqrt(?=[^{])(.)", r"\\sqrt{\1}"),
        (r" ", ""),
        (r"\\frac([^{])([^{])", r"\\frac{\1}{\2}"),
        (r"\\frac([^{])\{", r"\\frac{\1}{"),
        (r"^0\.5$", r"\\frac{1}{2}"),
        (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """`reward` is optimised: in [0, 1], or up to the number of objectives. `em` and `f1`, in [0, 1], are
    means over the objectives, and 0 unless the trajectory ended with an answer."""

    reward: float
    em: float
    f1: float


def score(
    answer: str | None,
    golden_answers: Sequence[str],
    *,
    end_reason: EndReason,
    config: RewardConfig,
    objectives: Sequence[Sequence[str]] = (),
    message: str = "",
) -> Scores:
    """Returns what a trajectory earns: nothing unless it ended with an answer; then what `config.answer` measures, and
    `wrong_answer` where that is 0.

    With `objectives` (the golden answers of each) the answer is split at ";" and scored position by position: a missing
    answer counts 0, one too many is ignored. `message` is the assistant's last one, observations included; only
    `config.format` looks at it.

    As published the reward is not monotone: an F1 between 0 and `wrong_answer` earns less than an answer that is all
    wrong. With `config.monotone` it earns `wrong_answer` as well.
    """
    if answer is None or end_reason is not EndReason.ANSWERED:
        return Scores(reward=0.0, em=0.0, f1=0.0)
    golds = objectives or [golden_answers]
    answers = split_answers(answer, len(golds)) if objectives else [answer]
    num_right = _sum(exact_match, answers, golds)
    em, f1 = num_right / len(golds), _sum(answer_f1, answers, golds) / len(golds)
    if config.format == "search_r1":
        return Scores(reward=_answer_and_form(em, golds, message, config), em=em, f1=f1)
    match config.answer:
        case "f1":
            reward = f1
        case "em":
            reward = em
        case "math":
            reward = _sum(math_match, answers, golds) / len(golds)
        case "objectives_em":
            reward = num_right
    if reward == 0 or (config.monotone and reward < config.wrong_answer):
        reward = config.wrong_answer
    return Scores(reward=reward, em=em, f1=f1)


def split_answers(answer: str, count: int) -> list[str | None]:
    """Returns the answers to `count` objectives, in order: the texts between semicolons, and None for each that is
    missing or empty.
    """
    answers = [part.strip() or None for part in answer.split(";")]
    return (answers + [None] * count)[:count]


def follows_format(message: str) -> bool:
    """Returns whether the assistant's message has the form that Search-R1 rewards (arXiv 2505.15117): turns of thought,
    search and information, then a thought and an answer, with nothing but space between the tags.
    """
    pieces = _TAG.split(message)
    tags, between = pieces[1::2], pieces[::4]
    num_searches, rest = divmod(len(tags) - len(_LAST_TURN), len(_SEARCH_TURN))
    return not rest and tags == _SEARCH_TURN * num_searches + _LAST_TURN and not "".join(between).strip()


def answer_f1(prediction: str, golden_answers: Sequence[str]) -> float:
    """Returns the best token F1 (harmonic mean of precision and recall over normalised words) against any gold; 0
    without one. In scripts without spaces every character is a word, as MLQA (arXiv 1910.07475) counts Chinese.

    "yes", "no" and "noanswer" are whole answers: they count only when both sides are the same. An answer that only
    articles make up, such as the letter A of a multiple choice, keeps them.
    """
    return max((_f1(f1_text(prediction), f1_text(gold)) for gold in as_list(golden_answers)), default=0.0)


def exact_match(prediction: str, golden_answers: Sequence[str]) -> float:
    """Returns 1.0 when the normalised prediction is one of the normalised golds, else 0.0."""
    normalized = normalize_answer(prediction)
    return float(any(normalized == normalize_answer(gold) for gold in as_list(golden_answers)))


def math_match(prediction: str, golden_answers: Sequence[str]) -> float:
    """Returns 1.0 when the prediction is one of the golds written in another way, case aside, as MATH compares them;
    MemAgent trains on it.

    Spaces, units and LaTeX variants do not count; articles and punctuation do.
    """
    form = _math_form(prediction)
    return float(any(form == _math_form(gold) for gold in as_list(golden_answers)))


def normalize_answer(text: str) -> str:
    """Returns the text in lower case without ASCII punctuation, English articles and surplus spaces (SQuAD, arXiv
    1606.05250), and without the punctuation of Chinese and Japanese. Accents stay, in one form (NFC): a text may write
    "é" as one character or as two.
    """
    text = unicodedata.normalize("NFC", text)
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1_text(text: str) -> str:
    """Returns the text whose words token F1 compares: the normalised one, or the articles that alone make it up."""
    return normalize_answer(text) or " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def recall_match(answer: str | None, target: Sequence[str], config: RewardConfig) -> float:
    """Returns 1.0 when the answer of a recall sample is a surface form of the entity (MemTrain Eq. 1), else 0.0."""
    if answer is None:
        return 0.0
    return exact_match(answer, target) if config.recall_match == "em" else float(answer in target)


def recall_reward(answer_score: float, recall_scores: Sequence[float], *, weight: float = 0.5) -> float:
    """Returns MemTrain's reward of an end-to-end rollout (arXiv 2606.03197, Eq. 2): its own score plus `weight` times
    the mean score of the recall samples that questioned its memory. With scores in [0, 1] it is in [0, 1 + weight].
    """
    return answer_score + (weight * sum(recall_scores) / len(recall_scores) if recall_scores else 0.0)


def information_gain(with_memory: Sequence[float], without_memory: Sequence[float]) -> float:
    """Returns the information of a memory about the golden answer, in nats: log p(gold | question, memory) - log p(gold
    | question).

    Both sequences have one log-probability for every token of the answer.
    """
    return math.fsum(with_memory) - math.fsum(without_memory)


def overlong_penalty(num_tokens: int, config: RewardConfig) -> float:
    """Returns the penalty of a trajectory whose longest context has `num_tokens` sampled tokens (DAPO, arXiv
    2503.14476, Eq. 13).

    Nothing up to overlong_tokens - overlong_buffer, then linearly more up to overlong_penalty at overlong_tokens.
    """
    if not config.overlong_tokens:
        return 0.0
    excess = num_tokens - (config.overlong_tokens - config.overlong_buffer)
    return config.overlong_penalty * min(max(excess / config.overlong_buffer, 0.0), 1.0)


def memory_cost(memory_tokens: Sequence[int], config: RewardConfig) -> float:
    """Returns the cost of an attempt's memories, given their lengths in tokens: `memory_token_cost` times the mean
    length; 0 without a memory.
    """
    return config.memory_token_cost * sum(memory_tokens) / len(memory_tokens) if memory_tokens else 0.0


def _answer_and_form(em: float, golds: Sequence[Sequence[str]], message: str, config: RewardConfig) -> float:
    """Returns Search-R1's reward (v0.3). A right answer earns 1, or less without the form; a wrong one earns what the
    form, the retrieval or the attempt is worth.
    """
    in_form = follows_format(message)
    if em == 1:
        return 1.0 if in_form else 1.0 - config.structure_score
    if not in_form:
        return config.attempt_score
    found = normalize_answer(" ".join(re.findall("<information>(.*?)</information>", message, flags=re.DOTALL)))
    hit = any(normalize_answer(gold) in found for options in golds for gold in as_list(options))
    return config.structure_score + config.retrieval_score * hit


def _sum(
    measure: Callable[[str, Sequence[str]], float], answers: Sequence[str | None], golds: Sequence[Sequence[str]]
) -> float:
    """Returns the summed score of the answers; a missing answer scores 0, whatever its gold normalises to."""
    return sum(measure(answer, gold) for answer, gold in zip(answers, golds, strict=True) if answer is not None)


def _math_form(text: str) -> str:
    text = text.lower()
    for pattern, form in _MATH_FORMS:
        text = pattern.sub(form, text)
    return text


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and (prediction in WHOLE_ANSWERS or gold in WHOLE_ANSWERS):
        return 0.0
    predicted, expected = split_words(prediction), split_words(gold)
    shared = (Counter(predicted) & Counter(expected)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def as_list(golden_answers: Sequence[str]) -> Sequence[str]:
    """Makes a list of a single gold that is given as a string: it is one answer, not its letters."""
    return [golden_answers] if isinstance(golden_answers, str) else golden_answers
