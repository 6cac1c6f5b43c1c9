"""One policy for several memory budgets: every group of a training draws one, and is told which."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from agent_builders import Library, ScriptedEngine, build_question, build_tokenizer

from mempipe.agents.budget import MemoryBudget
from mempipe.agents.memsearcher import MemSearcherPrompts
from mempipe.agents.prompt_set import BUILT_IN, load_prompts
from mempipe.config import RunConfig
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.evaluation.suite import EvaluatedRun, run_config
from mempipe.loader import parse_config
from mempipe.rollout import budget_variants, make_gold_logprobs, make_renderer, make_rollout
from mempipe.settings import ConfigError
from mempipe.types import Trajectory
from pipelines.demonstrations import demonstrations

CHOICES = [2, 4, 8]
SEARCH = 'look</think><tool_call>{"name": "wikipedia_search", "arguments": {"query": "q"}}</tool_call>'
MEMORY = "<memory>one two three four five six seven eight nine ten eleven twelve</memory>"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    texts = yaml.safe_load((BUILT_IN / "memsearcher.yaml").read_text())
    texts["memory_prefill"] = ""
    texts["system"] += " Your memory holds {memory_tokens} tokens."
    (tmp_path / "prompts.yaml").write_text(yaml.safe_dump(texts))
    return parse_config(
        {
            "agent": {"prompts": str(tmp_path / "prompts.yaml")},
            "budget": {"memory_tokens": 8, "memory_message_tokens": 200, "memory_choices": CHOICES},
            "model": {"path": "m"},
        }
    )


async def play(config: RunConfig, group_id: str, *, training: bool) -> tuple[int, Trajectory]:
    """The limit that the policy was told, and its attempt."""
    tokenizer = build_tokenizer()
    engine = ScriptedEngine(tokenizer, [SEARCH, MEMORY, "so</think>\\boxed{Paris}"])
    rollout = make_rollout(config, tokenizer=tokenizer, generate=engine, search=Library(), training=training)
    trajectory = await rollout(build_question(), trajectory_id=f"{group_id}/0", group_id=group_id, member=0)
    told = re.search(r"Your memory holds (\d+) tokens", tokenizer.decode(engine.prompts[0]))
    assert told is not None
    return int(told[1]), trajectory


async def test_a_group_is_told_the_limit_that_its_memories_are_cut_to(config):
    limits = set()
    for number in range(12):
        told, trajectory = await play(config, f"0/q{number}", training=True)
        assert trajectory.contexts[0].num_new_memory_tokens == told and trajectory.contexts[0].memory_truncated
        limits.add(told)
    assert limits == set(CHOICES)


async def test_the_information_gain_is_asked_under_the_limit_of_the_group(config):
    tokenizer, asked = build_tokenizer(), []

    async def score(token_ids: Sequence[int]) -> list[float]:
        asked.append(tokenizer.decode(token_ids))
        return [0.0] * (len(token_ids) - 1)

    gold_logprobs = make_gold_logprobs(config, tokenizer=tokenizer, score=score)
    for group in (f"0/q{number}" for number in range(12)):
        told, _ = await play(config, group, training=True)
        for memory in ("", "one two"):
            await gold_logprobs(build_question(), memory, group_id=group)
            assert f"Your memory holds {told} tokens" in asked[-1]


async def test_a_group_that_is_played_again_has_the_same_limit_and_another_seed_draws_anew(config):
    groups = [f"0/q{number}" for number in range(12)]
    drawn = [(await play(config, group, training=True))[0] for group in groups]
    again = [(await play(config, group, training=True))[0] for group in groups]
    other = [(await play(config.model_copy(update={"seed": 2}), group, training=True))[0] for group in groups]
    assert drawn == again != other


async def test_an_evaluation_has_the_limit_that_its_config_names(config):
    assert {(await play(config, group, training=False))[0] for group in "abcdefgh"} == {8}
    settings = config.model_dump(mode="json", include={"agent", "budget", "model"})
    settings["budget"]["memory_tokens"] = 2
    measured = run_config(EvaluatedRun(name="a", settings=settings))
    told, trajectory = await play(measured, "g", training=False)
    assert told == 2 == trajectory.contexts[0].num_new_memory_tokens


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"memory_tokens": 4, "memory_choices": [4, 8]}, r"memory_choices is \[4, 8\], but budget.memory_tokens 4"),
        ({"memory_tokens": 8, "memory_choices": [8, 8]}, "every limit occurs in it once"),
        ({"memory_choices": [0]}, "memory_choices.0 is 0"),
    ],
)
def test_choices_that_cannot_work_are_refused(budget, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"budget": budget})


def test_a_limit_that_no_prompt_states_is_refused(config):
    silent = config.model_copy(update={"agent": config.agent.model_copy(update={"prompts": ""})})
    with pytest.raises(ConfigError, match=r"no text of agent.prompts 'memsearcher' says which"):
        make_renderer(silent, tokenizer=build_tokenizer())
    assert "{memory_tokens}" in load_prompts(config.agent.prompts, MemSearcherPrompts).system


@pytest.mark.parametrize(("agent", "prompts"), [("memsearcher", "memsearcher_limit"), ("memagent", "memagent_limit")])
def test_a_shipped_set_states_the_limit(agent, prompts):
    budget = {"memory_tokens": 512, "memory_choices": [128, 512]}
    config = parse_config({"agent": {"name": agent, "prompts": prompts}, "budget": budget})
    for variant, limit in zip(budget_variants(config), (128, 512), strict=True):
        kind = variant.agent_spec.prompts
        assert kind is not None and isinstance(variant.budget, MemoryBudget)
        texts = dataclasses.asdict(load_prompts(prompts, kind, memory=variant.budget))
        assert any(f"in at most {limit} tokens" in text for text in texts.values())
        make_renderer(variant, tokenizer=build_tokenizer())


@pytest.mark.slow
def test_demonstrations_keep_to_the_limit_that_their_prompt_states(world):
    changes = {
        "agent": {"prompts": "tiny_limit"},
        "budget": {"memory_tokens": 32, "memory_choices": [8, 16, 32]},
        "warm_start": {"num_clean_trajectories": 48, "num_noisy_trajectories": 0, "num_held_out": 0},
    }
    sections = {name: getattr(world, name).model_copy(update=values) for name, values in changes.items()}
    config = world.model_copy(update=sections)
    tokenizer = load_tokenizer(config.model.path)
    longest = dict.fromkeys((8, 16, 32), 0)
    for group in demonstrations(config).clean:
        for context in group.trajectories[0].contexts:
            told = re.search(r"\n(\d+)\n<memory>", tokenizer.decode(context.token_ids[: context.num_prompt_tokens]))
            assert told is not None and context.num_new_memory_tokens <= int(told[1])
            longest[int(told[1])] = max(longest[int(told[1])], context.num_new_memory_tokens)
    assert 0 < longest[8] < longest[16] and longest[32] > 8, "each limit is drawn, and a larger memory holds more"
