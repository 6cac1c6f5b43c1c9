"""Rewards and agents of the user's own: what they return, and what is said when they fail."""

from __future__ import annotations

import re
import sys

import pytest
from agent_builders import build_question

from mempipe.faults import InfrastructureFault
from mempipe.rl.config import AlgorithmConfig, RewardConfig
from mempipe.rollout import run_group
from mempipe.settings import ConfigError
from mempipe.types import EndReason, Measure, Trajectory
from mempipe.user_code import UserCodeError, import_user_module, load_user_object, user_code

CODE = """
import asyncio
import math

def number(trajectory, question):
    return 0.25

def mapping(trajectory, question):
    return {"reward": trajectory.member, "length": len(question.text)}

async def later(trajectory, question):
    await asyncio.sleep(0)
    return 0.5

def broken(trajectory, question):
    return 1 / 0

def endless(trajectory, question):
    return math.inf

def nameless(trajectory, question):
    return {"score": 1}

def words(trajectory, question):
    return "much"
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(CODE)
    (tmp_path / "broken_module.py").write_text("x = 1\nundefined_name\n")
    (tmp_path / "needy_module.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_rewards"
    for name in ("own_rewards", "broken_module", "needy_module"):
        sys.modules.pop(name, None)


async def rollout(question, *, trajectory_id, group_id, member):
    return Trajectory(
        id=trajectory_id, group_id=group_id, member=member, contexts=[], end_reason=EndReason.ANSWERED, answer="Paris"
    )


async def group(function: str):
    return await run_group(
        build_question(),
        rollout,
        group_id="g",
        group_size=2,
        reward=RewardConfig(function=function),
        advantage=AlgorithmConfig(),
    )


async def test_a_reward_of_ones_own_is_optimised_and_exact_match_still_measured(rewards):
    scored = await group(f"{rewards}:number")
    assert [(t.reward, t.em, t.measures) for t in scored.trajectories] == [(0.25, 1.0, [])] * 2


async def test_further_numbers_are_measures(rewards):
    scored = await group(f"{rewards}:mapping")
    assert [t.reward for t in scored.trajectories] == [0.0, 1.0]
    assert scored.trajectories[0].measures == [Measure(name="length", value=float(len(build_question().text)))]
    assert scored.trajectories[0].advantage == -scored.trajectories[1].advantage < 0


async def test_a_reward_may_be_awaited(rewards):
    assert [t.reward for t in (await group(f"{rewards}:later")).trajectories] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("broken", ["ZeroDivisionError", "own_rewards.py, line 16", "trajectory g/0", "question q-1"]),
        ("endless", ["reward inf"]),
        ("nameless", ["'reward'"]),
        ("words", ["could not convert", "much"]),
    ],
)
async def test_a_reward_that_fails_ends_the_run_and_names_the_file(rewards, function, words):
    with pytest.raises(UserCodeError) as error:
        await group(f"{rewards}:{function}")
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("own_rewards", "expected MODULE:NAME"),
        ("own_rewards:nothing", "has no nothing"),
        ("nowhere.rewards:f", "cannot be imported"),
        ("needy_module:f", "'surely_not_installed', which is not installed"),
        ("broken_module:f", "NameError.*broken_module.py, line 2"),
    ],
)
def test_what_cannot_be_loaded_is_a_config_error_that_names_the_setting(rewards, path, words):
    with pytest.raises(ConfigError, match=f"reward.function is .*{words}"):
        load_user_object(path, setting="reward.function")


@pytest.mark.parametrize(
    ("code", "takes"),
    [
        ("def f(trajectory, question): ...", ""),
        ("def f(*everything): ...", ""),
        ("def f(trajectory, question, strict=False): ...", ""),
        ("f = max", ""),
        ("def f(completions, **columns): ...", "(completions, **columns)"),
        ("def f(source, solution, truth, extra=None): ...", "(source, solution, truth, extra=None)"),
    ],
)
@pytest.mark.parametrize("setting", ["function", "per_turn"])
def test_a_reward_that_takes_other_arguments_is_refused_before_anything_starts(
    tmp_path, monkeypatch, code, takes, setting
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "arguments_of_others", raising=False)
    (tmp_path / "arguments_of_others.py").write_text(code)
    path = "arguments_of_others:f"
    try:
        if not takes:
            assert path in getattr(RewardConfig.model_validate({setting: path}), setting)
            return
        said = rf"reward\.{setting} is '{path}', which takes {re.escape(takes)}; it must take a trajectory"
        with pytest.raises(ValueError, match=said):
            RewardConfig.model_validate({setting: path})
    finally:
        sys.modules.pop("arguments_of_others", None)


def test_faults_of_the_machinery_pass():
    with pytest.raises(InfrastructureFault), user_code("own"):
        raise InfrastructureFault("the network")
    with pytest.raises(KeyError), user_code("own", passing=(KeyError,)):
        raise KeyError("known")


def test_a_module_is_imported_by_its_name():
    assert import_user_module("json", setting="agent.name").loads("1") == 1


def test_an_error_of_a_library_names_the_users_line_that_called_it(tmp_path, monkeypatch):
    (tmp_path / "calls_a_library.py").write_text("import json\n\ndef broken():\n    return json.loads('{')\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = load_user_object("calls_a_library:broken", setting="reward.function")
    with pytest.raises(UserCodeError, match=r"JSONDecodeError.*calls_a_library\.py, line 4\)"), user_code("it failed"):
        broken()
