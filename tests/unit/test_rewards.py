"""Rewards: exact values by hand, and nothing that a model or a passage writes can break them."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
from agent_builders import TOOLS
from hypothesis import given
from hypothesis import strategies as st

from mempipe.agents.protocol import parse_action
from mempipe.evaluation.metrics import acc, em, f1, score_objectives, sub_em_two_way
from mempipe.loader import parse_config
from mempipe.rl.config import AlgorithmConfig, RewardConfig
from mempipe.rl.rewards import (
    Scores,
    answer_f1,
    exact_match,
    f1_text,
    follows_format,
    math_match,
    normalize_answer,
    overlong_penalty,
    recall_reward,
    score,
)
from mempipe.rollout import run_group
from mempipe.settings import ConfigError
from mempipe.types import Context, EndReason, Group, Question, Trajectory

CONFIG = RewardConfig()
PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "\\boxed{",
    "\\boxed ",
    "{",
    "}",
    '"name"',
    '"arguments"',
    "\ud800",
    "\x00",
    "yes",
]
HOSTILE = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8))).map("".join)


def scored(prediction, golds, *, objectives=(), message="", **settings):
    config = RewardConfig(**settings)
    return score(
        prediction, golds, end_reason=EndReason.ANSWERED, config=config, objectives=objectives, message=message
    )


def earned(message: str, golds: list[str], **settings: Any) -> Scores:
    """What a trajectory whose last message is this one earns."""
    action = parse_action(message, tools=TOOLS)
    return score(
        action.answer, golds, end_reason=action.end_reason or EndReason.MAX_TURNS, config=RewardConfig(**settings)
    )


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (600, 0.0), (700, 0.125), (1000, 0.5), (1001, 0.5), (5000, 0.5)]
)
def test_an_overlong_trajectory_loses_what_dapo_s_formula_says(num_tokens, penalty):
    config = RewardConfig(overlong_tokens=1000, overlong_buffer=400, overlong_penalty=0.5)
    assert overlong_penalty(num_tokens, config) == pytest.approx(penalty)
    assert overlong_penalty(num_tokens, RewardConfig()) == 0.0


def test_an_overlong_buffer_begins_at_no_token_at_the_earliest():
    with pytest.raises(ValueError, match=r"reward.overlong_buffer is 512, more than reward.overlong_tokens 100"):
        RewardConfig(overlong_tokens=100)


def test_a_right_answer_earns_its_f1():
    scores = scored("the river Nile", ["Nile", "Blue Nile"])
    assert (scores.reward, scores.em, scores.f1) == (2 / 3, 0.0, 2 / 3)


def test_an_answer_without_a_shared_word_earns_the_wrong_answer_reward():
    assert scored("Rhine", ["Nile"]).reward == 0.1
    assert scored("Rhine", ["Nile"], wrong_answer=0.0).reward == 0.0


def test_em_rewards_pay_only_exact_answers():
    assert scored("nile!", ["The Nile"], answer="em").reward == 1.0
    assert scored("the river Nile", ["Nile"], answer="em").reward == 0.1


@pytest.mark.parametrize("reason", [reason for reason in EndReason if reason is not EndReason.ANSWERED])
def test_no_other_ending_earns_anything(reason):
    scores = score("Nile", ["Nile"], end_reason=reason, config=CONFIG)
    assert (scores.reward, scores.em, scores.f1) == (0.0, 0.0, 0.0)


def test_a_tiny_f1_earns_less_than_a_wrong_answer_unless_the_reward_is_monotone():
    answer = " ".join(f"w{i}" for i in range(29)) + " Nile"
    assert scored(answer, ["Nile"]).reward == pytest.approx(2 / 31, abs=1e-15)
    assert scored(answer, ["Nile"], monotone=True).reward == 0.1
    assert scored("Nile", ["Nile"], monotone=True).reward == 1.0


def test_articles_punctuation_and_case_do_not_count_but_accents_do():
    assert normalize_answer("  The  A.T.&T.  tower\n") == "att tower"
    assert exact_match("Beyoncé", ["Beyonce"]) == 0.0
    assert exact_match("Cafe\u0301", ["Caf\u00e9"]) == answer_f1("Cafe\u0301 Oslo", ["Caf\u00e9 Oslo"]) == 1.0


def test_answers_in_scripts_without_spaces_are_compared_by_character():
    assert answer_f1("北京市", ["北京"]) == pytest.approx(2 * (2 / 3) / (2 / 3 + 1))
    assert answer_f1("首都是東京です", ["大阪"]) == 0.0
    assert answer_f1("1936年 in 上海", ["上海, 1936年"]) == pytest.approx(2 * (4 / 5) / (4 / 5 + 1))
    assert exact_match("「北京」。", ["北京"]) == exact_match("！（北京）", ["北京"]) == 1.0
    assert exact_match("北京", ["南京"]) == 0.0


def test_a_gold_given_as_a_string_is_one_answer_and_not_its_letters():
    assert answer_f1("Nile", "Nile") == em("Nile", "Nile") == acc("the Nile", "Nile") == 1.0
    assert exact_match("N", "Nile") == acc("N", "Nile") == 0.0


def test_yes_and_no_match_only_themselves():
    assert answer_f1("yes it is", ["yes"]) == 0.0 and answer_f1("Yes!", ["yes"]) == 1.0


def test_without_golds_nothing_is_right():
    assert (f1("x", []), em("x", []), acc("x", []), sub_em_two_way("x", [])) == (0.0, 0.0, 0.0, 0.0)


def test_metrics_differ_in_what_a_long_or_a_short_answer_earns():
    assert (em("Paris, France", ["Paris"]), acc("Paris, France", ["Paris"])) == (0.0, 1.0)
    assert (acc("New", ["New York"]), sub_em_two_way("New", ["New York"])) == (0.0, 1.0)


def test_an_empty_gold_is_covered_by_an_empty_answer_only():
    assert acc("anything", ["the"]) == 0.0 and acc("a", ["the"]) == 1.0


TWO = [["Paris"], ["Rome", "Roma"]]


@pytest.mark.parametrize(
    ("answer", "num_right"),
    [
        ("Paris; Rome", 2),
        ("the paris;Roma.", 2),
        ("Rome; Paris", 0),
        ("Paris", 1),
        ("; Rome", 1),
        ("Paris; Rome; Oslo", 2),
        ("Paris; Oslo; Rome", 1),
        ("", 0),
    ],
)
def test_objectives_are_scored_by_position_missing_ones_count_0_and_further_ones_not_at_all(answer, num_right):
    scores = scored(answer, ["Paris; Rome"], objectives=TWO, answer="objectives_em", wrong_answer=0.0)
    assert (scores.reward, scores.em) == (num_right, num_right / 2)
    assert scored(answer, ["Paris; Rome"], objectives=TWO, answer="em", wrong_answer=0.0).reward == num_right / 2


@pytest.mark.parametrize("measure", ["em", "f1", "math", "objectives_em"])
def test_a_missing_answer_is_wrong_also_where_its_gold_normalises_to_nothing(measure):
    golds = [["Paris"], ["The The"], ["A"], [""]]
    for answer in ("Paris", "Paris;;;", "; ; ;"):
        scores = scored(answer, ["x"], objectives=golds, answer=measure, wrong_answer=0.0)
        right = answer.startswith("Paris")
        assert (scores.reward, scores.em) == (right * (1 if measure == "objectives_em" else 0.25), right / 4)
        question = Question(id="q", text="?", golden_answers=[], objectives=golds)
        assert scores.em == fmean(row["em"] for row in score_objectives(answer, question))
    assert scored("Paris; the", ["x"], objectives=golds[:2], answer="em").em == 1.0  # it is given, and the same word


def test_the_f1_of_several_objectives_is_their_mean():
    assert scored("Paris France; Roma", ["x"], objectives=TWO).f1 == pytest.approx((2 / 3 + 1) / 2, abs=1e-15)


def test_a_question_with_one_objective_is_no_list_of_answers():
    assert (
        scored("a; b", ["a; b"], answer="objectives_em").reward == 1.0
        and scored("a; b", ["a"], answer="em").reward == 0.1
    )


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("New York", "newyork"),
        ("50\\%", "50"),
        ("30^\\circ", "30"),
        ("30^{\\circ}", "30"),
        ("\\tfrac12", "\\frac{1}{2}"),
        ("\\dfrac{1}{2}", "1/2"),
        ("0.5", "\\frac12"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("x = 5", "5"),
        (".5", "0.5"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("5\\text{ cm}", "5"),
        ("\\left(1,2\\right)", "(1,2)"),
        ("1\\!000", "1000"),
        ("\\$7", "7"),
        ("", ""),
    ],
)
def test_math_answers_match_however_they_are_written(prediction, gold):
    assert math_match(prediction, ["other", gold]) == 1.0 and math_match("9" + prediction, [gold]) == 0.0


def test_math_answers_keep_articles_and_punctuation_and_need_a_gold():
    assert (math_match("The Beatles", ["Beatles"]), math_match("U.S.", ["US"]), math_match("x", [])) == (0.0, 0.0, 0.0)
    assert (
        scored("newyork", ["New York"], answer="math").reward == 1.0 and scored("x", ["y"], answer="math").reward == 0.1
    )


FOUND = (
    "<think>t</think><search>q</search>\n\n<information>Doc Paris</information>\n\n"
    "<think>u</think> <answer>Paris</answer>"
)


@pytest.mark.parametrize(
    ("message", "valid"),
    [
        (FOUND, True),
        ("<think>t</think><answer>x</answer>", True),
        ("  <think></think>\n<answer></answer>\n", True),
        ("", False),
        ("<think>t</think>", False),
        ("<think>t</think>hi<answer>x</answer>", False),
        ("<think>t</think><answer>x</answer> hi", False),
        ("<think>t</think><search>q</search><information>i</information><answer>x</answer>", False),
        ("<think>t</think><search>q</search><information>i</information>", False),
        ("<think>a</think><think>b</think><answer>x</answer>", False),
        ("<think><search>q</search></think><answer>x</answer>", False),
        ("<think>t</think><answer>x", False),
        ("<answer>x</answer>", False),
    ],
)
def test_the_form_is_turns_of_tags_with_nothing_between(message, valid):
    assert follows_format(message) is valid


@pytest.mark.parametrize(
    ("message", "gold", "reward"),
    [
        (FOUND, "Paris", 1.0),
        ("x<answer>Paris</answer>", "Paris", 0.8),
        (FOUND.replace("<answer>Paris", "<answer>Rome"), "Paris", 0.25),
        (FOUND.replace("<answer>Paris", "<answer>Rome"), "Oslo", 0.2),
        ("x<answer>Rome</answer>", "Paris", 0.1),
    ],
)
def test_search_r1_pays_answer_and_form_together(message, gold, reward):
    answer = message.partition("<answer>")[2].partition("<")[0]
    scores = scored(answer, [gold], message=message, answer="em", format="search_r1", retrieval_score=0.05)
    assert scores.reward == pytest.approx(reward, abs=1e-15)


def test_search_r1_pays_nothing_without_an_answer():
    config = RewardConfig(answer="em", format="search_r1")
    assert score(None, ["x"], end_reason=EndReason.MAX_TURNS, config=config, message=FOUND).reward == 0.0


def test_recall_adds_to_an_end_to_end_reward():
    assert recall_reward(1.0, [1.0, 0.0, 1.0, 1.0]) == 1.375
    assert recall_reward(0.0, [1.0, 1.0], weight=0.25) == 0.25
    assert recall_reward(1.0, []) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "<think></think><tool_call>" + '{"name": "s", "arguments": ' + "9" * 10_000 + "}</tool_call>\\boxed{x}",
        "<think></think><tool_call>" + '{"name": 1, "arguments": ' + "[" * 100_000 + "}</tool_call>\\boxed{x}",
        "<think></think>\\boxed{" + "9" * 10_000 + "}",
        "<think></think>\\boxed{\ud800\udfff}",
        "<think></think>" + "\\boxed{" * 100_000 + "}" * 99_999,
        "<think></think>" + "<tool_call>" * 50_000 + "</tool_call>" * 50_000,
        "<think>" * 1_000_000,
        "<think></think>\\boxed{" + "the nile " * 200_000 + "}",
    ],
    ids=["digits in call", "deep call", "digits", "surrogates", "braces", "calls", "thoughts", "megabytes"],
)
@pytest.mark.timeout(120)
def test_hostile_messages_are_scored_quickly_and_never_raise(text):
    assert 0 <= earned(text, ["Nile"]).reward <= 1


@given(text=HOSTILE, golds=st.lists(HOSTILE, max_size=3), monotone=st.booleans())
def test_rewards_lie_in_the_unit_interval_whatever_is_written(text, golds, monotone):
    for message in (
        text,
        f"<think>{text}</think>\\boxed{{{text}}}",
        f"<think></think><tool_call>{text}</tool_call>\\boxed{{x}}",
    ):
        scores = earned(message, golds, monotone=monotone)
        assert all(0 <= value <= 1 for value in (scores.reward, scores.em, scores.f1))


@given(text=HOSTILE)
def test_an_answer_matches_itself_unless_it_is_punctuation_alone(text):
    assert exact_match(text, [text]) == 1.0
    assert answer_f1(text, [text]) == (1.0 if f1_text(text) else 0.0)


@pytest.mark.parametrize(
    ("answer", "f1"), [("A", 1.0), ("a.", 1.0), ("(A)", 1.0), ("B", 0.0), ("the", 0.0), ("", 0.0), (".", 0.0)]
)
def test_the_letter_a_of_a_multiple_choice_is_an_answer(answer, f1):
    assert answer_f1(answer, ["A"]) == f1


@given(
    prediction=st.text(alphabet="ab nile", max_size=20),
    golds=st.lists(st.text(alphabet="ab nile", max_size=20), max_size=3),
)
def test_f1_is_symmetric_in_order_and_at_most_one(prediction, golds):
    assert answer_f1(prediction, golds) == answer_f1(prediction, golds[::-1])
    assert all(answer_f1(prediction, [g]) == pytest.approx(answer_f1(g, [prediction])) for g in golds)
    assert exact_match(prediction, golds) <= sub_em_two_way(prediction, golds)


async def played(rollout: Any, group_size: int, reward: RewardConfig, **options: Any) -> Group:
    """Returns the group of a question that "Paris" answers."""
    question = Question(id="q", text="?", golden_answers=["Paris"])
    options |= {"reward": reward, "advantage": AlgorithmConfig()}
    return await run_group(question, rollout, group_id="g", group_size=group_size, **options)


async def test_the_longest_context_of_a_trajectory_decides_about_its_length():
    def context(index: int, sampled: int, dropped: int) -> Context:
        row = {
            "token_ids": [1] * (sampled + 1),
            "logprobs": [0.0] * (sampled + 1),
            "policy_versions": [0] * (sampled + 1),
        }
        counts = {"num_prompt_tokens": 1, "num_question_tokens": 0, "num_memory_tokens": 0}
        return Context(index=index, loss_mask=[0] + [1] * sampled, num_dropped_tokens=dropped, **row, **counts)

    async def rollout(question, *, trajectory_id, group_id, member):
        contexts = [context(0, 60, 0), context(1, 60, 30 * member)]
        ended = {"end_reason": EndReason.ANSWERED, "answer": "Paris"}
        return Trajectory(id=trajectory_id, group_id=group_id, member=member, contexts=contexts, **ended)

    config = RewardConfig(overlong_tokens=100, overlong_buffer=40)
    group = await played(rollout, 3, config)
    assert [t.reward for t in group.trajectories] == pytest.approx([1.0, 0.25, 0.0])
    assert [t.em for t in group.trajectories] == [1.0] * 3


def remembering(index: int, before: str, after: str) -> Context:
    row = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0] * 2, "policy_versions": [0] * 2}
    counts = {"num_prompt_tokens": 1, "num_question_tokens": 0, "num_memory_tokens": 0}
    return Context(index=index, memory_before=before, memory_after=after, **row, **counts)


async def test_a_cost_per_memory_token_prefers_the_shorter_of_two_right_attempts():
    def context(index: int, memory_tokens: int) -> Context:
        row = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0] * 2, "policy_versions": [0] * 2}
        counts = {"num_prompt_tokens": 1, "num_question_tokens": 0, "num_memory_tokens": 0}
        return Context(index=index, num_new_memory_tokens=memory_tokens, **row, **counts)

    async def rollout(question, *, trajectory_id, group_id, member):
        lengths = [[], [10, 30], [100]][member]  # the answering context leaves no memory
        contexts = [context(index, length) for index, length in enumerate([*lengths, 0])]
        ended = {"end_reason": EndReason.ANSWERED, "answer": "Paris"}
        return Trajectory(id=trajectory_id, group_id=group_id, member=member, contexts=contexts, **ended)

    group = await played(rollout, 3, RewardConfig(memory_token_cost=0.005))
    assert [t.reward for t in group.trajectories] == pytest.approx([1.0, 0.9, 0.5])
    advantages = [t.advantage for t in group.trajectories]
    assert advantages == sorted(advantages, reverse=True) and advantages[1] > 0 > advantages[2]
    assert [t.em for t in group.trajectories] == [1.0] * 3


async def test_information_gain_is_what_the_last_memory_adds_to_the_log_probability_of_the_gold():
    """0.5 * (log p with the memory - log p without) beside an F1 of 1, of 0 and, without a memory, of 1."""
    asked = []

    async def gold_logprobs(question, memory, *, group_id):
        asked.append(memory)
        return {"": [-3.0, -2.5], "capital: Paris": [-0.25, -0.125], "capital: Rome": [-4.0, -2.0]}[memory]

    async def rollout(question, *, trajectory_id, group_id, member):
        memories = [["", "old", "capital: Paris"], ["", "capital: Rome"], [""], ["", "capital: Paris"]][member]
        contexts = [remembering(i, before, after) for i, (before, after) in enumerate(pairwise([*memories, ""]))]
        answer = "Rome" if member == 1 else "Paris"
        ended = {"end_reason": EndReason.ANSWERED, "answer": answer}
        return Trajectory(id=trajectory_id, group_id=group_id, member=member, contexts=contexts, **ended)

    group = await played(
        rollout, 4, RewardConfig(information_weight=0.5, wrong_answer=0.0), gold_logprobs=gold_logprobs
    )
    # 5.5 nats without a memory: Paris 5.5 - 0.375 = 5.125, Rome 5.5 - 6 = -0.5
    assert [t.measures[0].value for t in group.trajectories] == [5.125, -0.5, 0.0, 5.125]
    assert [t.reward for t in group.trajectories] == [1 + 2.5625, -0.25, 1.0, 1 + 2.5625]
    assert sorted(asked) == ["", "capital: Paris", "capital: Rome"]  # each once


def test_information_gain_is_for_agents_that_write_a_memory():
    with pytest.raises(ConfigError, match=r"information_weight is 0\.5, but agent.name 'react' writes no memory"):
        parse_config({"agent": {"name": "react"}, "reward": {"information_weight": 0.5}})
