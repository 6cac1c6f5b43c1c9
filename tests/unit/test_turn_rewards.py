"""Rewards of single turns: what a turn earns, what its context's advantage is, and when form is paid without an answer.
All numbers are worked out by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempipe.data.trajectories import groups_to_table, table_to_groups
from mempipe.evaluation.rollout_metrics import rollout_metrics
from mempipe.loader import load_config, parse_config
from mempipe.reports.alarms import alarms, form_alarm
from mempipe.rl.advantages import compared, group_advantages, has_signal, with_advantages
from mempipe.rl.config import AlgorithmConfig, RewardConfig
from mempipe.rl.packing import pack_step
from mempipe.rl.samples import to_samples
from mempipe.rl.turn_rewards import answer_in_memory, kept_fact, token_price, weighted
from mempipe.rollout import run_group
from mempipe.settings import ConfigError
from mempipe.types import (
    Context,
    EndReason,
    Evidence,
    Group,
    Measure,
    Passage,
    Question,
    Recall,
    Search,
    Trajectory,
)
from mempipe.user_code import UserCodeError

QUICKSTART = Path(__file__).parents[2] / "jobs" / "configs" / "quickstart.yaml"
QUESTION = Question(
    id="q",
    text="Where was the director of Film born?",
    golden_answers=["Oslo", "Christiania"],
    evidence=[Evidence(passage_id="film", value="Ann Lee"), Evidence(passage_id="ann", value="Oslo")],
)


def turn(index: int, before: str, after: str, *found: str, sampled: int = 3, dropped: int = 0) -> Context:
    passages = [Passage(id=name, title=name, text=name) for name in found]
    return Context(
        index=index,
        token_ids=[0] * (1 + sampled),
        loss_mask=[0] + [1] * sampled,
        logprobs=[0.0] * (1 + sampled),
        policy_versions=[-1] + [0] * sampled,
        num_prompt_tokens=1,
        num_question_tokens=1,
        num_memory_tokens=0,
        num_dropped_tokens=dropped,
        searches=[Search(query="x", num_passages=1, passages=passages, snapshot="s")] if found else [],
        memory_before=before,
        memory_after=after,
    )


def attempt(*contexts: Context, member: int = 0, reward: float = 0.0, f1: float = 0.0) -> Trajectory:
    return Trajectory(
        id=f"q/{member}",
        group_id="q",
        member=member,
        contexts=list(contexts),
        end_reason=EndReason.ANSWERED,
        answer="x",
        reward=reward,
        f1=f1,
    )


WHOLE = attempt(
    turn(0, "", "Ann Lee", "film"), turn(1, "Ann Lee", "Ann Lee Oslo", "ann"), turn(2, "Ann Lee Oslo", "", sampled=2)
)


def test_a_turn_earns_the_facts_that_it_found_and_its_memory_took():
    assert kept_fact(WHOLE, QUESTION) == [1.0, 1.0, None]
    both = attempt(turn(0, "", "Ann Lee, Oslo", "film", "ann"), turn(1, "Ann Lee, Oslo", ""))
    assert kept_fact(both, QUESTION) == [2.0, None]
    assert kept_fact(attempt(turn(0, "", "nothing", "film"), turn(1, "nothing", "")), QUESTION) == [0.0, None]


def test_a_guessed_name_earns_nothing_and_a_lost_fact_costs_what_it_earned():
    guessed = attempt(turn(0, "", "Ann Lee Oslo", "film"), turn(1, "Ann Lee Oslo", ""))
    assert kept_fact(guessed, QUESTION) == [1.0, None], "Oslo was not found"
    forgetful = attempt(
        turn(0, "", "Ann Lee", "film"),
        turn(1, "Ann Lee", "x", "other"),
        turn(2, "x", "Ann Lee", "film"),
        turn(3, "Ann Lee", ""),
    )
    assert kept_fact(forgetful, QUESTION) == [1.0, -1.0, 1.0, None], "losing and finding again is worth nothing"


def test_without_evidence_no_turn_earns_a_fact():
    assert kept_fact(WHOLE, replace(QUESTION, evidence=[])) == [None, None, None]


def test_a_memory_that_knows_any_golden_answer_earns_one():
    assert answer_in_memory(WHOLE, QUESTION) == [0.0, 1.0, None]
    assert answer_in_memory(WHOLE, replace(QUESTION, golden_answers=["Christiania"])) == [0.0, 0.0, None]
    several = replace(QUESTION, objectives=[["Oslo"], ["Ann Lee"]])
    assert answer_in_memory(WHOLE, several) == [0.5, 1.0, None], "the share of the objectives"
    assert answer_in_memory(WHOLE, replace(QUESTION, golden_answers=[])) == [None, None, None]


def test_every_sampled_token_is_priced_dropped_ones_too():
    assert token_price(attempt(turn(0, "", "m", sampled=5, dropped=2), turn(1, "m", "")), QUESTION) == [-7.0, -3.0]


def test_a_turn_earns_every_value_times_its_weight():
    values = {"kept_fact": [1.0, None], "token_price": [-7.0, -3.0]}
    assert weighted(values, {"kept_fact": 0.5, "token_price": 0.01}) == [
        [Measure(name="kept_fact", value=0.5), Measure(name="token_price", value=-0.07)],
        [Measure(name="token_price", value=-0.03)],
    ]


def test_scores_are_compared_with_those_of_the_same_key():
    scores, keys = [1.0, 0.0, None, 4.0, 7.0, 0.5], ["a", "a", "a", "b", "b", "c"]
    assert compared(scores, keys, normalize_std=False) == [0.5, -0.5, 0.0, -1.5, 1.5, 0.5]
    assert compared(scores, keys, normalize_std=False, lone=False) == [0.5, -0.5, 0.0, -1.5, 1.5, 0.0]
    assert compared(scores, keys, normalize_std=True)[3:5] == group_advantages([4.0, 7.0], normalize_std=True)
    assert compared([], [], normalize_std=True) == []


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(0, 3)), max_size=12), st.booleans())
def test_one_key_for_all_is_the_statistic_of_a_group_and_keys_do_not_mix(pairs, normalize_std):
    scores, keys = [score for score, _ in pairs], [key for _, key in pairs]
    whole = group_advantages(scores, normalize_std=normalize_std) if scores else []
    assert compared(scores, [0] * len(scores), normalize_std=normalize_std) == whole
    apart = compared(scores, keys, normalize_std=normalize_std)
    for key in set(keys):
        members = [score for score, own in pairs if own == key]
        expected = group_advantages(members, normalize_std=normalize_std)
        assert [advantage for advantage, own in zip(apart, keys, strict=True) if own == key] == expected


def paid(index: int, *earned: float) -> Context:
    rewards = [Measure(name=f"r{number}", value=value) for number, value in enumerate(earned)]
    return replace(turn(index, "", "m"), turn_rewards=rewards)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_a_turn_adds_its_own_advantage_to_that_of_its_attempt(advantage):
    one = attempt(paid(0, 0.5, 0.25), paid(1, 0.0), paid(2), member=0, reward=1.0)
    two = attempt(paid(0, 0.25), paid(1, 0.5), paid(2, 8.0), member=1, reward=0.0)
    first, second = with_advantages([one, two], AlgorithmConfig(advantage=advantage))
    outcome = group_advantages([1.0, 0.0], normalize_std=advantage == "grpo")
    assert [first.advantage, second.advantage] == outcome
    # turn 0: 0.75 and 0.25, mean 0.5; turn 1: 0 and 0.5, mean 0.25; turn 2: alone, nothing to compare with
    assert [context.advantage for context in first.contexts] == [outcome[0] + 0.25, outcome[0] - 0.25, None]
    assert [context.advantage for context in second.contexts] == [outcome[1] - 0.25, outcome[1] + 0.25, outcome[1]]
    assert [sample.advantage for sample in to_samples(first)] == [outcome[0] + 0.25, outcome[0] - 0.25, outcome[0]]


def one_question(
    name: str, *attempts: list[Context], rewards: list[float], algorithm: AlgorithmConfig
) -> list[Trajectory]:
    played = [
        replace(attempt(*contexts, member=number, reward=reward), id=f"{name}/{number}", group_id=name)
        for number, (contexts, reward) in enumerate(zip(attempts, rewards, strict=True))
    ]
    return with_advantages(played, algorithm)


# Two questions by hand; every context has 3 loss tokens.
#               R     R - mean   (R - mean)/std    turn 0: paid, less mean 0.2    turn 1: paid, less mean 0.25
#   a/0         1     0.5        1                 0.5    0.3                     0      -0.25
#   a/1         0.5   0          0                 -0.1   -0.3                    0.5    0.25         turn 2: nothing
#   a/2         0     -0.5       -1                0.2    0                       -
#   b/0         1     0.5        1/sqrt(2)         nothing is paid; two turns
#   b/1         0     -0.5       -1/sqrt(2)        one turn
OF_TURNS = [0.3, -0.25, -0.3, 0.25, 0.0, 0.0]  # of a: two turns of a/0, three of a/1, one of a/2
OF_ATTEMPTS = {
    "dr_grpo": ([0.5, 0.5, 0.0, 0.0, 0.0, -0.5], [0.5, 0.5, -0.5]),
    "grpo": ([1.0, 1.0, 0.0, 0.0, 0.0, -1.0], [0.5**0.5, 0.5**0.5, -(0.5**0.5)]),
}


@pytest.mark.parametrize("advantage", ["dr_grpo", "grpo"])
def test_advantages_of_turns_and_the_means_of_equation_4_by_hand(advantage):
    algorithm = AlgorithmConfig(advantage=advantage)
    first = one_question(
        "a",
        [paid(0, 0.5), paid(1, 0.0)],
        [paid(0, -0.1), paid(1, 0.25, 0.25), paid(2)],
        [paid(0, 0.2)],
        rewards=[1.0, 0.5, 0.0],
        algorithm=algorithm,
    )
    second = one_question("b", [paid(0), paid(1)], [paid(0)], rewards=[1.0, 0.0], algorithm=algorithm)
    samples = [sample for trajectory in [*first, *second] for sample in to_samples(trajectory)]
    of_a, of_b = OF_ATTEMPTS[advantage]
    by_hand = [*(attempt + turn for attempt, turn in zip(of_a, OF_TURNS, strict=True)), *of_b]
    assert [sample.advantage for sample in samples] == pytest.approx(by_hand, abs=1e-5)
    # Sums of token terms: 3 tokens times the advantages of 6 contexts of a and of 3 of b.
    sum_a, sum_b = {"dr_grpo": (1.5, 1.5), "grpo": (3.0, 3 * 0.5**0.5)}[advantage]
    for aggregation, mean in {"question": (sum_a / 6 + sum_b / 3) / 2, "context": (sum_a + sum_b) / 9}.items():
        ((batch,),) = pack_step(samples, num_ranks=1, max_tokens=99, aggregation=aggregation)
        assert float((batch.weights * batch.advantages).sum()) == pytest.approx(mean, abs=1e-5)


def test_recalls_are_a_case_of_the_same_rule():
    def asked(member: int, *scores: float) -> Trajectory:
        recalls = [
            Recall(context=turn(9, "", ""), step=2, chunk=0, target=["x"], answer="x", score=score) for score in scores
        ]
        return replace(attempt(turn(0, "", "m"), member=member), recalls=recalls)

    attempts = [asked(0, 1.0, 0.0, 0.0, 1.0), asked(1), asked(2, 1.0, 1.0)]
    for over, expected in {
        "rollout": [[0.5, -0.5, -0.5, 0.5], [], [0.0, 0.0]],
        "question": [[1 - 4 / 6, -4 / 6, -4 / 6, 1 - 4 / 6], [], [1 - 4 / 6, 1 - 4 / 6]],
    }.items():
        given_ = with_advantages(attempts, AlgorithmConfig(advantage="dr_grpo", recall_group=over))
        assert [[recall.context.advantage for recall in t.recalls] for t in given_] == [
            pytest.approx(row, rel=1e-15) for row in expected
        ]


def test_rejection_sampling_keeps_what_is_right_and_compares_nothing():
    def asked(member: int, em: float, reward: float, *scores: float) -> Trajectory:
        recalls = [
            Recall(context=turn(9 + place, "", ""), step=2, chunk=0, target=["x"], answer="x", score=score)
            for place, score in enumerate(scores)
        ]
        return replace(attempt(turn(0, "", "m"), member=member, reward=reward), em=em, recalls=recalls)

    algorithm = AlgorithmConfig(advantage="rejection", kl_coef=0.0)
    assert algorithm.skips_zero_advantages, "the learner passes over what is not kept"
    # Two of three objectives right (em 2/3) and a partly right answer (F1 0.8) are not right; the reward is not read.
    attempts = [asked(0, 1.0, 1.5, 1.0, 0.0), asked(1, 2 / 3, 2.0, 1.0), asked(2, 0.0, 0.8), asked(3, 1.0, 0.1)]
    kept = with_advantages(attempts, algorithm)
    assert [each.advantage for each in kept] == [1.0, 0.0, 0.0, 1.0]
    assert [[recall.context.advantage for recall in each.recalls] for each in kept] == [[1.0, 0.0], [1.0], [], []]
    all_right = with_advantages([asked(0, 1.0, 1.0), asked(1, 1.0, 1.0)], algorithm)
    assert [each.advantage for each in all_right] == [1.0, 1.0], "a group that is all right is kept whole"
    samples = [sample for each in kept for sample in to_samples(each)]
    ((batch,),) = pack_step(samples, num_ranks=1, max_tokens=99, aggregation="context")
    # 4 contexts of 3 tokens and 3 recalls of 3: two contexts and two recalls are kept, each with a seventh of the mean.
    assert float((batch.weights * batch.advantages).sum(dtype="float64")) == pytest.approx(3 * 4 / 7, rel=1e-7)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"filter_zero_variance": True}, "filter_zero_variance drops groups whose attempts are all right"),
        (
            {"kl_reward_coef": 0.01},
            r"algorithm.kl_reward_coef is 0.01, but algorithm.advantage rejection does not read",
        ),
    ],
)
def test_rejection_sampling_with_settings_that_would_undo_it_is_refused(setting, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"algorithm": {"advantage": "rejection", **setting}})


def test_equal_outcomes_with_turns_that_differ_are_a_signal():
    def group(*attempts: Trajectory) -> Group:
        return Group(id="q", question=QUESTION, trajectories=with_advantages(attempts, AlgorithmConfig()))

    assert has_signal(group(attempt(paid(0, 1.0)), attempt(paid(0, 0.0), member=1)))
    assert not has_signal(group(attempt(paid(0, 1.0)), attempt(paid(0, 1.0), member=1)))


def test_turns_that_earned_alike_are_no_signal_where_the_answers_of_documents_decide():
    recalled = Recall(context=turn(9, "", ""), step=2, chunk=0, target=["x"], answer="x", score=1.0)
    attempts = [
        replace(attempt(paid(0, of_turn), member=member, reward=0.5 * member), recalls=[recalled])
        for member, of_turn in enumerate([0.25, 0.25])
    ]
    both_wrong = Group(id="q", question=QUESTION, trajectories=with_advantages(attempts, AlgorithmConfig()))
    assert [context.advantage for t in both_wrong.trajectories for context in t.contexts] != [0.0, 0.0]
    assert not has_signal(both_wrong) and has_signal(both_wrong, by="reward")


def test_what_turns_earned_survives_the_stream_and_is_logged_by_name():
    one = attempt(paid(0, 0.5, -0.25), paid(1, 0.25), paid(2), reward=1.0, f1=1.0)
    two = attempt(paid(0, 0.0), member=1, reward=0.1)
    group = Group(id="q", question=QUESTION, trajectories=with_advantages([one, two], AlgorithmConfig()))
    (again,) = table_to_groups(groups_to_table([group]))
    assert again.trajectories[0].contexts[0].turn_rewards == one.contexts[0].turn_rewards
    assert (again.trajectories[0].earned, again.trajectories[1].earned) == (1.5, 0.1)
    metrics = rollout_metrics([again])
    assert (metrics["turn_reward/r0"], metrics["turn_reward/r1"]) == (0.375, -0.125)
    assert metrics["unanswered_reward"] == 0.1


async def played(per_turn: dict[str, float] | str, attempts: list[Trajectory]) -> Group:
    async def rollout(question, *, trajectory_id, group_id, member):
        return replace(attempts[member], id=trajectory_id, group_id=group_id, member=member)

    return await run_group(
        QUESTION,
        rollout,
        group_id="g",
        group_size=len(attempts),
        reward=RewardConfig(per_turn=per_turn),  # pyrefly: ignore[bad-argument-type]
        advantage=AlgorithmConfig(advantage="dr_grpo"),
    )


async def test_a_group_is_played_with_the_rewards_that_the_config_names():
    nothing = attempt(turn(0, "", "nothing", "film", sampled=5), turn(1, "nothing", ""))
    group = await played({"kept_fact": 0.5, "token_price": 0.125}, [WHOLE, nothing])
    keeps, forgets = group.trajectories
    assert [context.turn_reward for context in keeps.contexts] == [0.5 - 0.375, 0.5 - 0.375, -0.25]
    assert [context.turn_reward for context in forgets.contexts] == [-0.625, -0.375]
    assert [context.advantage for context in keeps.contexts] == [0.375, 0.25, 0.0]
    assert [context.advantage for context in forgets.contexts] == [-0.375, -0.25]
    assert [trajectory.reward for trajectory in group.trajectories] == [0.1, 0.1], "the attempt's own stays as it is"


async def test_your_own_function_pays_the_turns(monkeypatch, tmp_path):
    (tmp_path / "turns_paid_here.py").write_text(
        "async def paid(trajectory, question):\n"
        "    return [None if c.index else len(question.golden_answers) for c in trajectory.contexts]\n"
        "def short(trajectory, question):\n    return [1.0]\n"
        "def endless(trajectory, question):\n    return [float('nan')] * len(trajectory.contexts)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    group = await played("turns_paid_here:paid", [WHOLE, WHOLE])
    assert [context.turn_reward for context in group.trajectories[0].contexts] == [2.0, None, None]
    for name, sentence in {
        "short": r"reward.per_turn turns_paid_here:short failed .* it returned 1 values for 3 contexts",
        "endless": "it returned nan; expected finite numbers, or None for a turn without one",
    }.items():
        with pytest.raises(UserCodeError, match=sentence):
            await played(f"turns_paid_here:{name}", [WHOLE, WHOLE])


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ({"per_turn": "kept"}, "reward.per_turn is 'kept'; it is kept_fact, answer_in_memory, token_price, or MODULE"),
        ({"per_turn": "no_such_module:f"}, "reward.per_turn is 'no_such_module:f'|'no_such_module'"),
        ({"per_turn": {"kept_fact": 0}}, "kept_fact has the weight 0; leave it out"),
        ({"per_turn": {"kept_fact": math.inf}}, "reward.per_turn.kept_fact is inf: should be a finite number"),
    ],
)
def test_a_reward_of_turns_that_cannot_be_paid_is_refused(reward, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"reward": reward})


@pytest.mark.parametrize(
    ("override", "weights"),
    [
        ("reward.per_turn=kept_fact", {"kept_fact": 1.0}),
        ("reward.per_turn.token_price=0.001", {"token_price": 0.001}),
        ("reward.per_turn={kept_fact: 0.5, math:atan2: 2}", {"kept_fact": 0.5, "math:atan2": 2.0}),
        ("reward.per_turn={}", {}),
    ],
)
def test_rewards_of_turns_are_named_on_the_command_line(override, weights):
    assert load_config(QUICKSTART, [override]).reward.per_turn == weights


@pytest.mark.parametrize("agent", ["react", "full_text"])
def test_an_agent_with_one_context_has_no_turns_to_pay(agent):
    with pytest.raises(ConfigError, match=f"agent.name '{agent}' has one context for the whole attempt"):
        parse_config({"agent": {"name": agent}, "reward": {"per_turn": "token_price"}})


def rows(unanswered: list[float], f1: list[float]) -> list[dict[str, float]]:
    return [
        {"step": step, "unanswered_reward": pay, "f1": score}
        for step, (pay, score) in enumerate(zip(unanswered, f1, strict=True), start=1)
    ]


FLAT = [0.20, 0.22, 0.18, 0.21, 0.19, 0.22, 0.20, 0.21, 0.19, 0.20, 0.22, 0.19]
RISING = [0.10, 0.11, 0.12, 0.20, 0.28, 0.33, 0.40, 0.44, 0.47, 0.50, 0.51, 0.52]


# A training of the quickstart with one point for every turn that searches: its policy never answers after step 8.
PAID = [1.2, 2.0, 4.9, 5.7, 5.7, 5.6, 5.2, 4.9, 5.8, 5.8, 5.7, 5.8, 5.7, 5.9, 5.7, 5.5, 5.3, 4.4, 3.8, 5.5, 6.0, 5.9]
PAID += [6.0, 5.9, 5.7, 5.8, 5.9, 5.8, 5.8, 5.9]
NO_ANSWERS = [0.16, 0.05, 0.27, 0.21, 0.27, 0.21, 0.13, 0.04, 0.02, 0.01, 0.01, 0.02, 0.0, 0.0, 0.02, 0.01, 0.0, 0.01]
NO_ANSWERS += [0.0] * 6 + [0.01] + [0.0] * 5


def test_an_alarm_is_raised_where_the_policy_learned_within_the_first_steps_to_be_paid_for_form():
    said = form_alarm(rows(PAID, NO_ANSWERS), reward={"per_turn": {"form_rewards:asks": 1.0}})
    assert said is not None and "earned 4.329 in the first 7 steps and 5.829 in the last 7" in said


def test_the_report_raises_an_alarm_where_form_is_rewarded_without_an_answer():
    said = form_alarm(rows(RISING, FLAT), reward={"wrong_answer": 0.1, "per_turn": {"x": 1.0}, "format": "search_r1"})
    assert said == (
        "Form is rewarded without an answer: an attempt without a word of the answer earned 0.110 in the first 3 steps "
        "and 0.510 in the last 3, while F1 went from 0.200 to 0.203. What pays for more than the answer: "
        "reward.per_turn, reward.wrong_answer, reward.format."
    )
    assert alarms(rows(RISING, FLAT), {"reward": {"function": "a:b"}})[0].endswith("the answer: reward.function.")


@pytest.mark.parametrize(
    ("unanswered", "f1"), [(FLAT, FLAT), (RISING, RISING), (FLAT, RISING), (RISING[::-1], FLAT), ([0.1] * 12, FLAT)]
)
def test_there_is_no_alarm_where_answers_rise_too_or_form_earns_no_more(unanswered, f1):
    assert form_alarm(rows(unanswered, f1), reward={}) is None


def test_a_short_training_raises_no_alarm():
    assert form_alarm(rows(RISING[:7], FLAT[:7]), reward={}) is None
    before_training = [{"step": 0, "unanswered_reward": 0.0, "f1": 0.2}] * 4
    assert form_alarm(before_training + rows(RISING[:7], FLAT[:7]), reward={}) is None
