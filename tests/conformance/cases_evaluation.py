"""How published cases of evaluation and of evaluation data are put to our functions, and where we mean to differ.

MemSearcher's metrics and MemAgent's are in the tables of rewards, its last answer in that of agents.
"""

from __future__ import annotations

import asyncio
import re
import string
from collections import Counter
from statistics import fmean
from typing import Any

from conformance.cases_agents import TOOL, CharTokenizer
from conformance.common import Adapter, Case, Difference
from mempipe.agents.mem1 import Mem1Budget, Mem1Renderer
from mempipe.agents.protocol import last_stated, parse_answer
from mempipe.agents.tagged import TaggedMessage, TaggedPrompts
from mempipe.data.objectives import join_objectives
from mempipe.data.ruler import peer_order
from mempipe.evaluation.judge import judge_answers
from mempipe.evaluation.metrics import score_objectives
from mempipe.types import FinishReason, Question

SENTENCE = "MemAgent-eval:extract_answer"
THOUGHT = "MemAgent-eval:extract_solution"
LOOP = "MemAgent-eval:get_pred scoring loop (re-stated)"
MEM1_EM = "MEM1-eval:eval.compute_score(em)"
MEM1_F1 = "MEM1-eval:eval.compute_score(f1)"
TWO_WAY = 'MEM1-eval:generate_rollout "Exact_match" (re-stated from source)'
ACT = "MEM1-inference:act"
STATE = "MEM1-inference:extract_internal_state"
JUDGE = "MEM1-inference:model_estimated_match (the MBE metric)"
PROMPTS = TaggedPrompts(
    system="", user="{question}", observation="{passages}{turns_left}", passage="{text}", passage_separator=""
)
NUM_OWN_DOCS = 10


def mem1_message(text: str) -> TaggedMessage:
    """What our MEM1 agent takes from a message, with one token per character."""
    tokenizer = CharTokenizer()
    limits = {"question_tokens": 1, "observation_tokens": 10, "action_tokens": len(text) + 1}
    renderer = Mem1Renderer(
        tokenizer, prompts=PROMPTS, search=TOOL, budget=Mem1Budget(**limits, context_tokens=3 * len(text) + 1000)
    )
    return renderer.parse(tokenizer.encode_template(text), finish=FinishReason.STOP)


def objectives_question(golds: list[list[str]]) -> Question:
    return Question(id="q", text="?", golden_answers=["; ".join(gold[0] for gold in golds)], objectives=golds)


# MemAgent


def thought_removed(case: Case) -> str | None:
    return parse_answer(case["input"]["solution_str"])


def scoring_loop(case: Case) -> dict[str, float]:
    """The mean over all questions, those without an answer included."""
    answers = [last_stated(output) for output in case["input"]["outputs"]]
    scores = [
        score_objectives(answer, Question(id="q", text="?", golden_answers=[gold]))[0]["sub_em_two_way"]
        for answer, gold in zip(answers, case["input"]["golds"], strict=True)
    ]
    return {"scored": len(scores), "sub_em_percent": 100 * fmean(scores)}


def box_outside_thoughts(case: Case) -> str | None:
    text = case["input"]["solution_str"]
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", re.sub("<think>.*?</think>", "", text, flags=re.DOTALL))
    return boxes[-1] if boxes and text.count("<think>") == text.count("</think>") else None


def all_scored(case: Case) -> dict[str, float]:
    """The published mean with the failed requests back in the denominator."""
    num_right = case["expected"]["sub_em_percent"] / 100 * case["expected"]["scored"]
    return {"scored": len(case["input"]["golds"]), "sub_em_percent": 100 * num_right / len(case["input"]["golds"])}


def own_positions(case: Case) -> list[int]:
    order = peer_order(case["input"]["num_docs"])
    return [order.index(own) + 1 for own in range(NUM_OWN_DOCS)]


# MEM1


def last_message(transcript: str) -> str:
    """What leads to the last answer of a transcript: a trajectory of ours holds its messages one by one."""
    *_, message, _ = (
        ["", *re.split("(?<=</answer>)", transcript)] if "</answer>" in transcript else ["", transcript, ""]
    )
    return message


def transcript_score(case: Case, *, metric: str) -> float:
    """The sum over objectives, as published: ours is their mean."""
    answer = mem1_message(last_message(case["input"]["solution_str"])).answer
    return sum(row[metric] for row in score_objectives(answer, objectives_question(case["input"]["ground_truths"])))


def two_way_matches(case: Case) -> float:
    rows = score_objectives(case["input"]["answer"], objectives_question(case["input"]["ground_truths"]))
    return sum(row["sub_em_two_way"] for row in rows)


def action(case: Case) -> dict[str, Any] | None:
    message = mem1_message(case["input"]["response"])
    if message.answer is not None:
        return {"type": "answer", "content": message.answer}
    return {"type": "search", "content": "RES", "query": message.query} if message.query is not None else None


def first_action(case: Case) -> dict[str, Any] | None:
    """By hand: the pair of tags that closes first."""
    found = re.search("<(search|answer)>(.*?)</\\1>", case["input"]["response"], flags=re.DOTALL)
    if not found or not found[2].strip():
        return None
    text = found[2].strip()
    return (
        {"type": "answer", "content": text}
        if found[1] == "answer"
        else {"type": "search", "content": "RES", "query": text}
    )


def carried_state(case: Case) -> str | None:
    """The state that goes to the next turn: there is one only after a search."""
    message = mem1_message(case["input"]["response"])
    return message.text if message.query is not None else None


def text_up_to_search(case: Case) -> str | None:
    response = case["input"]["response"]
    end = re.search("</(search|answer)>", response)
    return response[: end.end()] if end and end[1] == "search" and "<search>" in response[: end.start()] else None


def judged(case: Case) -> int:
    """The verdict of a judge that calls an answer right when it is the reference answer, letter by letter."""

    async def ask(prompt: str, *, max_tokens: int, temperature: float) -> list[str]:
        reference, answer = prompt.partition("[REFERENCE ANSWERS]\n- ")[2].partition("\n[END]")[0].split("\n[ANSWER]\n")
        return ["yes" if reference == answer else "no"]

    (verdict,) = asyncio.run(judge_answers("?", [case["input"]["golden"]], [case["input"]["answer"]], ask))
    assert verdict is not None
    return int(verdict)


def joined(case: Case) -> list[str]:
    questions = [
        Question(id=str(i), text=text, golden_answers=["x"]) for i, text in enumerate(case["input"]["questions"])
    ]
    return [question.text for question in join_objectives(questions, objectives=case["input"]["batch_size"])]


def num_joined(case: Case) -> int:
    questions = [Question(id=str(i), text="?", golden_answers=["x"]) for i in range(case["input"]["rows"])]
    return len(list(join_objectives(questions, objectives=case["input"]["batch_size"])))


# What the differences promise, worked out without the functions under test


def words(text: str) -> list[str]:
    """SQuAD's words: punctuation deleted, articles left out."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def objective_pairs(case: Case) -> list[tuple[str, list[str]]]:
    """(answer, golds) of each objective; "" where there is no answer."""
    content = last_message(case["input"]["solution_str"]).partition("<answer>")[2].partition("</answer>")[0]
    golds = case["input"]["ground_truths"]
    return list(zip([*content.split(";"), *[""] * len(golds)], golds, strict=False))


def sum_of_matches(case: Case) -> float:
    return sum(
        any(words(answer) == words(gold) for gold in golds) for answer, golds in objective_pairs(case) if answer.strip()
    )


def sum_of_overlaps(case: Case) -> float:
    def overlap(answer: str, gold: str) -> float:
        predicted, expected = words(answer), words(gold)
        shared = (Counter(predicted) & Counter(expected)).total()
        if not shared or (predicted != expected and {*map("".join, (predicted, expected))} & {"yes", "no", "noanswer"}):
            return 0.0
        return 2 * shared / (len(predicted) + len(expected))

    return sum(max(overlap(answer, gold) for gold in golds) for answer, golds in objective_pairs(case))


def answer_counts_differ(case: Case) -> bool:
    answer = last_message(case["input"]["solution_str"]).partition("<answer>")[2].partition("</answer>")[0]
    return len(answer.split(";")) != len(case["input"]["ground_truths"])


def tags_differ(case: Case) -> bool:
    text = case["input"]["solution_str"]
    return any(
        text.count(f"<{tag}>") != text.count(f"</{tag}>") for tag in ("think", "search", "information", "answer")
    )


def matches_either_way(case: Case) -> float:
    def match(answer: str, gold: str) -> bool:
        return " ".join(words(answer)) in " ".join(words(gold)) or " ".join(words(gold)) in " ".join(words(answer))

    answers = [*case["input"]["answer"].split(";"), *[""] * len(case["input"]["ground_truths"])]
    pairs = zip(answers, case["input"]["ground_truths"], strict=False)
    return float(sum(any(match(answer, gold) for gold in golds) for answer, golds in pairs if answer.strip()))


ADAPTERS: dict[str, Adapter] = {
    SENTENCE: lambda case: last_stated(case["input"]["response"]),
    THOUGHT: thought_removed,
    LOOP: scoring_loop,
    "MemAgent-data:positions (1-based) of the 10 own context docs after random.Random(4).shuffle": own_positions,
    MEM1_EM: lambda case: transcript_score(case, metric="em"),
    MEM1_F1: lambda case: transcript_score(case, metric="f1"),
    TWO_WAY: two_way_matches,
    ACT: action,
    STATE: carried_state,
    JUDGE: judged,
    "MEM1-data:2-objective questions (re-stated)": joined,
    "MEM1-data:bamboogle rows after 2-objective pairing": num_joined,
}

DIFFERENCES = [
    Difference(
        function=SENTENCE,
        applies=lambda case: case["expected"] == "",
        ours=lambda case: None,
        reason="a sentence without an answer is none; an empty one would match any gold by the published metric",
    ),
    Difference(
        function=THOUGHT,
        applies=lambda case: True,
        ours=box_outside_thoughts,
        reason="an answer is what stands in the box outside the thoughts; the rest of a reply is not one",
    ),
    Difference(
        function=LOOP,
        applies=lambda case: not all(case["input"]["outputs"]),
        ours=all_scored,
        reason="a question that failed stays in the denominator with 0",
    ),
    *(
        Difference(function=function, applies=applies, ours=ours, reason=reason)
        for function, ours in ((MEM1_EM, sum_of_matches), (MEM1_F1, sum_of_overlaps))
        for applies, reason in (
            (
                answer_counts_differ,
                "a missing answer scores nothing and one too many is ignored, in evaluation as in training",
            ),
            (
                tags_differ,
                "what a trajectory answered is known by itself: tags elsewhere in the transcript cannot take it back",
            ),
            (
                lambda case: True,
                "words are SQuAD's (no articles, punctuation deleted) and F1 counts repeated ones, in all metrics "
                "alike",
            ),
        )
    ),
    Difference(
        function=TWO_WAY,
        applies=lambda case: True,
        ours=matches_either_way,
        reason="every gold counts, words are SQuAD's, and an objective without an answer matches nothing",
    ),
    Difference(
        function=ACT,
        applies=lambda case: True,
        ours=first_action,
        reason="the pair of tags that closes first is the action, and one without a text is none, as in training",
    ),
    Difference(
        function=STATE,
        applies=lambda case: True,
        ours=text_up_to_search,
        reason=(
            "the state is all that was sampled up to the search, id by id; no part of it is cut out and written anew"
        ),
    ),
    Difference(
        function=JUDGE,
        applies=lambda case: case["input"]["answer"] != case["input"]["golden"],
        ours=lambda case: 0,
        reason="the judge's verdict is what counts; published, every answer is right",
    ),
]
