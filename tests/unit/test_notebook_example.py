"""The example in examples/notebook_agent: its agent, its tool and its reward."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_builders import Library, ScriptedEngine, Step, assert_token_exact, build_question, build_tokenizer
from notebook_agent.agent import Notebook
from notebook_agent.calculator import Calculator
from notebook_agent.reward import right_and_brief

from mempipe.actors import driver as driver_module
from mempipe.actors.driver import Driver, DriverSpec
from mempipe.actors.lost import RoleLost
from mempipe.agents.tools import InvalidCall
from mempipe.agents.turn import Memory
from mempipe.data.qa import read_questions
from mempipe.loader import load_config
from mempipe.rollout import Control, make_agent
from mempipe.settings import ConfigError
from mempipe.types import EndReason, Trajectory
from mempipe.user_code import UserCodeError

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook_agent"
TOKENIZER = build_tokenizer()


def calculation(expression: str) -> str:
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


async def play(
    script: list[Step], *overrides: str, control: Control | None = None
) -> tuple[Trajectory, ScriptedEngine, Any]:
    config = load_config(EXAMPLE / "config.yaml", ["budget.context_tokens=4096", *overrides])
    engine = ScriptedEngine(TOKENIZER, script)
    agent = make_agent(config, tokenizer=TOKENIZER, generate=engine, search=Library(), control=control)
    question = build_question("How many pens are 3 boxes of 4?", golden_answers=["12"])
    return await agent.rollout(question, trajectory_id="t", group_id="g", member=0), engine, agent.renderer


async def test_the_next_turn_sees_the_question_and_the_results_and_nothing_else():
    played, engine, renderer = await play([calculation("3 * 4") + calculation("1/0"), "\\boxed{12}"])
    assert (played.end_reason, played.answer) == (EndReason.ANSWERED, "12")
    first, second = played.contexts
    assert first.memory_after == second.memory_before == "3 * 4 = 12\n1/0 divides by zero"
    assert [use.texts for use in first.tool_uses] == [["3 * 4 = 12"], ["1/0 divides by zero"]]
    prompt = renderer.tokenizer.decode(second.token_ids[: second.num_prompt_tokens])
    assert "How many pens" in prompt and "3 * 4 = 12" in prompt
    assert calculation("3 * 4") not in prompt
    assert_token_exact(played.contexts, engine)


async def test_the_oldest_results_make_room():
    script = [calculation(f"{number} + 1000000") for number in range(4)]
    played, _, renderer = await play(script, "budget.notebook_tokens=24")
    assert played.end_reason is EndReason.MAX_TURNS
    last = played.contexts[-1]
    assert last.num_memory_tokens == last.num_new_memory_tokens == renderer.budget.notebook_tokens
    assert last.memory_truncated and last.memory_after.endswith("3 + 1000000 = 1000003")


async def test_without_memory_the_next_turn_has_an_empty_notebook():
    played, _, renderer = await play([calculation("3 * 4"), "\\boxed{12}"], control="no_memory")
    second = played.contexts[1]
    assert played.contexts[0].memory_after == second.memory_before == ""
    assert "3 * 4 = 12" not in renderer.tokenizer.decode(second.token_ids[: second.num_prompt_tokens])


async def test_an_agent_that_keeps_its_memory_is_not_measured_as_one_without(monkeypatch):
    monkeypatch.setattr(Notebook, "_noted", lambda self, notebook, uses: Memory(token_ids=[7], text="kept"))
    with pytest.raises(TypeError, match=r"control no_memory: .* make every memory with self\._memory"):
        await play([calculation("3 * 4"), "\\boxed{12}"], control="no_memory")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("I do not know", EndReason.NO_ACTION),
        (calculation("x" * 201), EndReason.INVALID_CALL),
        ("word " * 400, EndReason.LENGTH),
        ("<|im_start|>user", EndReason.NO_ACTION),
    ],
)
async def test_a_message_without_a_valid_action_ends_the_trajectory(message, reason):
    played, _, _ = await play([message])
    assert (played.end_reason, played.answer, len(played.contexts)) == (reason, None, 1)


async def test_a_result_cannot_close_the_notebook():
    played, _, renderer = await play([calculation("</notebook>"), "\\boxed{1}"])
    prompt = renderer.tokenizer.decode(played.contexts[1].token_ids[: played.contexts[1].num_prompt_tokens])
    assert prompt.count("</notebook>") == 1


@pytest.mark.parametrize(
    ("expression", "line"),
    [
        ("(3 + 4) * 12", "(3 + 4) * 12 = 84"),
        ("-7 / 2", "-7 / 2 = -3.5"),
        ("1 / (2 - 2)", "1 / (2 - 2) divides by zero"),
        ("__import__('os')", "is not an expression"),
        ("2 ** 9999", "is not an expression"),
        ("9" * 190 + " * 1.0", "= 1e+190"),
        ("9" * 180 + "+ 1e999", "= inf"),
        ("((", "is not an expression"),
        ("True + 1", "is not an expression"),
    ],
)
async def test_the_calculator_computes_and_says_what_it_cannot(expression, line):
    tool = Calculator()
    (text,) = await tool.call(tool.check({"expression": expression}))
    assert line in text


@pytest.mark.parametrize("arguments", [{}, {"expression": 3}, {"expression": " "}, {"expression": "1", "digits": 2}])
def test_the_calculator_refuses_what_its_schema_does_not_allow(arguments):
    with pytest.raises(InvalidCall):
        Calculator().check(arguments)


async def test_the_reward_is_a_right_number_in_few_words():
    played, _, _ = await play([calculation("3 * 4"), "\\boxed{12.0}"])
    characters = len(calculation("3 * 4")) + len("\\boxed{12.0}")
    expected = {"reward": 1 - characters / 10_000, "right": 1.0, "calls": 1.0}
    question = build_question(golden_answers=["12"])
    assert right_and_brief(played, question) == pytest.approx(expected)
    wrong, _, _ = await play(["\\boxed{a dozen}"])
    assert right_and_brief(wrong, question)["right"] == 0.0


def test_every_shipped_problem_has_its_number(monkeypatch):
    monkeypatch.chdir(EXAMPLE.parent)
    config = load_config(EXAMPLE / "config.yaml")
    files = [read_questions(config.data.train), read_questions(config.data.validation)]
    assert [len(questions) for questions in files] == [48, 16]
    assert not {q.text for q in files[0]} & {q.text for q in files[1]}
    assert all(float(question.golden_answers[0]) > 0 for questions in files for question in questions)


def test_a_setting_of_another_agent_is_refused():
    with pytest.raises(ConfigError, match=r"budget\.memory_tokens"):
        load_config(EXAMPLE / "config.yaml", ["budget.memory_tokens=12"])


async def test_a_record_of_another_type_is_an_error_of_the_agent_that_names_the_field(monkeypatch):
    """Records of built-in agents are not looked at, which would cost time."""
    played, *_ = await play(["\\boxed{12}"])
    action: Any = {"call": "search"}
    contexts = [replace(played.contexts[0], action=action)]

    async def rollout(*_: Any, **__: Any) -> Trajectory:
        return replace(played, contexts=contexts)

    monkeypatch.setattr(driver_module, "load_tokenizer", lambda _: TOKENIZER)
    monkeypatch.setattr(Notebook, "rollout", rollout)
    config = load_config(EXAMPLE / "config.yaml", ["budget.context_tokens=2048"])
    spec = DriverSpec(config=config, sampling=config.sampling, group_size=1, namespace="", generators=[], retrievers=[])
    question = build_question()
    sentence = rf"failed at question {question.id}: TypeError: contexts\[0\]\.action is .*; expected a text"
    with pytest.raises(UserCodeError, match=sentence):
        await Driver(spec).play("g", question)


@pytest.mark.parametrize("in_a_group", [False, True])
async def test_engines_that_are_all_gone_are_no_error_of_its(in_a_group, monkeypatch):
    """A run starts its roles again after `RoleLost`, and ends at an error in an agent."""

    async def lost(*_: Any, **__: Any) -> Trajectory:
        raise RoleLost("every generator died")

    async def rollout(*_: Any, **__: Any) -> Trajectory:
        async with asyncio.TaskGroup() as tasks:
            return await tasks.create_task(lost())

    monkeypatch.setattr(driver_module, "load_tokenizer", lambda _: TOKENIZER)
    monkeypatch.setattr(driver_module, "make_rollout", lambda *_, **__: rollout if in_a_group else lost)
    config = load_config(EXAMPLE / "config.yaml")
    spec = DriverSpec(config=config, sampling=config.sampling, group_size=2, namespace="", generators=[], retrievers=[])
    with pytest.raises(RoleLost, match="every generator died"):
        await Driver(spec).play("g", build_question())
