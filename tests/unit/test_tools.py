"""Tools of the user's own: what the policy reads of them, which calls are valid, what comes back, and who is told when
one fails.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from agent_builders import (
    Library,
    ScriptedEngine,
    Step,
    assert_token_exact,
    build_question,
    build_tokenizer,
    injected_text,
)

from mempipe.agents.protocol import GenerateFn
from mempipe.agents.tools import InvalidCall, SearchTool, Toolbox, load_tools
from mempipe.faults import InfrastructureFault
from mempipe.loader import parse_config
from mempipe.rollout import make_agent
from mempipe.settings import ConfigError
from mempipe.types import Completion, EndReason, Question, SearchResult, Trajectory
from mempipe.user_code import UserCodeError

TOKENIZER = build_tokenizer()
CODE = """
from mempipe.agents.tools import InvalidCall
from mempipe.faults import InfrastructureFault

class City:
    name = "population"

    def schema(self):
        return {"name": "population", "description": "People of a city.", "parameters": {"type": "object"}}

    def check(self, arguments):
        if set(arguments) != {"city"}:
            raise InvalidCall("the one argument is city")
        return arguments["city"].title()

    async def call(self, city):
        if city == "Atlantis":
            raise InfrastructureFault("the register is down")
        if city == "Nowhere":
            raise KeyError(city)
        if city == "Odd":
            return [7]
        return city if city == "Bare" else [f"{city}: 2 million", "counted in 2020"]

class Namesake(City):
    name = "wikipedia_search"

class NoTool:
    name = "nothing"

def broken():
    raise OSError("no register")
"""
NOTES = """
from contextlib import asynccontextmanager
from mempipe.faults import InfrastructureFault

EVENTS = []

class Notes:
    def __init__(self, notes=None):
        self.notes = notes

    def schema(self):
        return {"name": self.name, "description": "Notes.", "parameters": {"type": "object"}}

    def check(self, arguments):
        return arguments.get("text", "")

    @asynccontextmanager
    async def attempt(self, attempt):
        if attempt.question.id == "odd":
            raise KeyError("no notes for it")
        EVENTS.append(f"{self.name} starts")
        try:
            yield type(self)(attempt.shared.setdefault("notes", []))
        except BaseException:
            pass  # nobody may hide the error of an attempt
        EVENTS.append(f"{self.name} ends")
        if "unreadable" in attempt.shared["notes"]:
            raise OSError("the notes cannot be kept")

class Write(Notes):
    name = "write"

    async def call(self, text):
        if text == "full":
            raise InfrastructureFault("the store is full")
        self.notes.append(text)
        return [f"{len(self.notes)} notes"]

class Read(Notes):
    name = "read"

    async def call(self, text):
        return list(self.notes)

class NoContext(Write):
    def attempt(self, attempt):
        return self

KEPT = {}

class Remember(Write):
    @asynccontextmanager
    async def attempt(self, attempt):
        notes = list(KEPT.get(attempt.question.user, []))
        yield Remember(notes)
        if attempt.error is None:
            KEPT[attempt.question.user] = notes
        else:
            EVENTS.append(repr(attempt.error))

class Upset(Read):
    name = "upset"

    @asynccontextmanager
    async def attempt(self, attempt):
        yield self
        raise OSError("it cannot end")

class Slow(Notes):
    name = "slow"

    async def call(self, text):
        import asyncio

        try:
            await asyncio.sleep(600)
            EVENTS.append("slow writes")
        except asyncio.CancelledError:
            EVENTS.append("slow gives up")
            raise
        return []
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "city_tools.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "city_tools"
    sys.modules.pop("city_tools", None)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(module: str, script: list[Step], **budget: Any) -> tuple[Trajectory, ScriptedEngine, Any]:
    """MemSearcher with the tool beside its search."""
    config = parse_config({"agent": {"tools": [f"{module}:City"]}, "budget": budget})
    engine = ScriptedEngine(TOKENIZER, script)
    agent = make_agent(config, tokenizer=TOKENIZER, generate=engine, search=Library())
    return await agent.rollout(build_question(), trajectory_id="t", group_id="g", member=0), engine, agent.renderer


def test_the_policy_reads_the_schema_of_every_tool(module):
    tools = load_tools([f"{module}:City"])
    search = SearchTool(name="search", num_passages=3, max_passages=5, max_query_chars=100)
    lines = [json.loads(line) for line in Toolbox(search=search, own=tools).schemas().splitlines()]
    assert [line["function"]["name"] for line in lines] == ["search", "population"]
    assert all(line["type"] == "function" for line in lines)
    assert [json.loads(line)["function"]["name"] for line in Toolbox(own=tools).schemas().splitlines()] == [
        "population"
    ]


def test_arguments_are_what_the_tool_makes_of_them(module):
    toolbox = Toolbox(own=load_tools([f"{module}:City"]))
    parsed = toolbox.parse('{"name": "population", "arguments": {"city": "paris"}}')
    assert (parsed.tool, parsed.arguments) == ("population", "Paris")
    for text, word in [
        ('{"name": "population", "arguments": {"town": "paris"}}', "the one argument is city"),
        ('{"name": "search", "arguments": {"query": "paris"}}', "names none of population"),
        ('{"name": "population", "arguments": "paris"}', "not an object"),
    ]:
        with pytest.raises(InvalidCall, match=word):
            toolbox.parse(text)


def test_a_check_that_fails_in_another_way_names_the_users_file(module):
    toolbox = Toolbox(own=load_tools([f"{module}:City"]))
    with pytest.raises(UserCodeError, match=r"failed to check .*AttributeError.*city_tools.py, line 14"):
        toolbox.parse('{"name": "population", "arguments": {"city": 7}}')


async def test_the_texts_of_a_call_are_observed_beside_the_passages_of_a_search(module):
    both = "I ask.</think>" + call("population", city="paris") + call("wikipedia_search", query="France")
    script = [both, "<memory>2 million</memory>", "so</think>\\boxed{2 million}"]
    played, engine, renderer = await play(module, script)
    assert (played.end_reason, played.answer) == (EndReason.ANSWERED, "2 million")
    first = played.contexts[0]
    (use,) = first.tool_uses
    assert (use.tool, use.texts) == ("population", ["Paris: 2 million", "counted in 2020"])
    assert json.loads(use.arguments)["arguments"] == {"city": "paris"}
    assert [search.query for search in first.searches] == ["France"]
    shown = injected_text(renderer, first)
    assert shown.index("Paris: 2 million") < shown.index("counted in 2020") < shown.index("Paris is the capital")
    assert 0 < first.num_observation_tokens <= renderer.budget.observation_tokens
    assert_token_exact(played.contexts, engine)


async def test_half_a_character_in_a_result_is_replaced(module):
    (tool,) = load_tools([f"{module}:City"]).values()

    async def cut(city: str) -> list[str]:
        return [f"{city} \ud83d"]

    tool.call = cut
    toolbox = Toolbox(own={tool.name: tool})
    use = await toolbox.use(toolbox.parse('{"name": "population", "arguments": {"city": "rome"}}'))
    assert use.texts == ["Rome \ufffd"]


async def test_calls_of_one_message_are_made_at_the_same_time(module):
    (tool,) = load_tools([f"{module}:City"]).values()
    waiting = asyncio.Barrier(2)

    async def meets(city: str) -> list[str]:
        async with asyncio.timeout(60), waiting:
            return [city]

    tool.call = meets
    toolbox = Toolbox(own={tool.name: tool})
    calls = [toolbox.parse(json.dumps({"name": tool.name, "arguments": {"city": city}})) for city in ("rome", "oslo")]
    assert [use.texts for use in await asyncio.gather(*map(toolbox.use, calls))] == [["Rome"], ["Oslo"]]


async def test_an_invalid_call_ends_the_trajectory(module):
    played, _, _ = await play(module, ["x</think>" + call("population", town="paris")])
    assert (played.end_reason, played.answer) == (EndReason.INVALID_CALL, None)


async def test_a_fault_of_the_machinery_passes_to_whoever_tries_again(module):
    with pytest.raises(InfrastructureFault, match="the register is down"):
        await play(module, ["x</think>" + call("population", city="atlantis")])


async def test_a_fault_among_the_calls_of_a_task_group_passes_too(module):
    (tool,) = load_tools([f"{module}:City"]).values()
    call_city = tool.call

    async def both(city: str) -> list[str]:
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(call_city(each)) for each in ("Rome", city)]
        return [text for each in found for text in each.result()]

    tool.call = both
    toolbox = Toolbox(own={tool.name: tool})
    with pytest.raises(InfrastructureFault, match="the register is down"):
        await toolbox.use(toolbox.parse('{"name": "population", "arguments": {"city": "atlantis"}}'))


@pytest.mark.parametrize(
    ("city", "words"),
    [
        ("nowhere", r"KeyError: 'Nowhere' \(.*city_tools.py, line 20\)"),
        ("odd", "TypeError: it returned 7"),
        ("bare", "it returned the text 'Bare'; expected a list"),
    ],
)
async def test_an_error_of_a_tool_is_no_observation_and_names_the_users_file(module, city, words):
    with pytest.raises(UserCodeError, match=f"agent.tools: population failed for the call .*{words}"):
        await play(module, ["x</think>" + call("population", city=city)])


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("Namesake", ConfigError, "'wikipedia_search', which another tool is called"),
        ("NoTool", ConfigError, "has no schema, check, call"),
        ("Missing", ConfigError, "has no Missing"),
        ("broken", UserCodeError, r"cannot be made: OSError: no register \(.*city_tools.py, line 32\)"),
    ],
)
def test_what_is_no_tool_is_refused_before_anything_starts(module, name, kind, words):
    with pytest.raises(kind, match=words):
        load_tools([f"{module}:{name}"], taken=["wikipedia_search"])


@pytest.fixture
def notes(tmp_path, monkeypatch):
    (tmp_path / "notes_tools.py").write_text(NOTES)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("notes_tools")
    sys.modules.pop("notes_tools", None)


async def play_with_notes(
    script: list[Step], *, question: Question | None = None, generate: GenerateFn | None = None
) -> Trajectory:
    config = parse_config({"agent": {"tools": ["notes_tools:Write", "notes_tools:Read"]}})
    engine = ScriptedEngine(TOKENIZER, script)
    agent = make_agent(config, tokenizer=TOKENIZER, generate=generate or engine, search=Library())
    played = await agent.rollout(question or build_question(), trajectory_id="t", group_id="g", member=0)
    assert_token_exact(played.contexts, engine)
    return played


def noting(text: str) -> list[Step]:
    """Writes a note, keeps no memory of it, reads all notes, and answers."""
    return [
        "I note.</think>" + call("write", text=text),
        "<memory>see the notes</memory>",
        "I look.</think>" + call("read"),
        "<memory>done</memory>",
        "so</think>\\boxed{Paris}",
    ]


async def test_tools_share_a_state_that_belongs_to_one_attempt(notes):
    """A store outside the memory: what one tool writes another one reads turns later, and no other attempt does."""
    played = await asyncio.gather(*(play_with_notes(noting(text)) for text in ("Paris", "Rome")))
    assert [each.end_reason for each in played] == [EndReason.ANSWERED] * 2
    read = [[use.texts for context in each.contexts for use in context.tool_uses] for each in played]
    assert read == [[["1 notes"], ["Paris"]], [["1 notes"], ["Rome"]]]
    assert sorted(notes.EVENTS) == sorted(["write starts", "read starts", "read ends", "write ends"] * 2)


@pytest.mark.parametrize("fault", [RuntimeError("the engine is gone"), asyncio.CancelledError("hung up")])
async def test_a_tool_ends_with_an_attempt_that_fails_and_hides_no_fault(notes, fault):
    async def fails(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        raise fault

    with pytest.raises(type(fault), match=str(fault)):
        await play_with_notes([], generate=fails)
    assert notes.EVENTS == ["write starts", "read starts", "read ends", "write ends"]


async def test_a_tool_ends_with_an_attempt_in_which_another_one_has_a_fault(notes):
    with pytest.raises(InfrastructureFault, match="the store is full"):
        await play_with_notes(["x</think>" + call("write", text="full")])
    assert notes.EVENTS == ["write starts", "read starts", "read ends", "write ends"]


@pytest.mark.parametrize("kind", ["write", "wikipedia_search"])
async def test_calls_that_run_when_another_one_fails_are_given_up_before_their_tools_end(notes, kind):
    async def fails(query: str, *, num_passages: int, partition: str) -> SearchResult:
        raise InfrastructureFault("the store is full")

    config = parse_config({"agent": {"tools": ["notes_tools:Write", "notes_tools:Slow"]}})
    failing = call("write", text="full") if kind == "write" else call(kind, query="full")
    engine = ScriptedEngine(TOKENIZER, ["x</think>" + call("slow") + failing])
    agent = make_agent(config, tokenizer=TOKENIZER, generate=engine, search=fails)
    with pytest.raises(InfrastructureFault, match="the store is full"):
        await agent.rollout(build_question(), trajectory_id="t", group_id="g", member=0)
    assert notes.EVENTS == ["write starts", "slow starts", "slow gives up", "slow ends", "write ends"]


async def test_errors_of_a_state_name_the_users_file(notes):
    with pytest.raises(
        UserCodeError, match=r"write failed to start for question odd: KeyError.*notes_tools.py, line 20"
    ):
        await play_with_notes([], question=replace(build_question(), id="odd"))
    with pytest.raises(UserCodeError, match=r"write failed to end: OSError: the notes cannot be kept .*line 28"):
        await play_with_notes(noting("unreadable"))
    toolbox = Toolbox(own=load_tools(["notes_tools:NoContext"]))
    with pytest.raises(UserCodeError, match=r"write failed to start .*not an asynchronous context manager"):
        async with toolbox.attempt(build_question()):
            pass


async def test_a_state_is_not_shared_by_mistake(notes):
    toolbox = Toolbox(own=load_tools(["notes_tools:Write"]))
    write = toolbox.parse('{"name": "write", "arguments": {"text": "a"}}')
    with pytest.raises(UserCodeError, match=r"write failed for the call .*it has a state for each attempt"):
        await toolbox.use(write)
    async with toolbox.attempt(build_question()) as tools:
        assert (await tools.use(write)).texts == ["1 notes"]


async def remember(text: str, *, user: str, error: BaseException | None = None, more: Sequence[str] = ()) -> None:
    """Notes a text in an attempt at a question of `user`, which `error` may break off."""
    toolbox = Toolbox(own=load_tools(["notes_tools:Remember", *more]))
    async with toolbox.attempt(replace(build_question(), user=user)) as tools:
        await tools.use(tools.parse(json.dumps({"name": "write", "arguments": {"text": text}})))
        if error is not None:
            raise error


async def test_a_store_outlives_its_attempts_with_a_part_for_each_user(notes):
    await remember("likes tea", user="ann")
    await remember("likes rain", user="bob")
    await remember("has a dog", user="ann")
    assert notes.KEPT == {"ann": ["likes tea", "has a dog"], "bob": ["likes rain"]}


@pytest.mark.parametrize("error", [InfrastructureFault("the engine is gone"), asyncio.CancelledError("hung up")])
async def test_a_tool_is_told_what_broke_its_attempt_off(notes, error):
    """Such an attempt is played again or never answered, so a store that lasts must not have it."""
    with pytest.raises(type(error)):
        await remember("likes tea", user="ann", error=error)
    assert ({}, [repr(error)]) == (notes.KEPT, notes.EVENTS)


async def test_a_tool_is_told_that_another_one_could_not_end_or_start(notes):
    with pytest.raises(UserCodeError, match="it cannot end"):
        await remember("likes tea", user="ann", more=["notes_tools:Upset"])
    toolbox = Toolbox(own=load_tools(["notes_tools:Remember", "notes_tools:Read"]))
    with pytest.raises(UserCodeError, match="no notes for it"):
        async with toolbox.attempt(replace(build_question(), id="odd", user="ann")):
            pass
    assert notes.KEPT == {}
    assert ["it cannot end" in notes.EVENTS[0], "no notes for it" in notes.EVENTS[1]] == [True, True]
