"""A bounded memory keeps the context bounded over 20 hops, where a full history grows without end."""

from __future__ import annotations

import pytest

from benchmarks import turn_seconds
from benchmarks.context_growth import AGENTS, NUM_NOTED, play
from mempipe.data.scripted_agents import parse_facts
from mempipe.evaluation.rollout_metrics import context_tokens_by_turn
from mempipe.types import EndReason

SEEDS = (1, 2)


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    return play(tmp_path_factory.mktemp("long"), seeds=SEEDS, num_hops=20)


@pytest.mark.parametrize("agent", AGENTS)
def test_twenty_hops_are_answered_right(attempts, agent):
    assert len(attempts[agent]) == len(SEEDS)
    for trajectory in attempts[agent]:
        assert trajectory.end_reason is EndReason.ANSWERED
        assert trajectory.answer is not None
        assert len(context_tokens_by_turn(trajectory, growing=agent == "react")) == 21
    answers = {
        agent: [(trajectory.answer or "").strip() for trajectory in trajectories]
        for agent, trajectories in attempts.items()
    }
    assert answers[agent] == answers["memsearcher"]


def test_the_context_of_memsearcher_is_at_turn_20_what_it_was_at_turn_5(attempts):
    for trajectory in attempts["memsearcher"]:
        tokens = context_tokens_by_turn(trajectory, growing=False)
        assert tokens[19] <= 1.1 * tokens[4]
        assert len(parse_facts(trajectory.contexts[19].memory_before)) == NUM_NOTED


def test_the_context_of_react_has_grown_threefold_by_then(attempts):
    for trajectory in attempts["react"]:
        tokens = context_tokens_by_turn(trajectory, growing=True)
        assert tokens[19] >= 3 * tokens[4]
        assert tokens == sorted(tokens)


@pytest.mark.parametrize("agent", turn_seconds.AGENTS)
def test_the_benchmark_of_turns_reads_and_writes_what_the_agents_did(attempts, agent):
    for trajectory in attempts[agent]:
        growing = agent == "react"
        turns = turn_seconds.calls_of_turns(trajectory, growing=growing)
        ends = [len(calls[-1].prompt) + calls[-1].num_tokens for calls in turns]
        assert ends == context_tokens_by_turn(trajectory, growing=growing)[: turn_seconds.NUM_TURNS]
        assert [len(calls) for calls in turns] == [1 if growing else 2] * turn_seconds.NUM_TURNS
        whole = list(trajectory.contexts[-1].token_ids)
        assert not growing or all(call.prompt == whole[: len(call.prompt)] for (call,) in turns)
