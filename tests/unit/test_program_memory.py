"""The agent `program` whose requests state a memory: what its contexts begin with and leave, its limit, and the rates
that are computed from it. Further: who asks, for a memory that lasts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from agent_builders import Library, ScriptedEngine, build_question, build_tokenizer
from openai import AsyncOpenAI
from program_builders import attempt, config_of

from mempipe.agents.program.programs import CommandProgram, FunctionProgram, Program
from mempipe.api.sweep import with_memory
from mempipe.config import RunConfig
from mempipe.evaluation.memory_quality import memory_quality
from mempipe.rollout import make_agent
from mempipe.settings import ConfigError
from mempipe.types import Completion, EndReason, Evidence, Group, Trajectory
from mempipe.user_code import UserCodeError

TOKENIZER = build_tokenizer()
PARIS = Evidence(passage_id="p1", value="Paris")
SEARCH = "<search>capital of France</search>"


def limited(*overrides: str) -> RunConfig:
    return config_of(*overrides, action_tokens=60, context_tokens=2048)


async def play(
    script: list[str],
    program: Callable[..., Any] | Program | None = None,
    *overrides: str,
    memory: str = "",
    user: str = "",
) -> tuple[Trajectory, dict[str, float]]:
    """The attempt and its rates."""
    config, question = limited(*overrides), replace(build_question(evidence=[PARIS]), user=user)
    played, _ = await attempt(script, program, config, TOKENIZER, question=question, memory=memory)
    group = Group(id="g", question=question, trajectories=[played])
    return played, memory_quality([group], memory_budget=config.budget.memory_limit)


async def ask(client: AsyncOpenAI, *texts: str, memory: Any = None) -> str:
    """Asks with the texts as messages of the user and the assistant in turn."""
    messages: Any = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    stated: Any = {} if memory is None else {"metadata": {"memory": memory}}
    reply = await client.chat.completions.create(model="policy", messages=messages, **stated)
    return reply.choices[0].message.content or ""


def memories(played: Trajectory) -> list[tuple[str, str]]:
    return [(context.memory_before, context.memory_after) for context in played.contexts]


async def test_the_notes_of_the_example_are_what_its_contexts_hand_on():
    script = [SEARCH, "its capital is Paris", SEARCH, "its capital is Paris", "<answer>Paris</answer>"]
    played, rates = await play(script)
    paris = "its capital is Paris"
    assert memories(played) == [("known nothing", paris), (paris, paris), (paris, "")]
    assert (rates["found_rate"], rates["kept_rate"], rates["lost_rate"]) == (1.0, 1.0, 0.0)
    first, second, _ = played.contexts
    assert first.num_new_memory_tokens == second.num_memory_tokens == len(TOKENIZER.encode_text(paris))
    assert rates["budget_use"] == pytest.approx(len(TOKENIZER.encode_text(paris)) / 64)
    assert first.num_observation_tokens > 0


async def test_forgetting_is_seen():
    _, rates = await play([SEARCH, "its capital is Paris", SEARCH, "nothing", "<answer>Paris</answer>"])
    assert (rates["kept_rate"], rates["lost_rate"]) == (1.0, 1.0)
    _, rates = await play([SEARCH, "nothing", "<answer>Paris</answer>"])
    assert (rates["kept_rate"], rates["early_answer_rate"]) == (0.0, 1.0)


async def test_an_attempt_that_ends_without_answer_has_lost_nothing():
    played, rates = await play([SEARCH, "its capital is Paris", "hm"])
    assert played.end_reason is EndReason.NO_ACTION
    assert memories(played)[-1] == ("its capital is Paris", "its capital is Paris")
    assert rates["lost_rate"] == 0.0


async def test_a_helpers_context_has_the_memory_of_its_time():
    async def solve(question: str, client: AsyncOpenAI, search: Callable[..., Any]) -> str:
        await ask(client, "m0 plan", memory="m0")
        await search("France")
        await ask(client, "summarise the page")  # a helper, which does not see the memory
        await ask(client, "m1 answer", memory="m1")
        return "Paris"

    played, _ = await play(["a", "b", "c"], solve)
    assert memories(played) == [("m0", "m1"), ("m0", "m1"), ("m1", "")]
    assert [context.num_memory_tokens for context in played.contexts] == [
        len(TOKENIZER.encode_text("m0")),
        0,
        len(TOKENIZER.encode_text("m1")),
    ]


@pytest.mark.parametrize("again", ["m0", None])
async def test_the_same_memory_in_a_further_request_is_no_new_one(again):
    async def solve(question: str, client: AsyncOpenAI, search: Callable[..., Any]) -> str:
        first = await ask(client, "m0", memory="m0")
        await ask(client, "m0", first, "and then?", memory=again)
        await ask(client, "m1", memory="m1")
        return "Paris"

    played, _ = await play(["a", "b", "c"], solve)
    assert memories(played) == [("m0", "m1"), ("m1", "")]


async def test_a_context_may_get_a_new_memory():
    async def solve(question: str, client: AsyncOpenAI, search: Callable[..., Any]) -> str:
        first = await ask(client, "m0", memory="m0")
        second = await ask(client, "m0", first, "now m1", memory="m1")
        await ask(client, "m0", first, "now m1", second, "go", memory="m1")
        return "Paris"

    played, _ = await play(["a", "b", "c"], solve)
    assert memories(played) == [("m0", "m1")]


async def test_a_memory_that_is_no_part_of_the_messages_is_refused():
    async def solve(question: str, client: AsyncOpenAI, search: Callable[..., Any]) -> str:
        return await ask(client, "known: Rome", memory="emoR")

    with pytest.raises(UserCodeError, match=r"metadata\.memory is 'emoR', which is in none of the messages"):
        await play(["a"], solve)


async def test_a_program_that_states_none_is_told():
    async def solve(question: str, client: AsyncOpenAI, search: Callable[..., Any]) -> str:
        await ask(client, "m0")
        return await ask(client, "m1")

    with pytest.raises(UserCodeError, match=r"budget\.memory_tokens is 64, and the attempt is in its second context"):
        await play(["a", "b"], solve)
    played, rates = await play(["a", "b"], solve, "budget.memory_tokens=null")
    assert memories(played) == [("", ""), ("", "")]
    assert not limited("budget.memory_tokens=null").has_memory and "budget_use" not in rates


async def test_a_memory_over_the_limit_is_refused_and_may_be_shortened():
    limits = []

    async def solve(question: str, client: AsyncOpenAI, search: Callable[..., Any], memory_tokens: int) -> str:
        limits.append(memory_tokens)
        notes = "one two three four five six seven eight"
        try:
            await ask(client, notes, memory=notes)
        except Exception as error:
            assert "metadata.memory has" in str(error) and "budget.memory_tokens is 4" in str(error)
            notes = "one"
        return await ask(client, notes, memory=notes)

    played, _ = await play(["Paris"], solve, "budget.memory_tokens=4")
    assert (played.answer, memories(played), limits) == ("Paris", [("one", "")], [4])


async def test_a_memory_over_the_limit_ends_the_attempt():
    async def solve(question: str, client: AsyncOpenAI, search: Callable[..., Any]) -> str:
        await ask(client, "one", memory="one")
        notes = "one two three four five six seven eight"
        return await ask(client, notes, memory=notes)

    played, _ = await play(["go"], solve, "budget.memory_tokens=4")
    assert (played.end_reason, played.answer) == (EndReason.MEMORY_OVERFLOW, None)


@pytest.mark.parametrize("refused", ["memory", "messages"])
async def test_a_limit_that_a_program_has_heeded_is_not_how_its_attempt_ends(refused):
    long = "one two three four five six seven eight"

    async def heeds(question: str, client: AsyncOpenAI, search: Callable[..., Any]) -> str | None:
        with pytest.raises(Exception, match=r"metadata\.memory has|the messages have"):
            await (ask(client, long, memory=long) if refused == "memory" else ask(client, 300 * long, memory="one"))
        if await ask(client, "one", memory="one") == "fail":
            raise RuntimeError("a fault of the program")
        return None

    played, _ = await play(["go"], heeds, "budget.memory_tokens=4")
    assert (played.end_reason, played.answer) == (EndReason.NO_ACTION, None)
    with pytest.raises(UserCodeError, match="a fault of the program"):
        await play(["fail"], heeds, "budget.memory_tokens=4")


async def test_a_limit_is_how_an_attempt_ends_though_an_earlier_request_has_its_reply_later():
    engine, begun, go_on = ScriptedEngine(TOKENIZER, ["go"]), asyncio.Event(), asyncio.Event()

    async def held(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        begun.set()
        await go_on.wait()
        return await engine(token_ids, max_tokens=max_tokens)

    async def asks_both(question: str, client: AsyncOpenAI, search: Callable[..., Any]) -> None:
        first = asyncio.create_task(ask(client, "one", memory="one"))
        await begun.wait()
        with pytest.raises(Exception, match=r"max_turns is 1"):
            await ask(client, "two", memory="two")
        go_on.set()
        assert await first == "go"

    config = limited("budget.memory_tokens=4", "budget.max_turns=1")
    agent = make_agent(config, tokenizer=TOKENIZER, generate=held, search=Library())
    agent.renderer.program = FunctionProgram(asks_both, timeout_s=60)
    played = await agent.rollout(build_question(), trajectory_id="t", group_id="g", member=0)
    assert (played.end_reason, played.answer) == (EndReason.MAX_TURNS, None)


async def test_a_conversation_goes_on_from_its_memory():
    script = ["<answer>Paris</answer>"]
    played, _ = await play(script, memory="its capital is Paris")
    assert memories(played) == [("its capital is Paris", "")]
    assert "notes: its capital is Paris" in TOKENIZER.decode(played.contexts[0].token_ids)


@pytest.mark.parametrize("memory", ["", "its capital"])
async def test_a_command_asks_for_its_memory_and_the_limit(tmp_path, memory):
    (tmp_path / "program.py").write_text(
        "import httpx\nfrom openai import OpenAI\n"
        "client = OpenAI()\n"
        "known = client.get('/memory', cast_to=httpx.Response).json()\n"
        "notes = f'{known}'\n"
        "messages = [{'role': 'user', 'content': notes}]\n"
        "reply = client.chat.completions.create(model='policy', messages=messages, metadata={'memory': notes})\n"
        "print(reply.choices[0].message.content)\n"
    )
    program = CommandProgram([sys.executable, str(tmp_path / "program.py")], timeout_s=60, max_processes=1)
    played, _ = await play(["Paris"], program, memory=memory)
    assert (played.answer, memories(played)) == ("Paris", [(f"{{'memory': '{memory}', 'max_tokens': 64}}", "")])


async def test_a_program_learns_who_asks(tmp_path):
    """For a store that lasts longer than one question."""
    (tmp_path / "program.py").write_text(
        "import httpx\nfrom openai import OpenAI\n"
        "client = OpenAI()\n"
        "user = client.get('/user', cast_to=httpx.Response).json()['user']\n"
        "messages = [{'role': 'user', 'content': f'I am {user}'}]\n"
        "said = client.chat.completions.create(model='policy', messages=messages, metadata={'memory': ''})\n"
        "print(f'<{user}>')\n"
    )
    command = CommandProgram([sys.executable, str(tmp_path / "program.py")], timeout_s=60, max_processes=1)

    async def function(question: str, client: AsyncOpenAI, search: Any, *, user: str) -> str:
        await ask(client, f"I am {user}", memory="")
        return f"<{user}>"

    for program, user in ((command, "ann/7"), (function, "ann/7"), (function, "")):
        played, _ = await play(["yes"], program, user=user)
        assert played.answer == f"<{user}>"
        assert f"I am {user}" in TOKENIZER.decode(played.contexts[0].token_ids)


def test_its_budget_can_be_swept():
    config = limited()
    assert with_memory(config, 16).budget.memory_limit == 16
    with pytest.raises(ConfigError, match="no memory budget to sweep"):
        with_memory(limited("budget.memory_tokens=null"), 16)


async def test_a_request_that_is_given_up_states_no_memory():
    async def solve(question: str, client: AsyncOpenAI, search: Callable[..., Any]) -> str:
        first = await ask(client, "m0", memory="m0")
        for texts in (["m1 wrong"], ["m0", first, "m1 wrong"]):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(client, *texts, memory="m1 wrong"), 0.05)
        await ask(client, "m2", memory="m2")
        return "Paris"

    config, script = limited(), ScriptedEngine(TOKENIZER, ["a", "b"])

    async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        if "wrong" in TOKENIZER.decode(token_ids):
            await asyncio.sleep(60)
        return await script(token_ids, max_tokens=max_tokens)

    agent = make_agent(config, tokenizer=TOKENIZER, generate=generate, search=Library())
    agent.renderer.program = FunctionProgram(solve, timeout_s=60)
    played = await agent.rollout(build_question(), trajectory_id="t", group_id="g", member=0)
    assert memories(played) == [("m0", "m2"), ("m2", "")]
