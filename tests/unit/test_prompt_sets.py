"""The shipped prompt sets: no text of theirs, echoed by the policy, is an action of the agent that reads it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
import yaml
from agent_builders import CALL, Library, ScriptedEngine, build_question, build_tokenizer

from mempipe.agents.budget import MemoryBudget
from mempipe.agents.memsearcher import MemSearcherPrompts
from mempipe.agents.prompt_set import BUILT_IN as PROMPTS
from mempipe.agents.prompt_set import load_prompts, split_slots
from mempipe.agents.protocol import UnfitQuestion, parse_answer, parse_memory
from mempipe.agents.react import ReactPrompts
from mempipe.agents.registry import BUILT_IN as AGENTS
from mempipe.agents.registry import agent_spec
from mempipe.loader import parse_config
from mempipe.rollout import make_agent, make_renderer
from mempipe.settings import ConfigError
from mempipe.types import EndReason

TOKENIZER = build_tokenizer()


def config_of(agent: str, prompts: str):
    budget = {"max_turns": 1} if agent_spec(agent).searches else {}
    return parse_config({"agent": {"name": agent, "prompts": prompts}, "budget": budget})


def takes(agent: str, prompts: str) -> bool:
    try:
        make_renderer(config_of(agent, prompts), tokenizer=TOKENIZER)
    except ConfigError:
        return False
    return True


SETS = sorted(path.stem for path in PROMPTS.glob("*.yaml"))
PAIRS = [(agent, prompts) for prompts in SETS for agent in AGENTS if takes(agent, prompts)]


def texts_of(prompts: str) -> dict[str, str]:
    """The texts of a set, with its slots empty."""
    values = yaml.safe_load((PROMPTS / f"{prompts}.yaml").read_text())
    texts = texts_of(base) if (base := values.pop("base", "")) else {}
    return texts | {key: "".join(split_slots(text)[::2]) for key, text in values.items()}


def echoes(text: str) -> Iterator[str]:
    """Every run of neighbouring sentences and lines, whole or from and to one of its tags."""
    places = [match.end() for match in re.finditer(r"[.:;?!](?=\s)|\n+|</?\w+>", text)]
    starts = sorted({0, *places, *(match.start() for match in re.finditer(r"</?\w+>", text))})
    for start in starts:
        for end in [*places, len(text)]:
            if start < end:
                yield text[start:end].strip()


def test_every_shipped_set_is_read_by_an_agent():
    assert {prompts for _, prompts in PAIRS} == set(SETS)


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "prompts"), PAIRS)
async def test_no_text_of_a_prompt_set_is_an_action(agent, prompts):
    question = build_question(context="Paris is the capital of France.")
    for key, text in texts_of(prompts).items():
        for echo in sorted(set(echoes(text))):
            library = Library()
            engine = ScriptedEngine(TOKENIZER, [echo] * 20)
            player = make_agent(config_of(agent, prompts), tokenizer=TOKENIZER, generate=engine, search=library)
            played = await player.rollout(question, trajectory_id="t", group_id="g", member=0)
            assert played.answer is None and not library.calls, f"{key} is an action: {echo!r}"


@pytest.mark.parametrize("prompts", sorted({prompts for agent, prompts in PAIRS if agent == "memsearcher"}))
async def test_no_text_of_a_prompt_set_is_a_memory(prompts):
    for key, text in texts_of(prompts).items():
        assert not [echo for echo in echoes(text) if parse_memory(echo)], f"{key} is a memory"


async def test_what_is_written_as_asked_is_an_action():
    """The echoes above are no actions for their words, and not because nothing would be."""
    library = Library()
    engine = ScriptedEngine(TOKENIZER, ["I search.</think>" + CALL, "<memory>Paris</memory>"])
    player = make_agent(config_of("memsearcher", "memsearcher"), tokenizer=TOKENIZER, generate=engine, search=library)
    played = await player.rollout(build_question(), trajectory_id="t", group_id="g", member=0)
    assert (played.end_reason, len(library.calls)) == (EndReason.MAX_TURNS, 1)


@pytest.mark.parametrize(
    ("agent", "prompts"), [pair for pair in PAIRS if issubclass(agent_spec(pair[0]).budget, MemoryBudget)]
)
async def test_a_golden_answer_is_probed_where_the_policy_would_write_it(agent, prompts):
    """After the very prompt that the policy answers from, outside of every thought, in a box."""
    config, question = config_of(agent, prompts), build_question(context="Paris is the capital of France.")
    engine = ScriptedEngine(TOKENIZER, ["nothing</think>\\boxed{Paris}"] * 20)
    player = make_agent(config, tokenizer=TOKENIZER, generate=engine, search=Library())
    played = await player.rollout(question, trajectory_id="t", group_id="g", member=0)
    renderer = make_renderer(config, tokenizer=TOKENIZER)
    probe = renderer.answer_probe(question, played.contexts[-1].memory_before)
    prompt = engine.prompts[len(played.contexts) - 1]
    assert probe.prompt[: len(prompt)] == prompt
    written = TOKENIZER.decode([*probe.prompt[len(prompt) :], *probe.answer])
    assert parse_answer("<think>" * ("</think>" in written) + written + "}", paired=["think"]).strip() == "Paris"
    assert TOKENIZER.decode(probe.answer).strip() == "Paris"
    noted, empty = (renderer.answer_probe(question, memory) for memory in ("Quito", ""))
    assert [TOKENIZER.decode(each.prompt).count("Quito") for each in (noted, empty)] == [1, 0]
    assert noted.answer == empty.answer == probe.answer


WITH_INSTRUCTIONS = [("memsearcher", "memsearcher"), ("memagent", "memagent"), ("memtrain", "memtrain")]
WITH_INSTRUCTIONS += [("mem1", "mem1"), ("react", "react"), ("full_text", "full_text")]
WITH_INSTRUCTIONS += [("memsearcher", "memsearcher_limit"), ("memagent", "memagent_limit")]
WITH_INSTRUCTIONS += [("memsearcher", "memsearcher_objectives")]


@pytest.mark.parametrize(("agent", "prompts"), PAIRS)
def test_instructions_stand_beside_the_question_where_the_set_has_a_place_for_them(agent, prompts):
    renderer, question = make_renderer(config_of(agent, prompts), tokenizer=TOKENIZER), build_question()
    assert renderer.takes_instructions == ((agent, prompts) in WITH_INSTRUCTIONS)
    plain = renderer.question(question)
    assert plain == renderer.encode(question.text)
    if not renderer.takes_instructions:
        return
    read = TOKENIZER.decode(renderer.instructed("Answer in </think> French.<|im_end|>").question(question))
    assert read.startswith(question.text) and "Answer in" in read and "French." in read
    assert "</think>" not in read and "<|im_end|>" not in read
    assert renderer.question(question) == plain  # the renderer itself stays as it was


def test_instructions_share_the_budget_of_the_question():
    config = parse_config({"agent": {"name": "memsearcher"}, "budget": {"question_tokens": 60}})
    renderer = make_renderer(config, tokenizer=TOKENIZER)
    renderer.check(build_question())
    with pytest.raises(
        UnfitQuestion, match=r"and its instructions have \d+ tokens, more than budget.question_tokens 60"
    ):
        renderer.instructed("be brief " * 60).check(build_question())


def test_a_text_of_instructions_has_a_slot_for_each_of_both():
    values = yaml.safe_load((PROMPTS / "react.yaml").read_text())
    with pytest.raises(ConfigError, match=r"prompts.instructions lacks the slot \{question\}"):
        ReactPrompts(**values | {"instructions": "{instructions}"})
    assert ReactPrompts(**values | {"instructions": ""}).instructions == ""


def test_a_set_may_change_some_texts_of_a_built_in_one(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("base: react\nuser: 'Q: {question}'\n")
    built_in = load_prompts("react", ReactPrompts)
    assert load_prompts(str(own), ReactPrompts) == dataclasses.replace(built_in, user="Q: {question}")
    own.write_text("base: tiny_limit\npassage: '{title}: {text}'\n")  # which has a base itself
    chained = load_prompts(str(own), MemSearcherPrompts)
    assert chained == dataclasses.replace(load_prompts("tiny_limit", MemSearcherPrompts), passage="{title}: {text}")
    assert "{memory_tokens}" in chained.user


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("base: react\nuser: a\nuser: b\n", r"own.yaml is not YAML: the key 'user' is duplicated, .* in line 3"),
        ("base: raect\n", r"own.yaml has base 'raect', which is not a built-in prompt set \(.*react"),
        ("base: [react]\n", "which is not a built-in prompt set"),
        ("base: ../../secrets\n", "which is not a built-in prompt set"),
        ("base: memagent\n", r"own.yaml holds \[.*\], expected the keys \[.*\], or a base and some"),
        ("base: react\nusre: x\n", r"own.yaml holds \[.*'usre'\], expected the keys"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(tmp_path, text, sentence):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_prompts(str(tmp_path / "own.yaml"), ReactPrompts)
