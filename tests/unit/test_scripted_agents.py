"""Every agent's script through the agent's own loop, with the tiny tokenizer and a search that finds the passage of
a named entity.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from scripted_play import QUESTIONS, WORLD, rollout, searches

from mempipe.agents.registry import BUILT_IN, agent_spec
from mempipe.config import RunConfig
from mempipe.data.scripted_agents import (
    KNOWS_NOTHING,
    NO_NOISE,
    Noise,
    ScriptedAgent,
    ScriptedMemSearcher,
    ScriptedMemTrain,
    facts_that_fit,
    known,
    parse_facts,
    search_call,
    search_query,
)
from mempipe.data.world import World, make_questions, parse_question, stated_facts
from mempipe.engines.tokenizer import HFTokenizer
from mempipe.loader import load_config
from mempipe.types import EndReason, Question, Trajectory
from mempipe.user_code import load_user_object

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
QUICKSTARTS = {
    "memsearcher": "quickstart",
    "mem1": "quickstart_mem1",
    "react": "quickstart_react",
    "memagent": "quickstart_memagent",
    "memtrain": "tiny_memtrain",
    "full_text": "quickstart_full_text",
}
AGENTS = tuple(name for name in BUILT_IN if agent_spec(name).script)
SEARCHING = tuple(name for name in AGENTS if agent_spec(name).searches)


def script_of(agent: str) -> type[ScriptedAgent]:
    return load_user_object(agent_spec(agent).script, setting="script")


def config_of(agent: str) -> RunConfig:
    return load_config(CONFIGS / f"{QUICKSTARTS[agent]}.yaml")


def play(
    agent: str, question: Question, tokenizer: HFTokenizer, *, noise: Noise = NO_NOISE, seed: int = 0
) -> tuple[Trajectory, list[str]]:
    """The attempt and the script's messages."""
    config = config_of(agent)
    script = script_of(agent)(question=question.text, max_turns=config.budget.turn_limit, noise=noise, seed=seed)
    messages: list[str] = []
    return asyncio.run(rollout(config, question, tokenizer, script, messages)), messages


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_without_noise_every_question_is_answered_right(agent, tokenizer):
    for question in QUESTIONS:
        trajectory, messages = play(agent, question, tokenizer)
        assert trajectory.end_reason is EndReason.ANSWERED
        assert [(trajectory.answer or "").strip()] == question.golden_answers
        turns = {"memsearcher": 2 * question.num_hops + 1, "memagent": 5, "memtrain": 5 + 4, "full_text": 1}.get(
            agent, question.num_hops + 1
        )
        assert len(messages) == turns, "a turn per fact or chunk and one, and the recalls; or one for all"


@pytest.mark.slow
@pytest.mark.parametrize("agent", SEARCHING)
def test_without_noise_the_facts_are_searched_one_behind_the_other(agent, tokenizer):
    for question in QUESTIONS:
        entity, relations = parse_question(question.text)
        entities = [entity, *(evidence.value for evidence in question.evidence)]
        trajectory, _ = play(agent, question, tokenizer)
        assert searches(trajectory) == [search_query(r, e) for e, r in zip(entities, relations, strict=False)]


@pytest.mark.parametrize("agent", SEARCHING)
def test_objectives_are_answered_one_behind_the_other(agent, tokenizer):
    overrides = {"question_tokens": 64, "max_turns": 8}
    if agent == "memsearcher":
        overrides |= {"memory_tokens": 32, "memory_message_tokens": 36}
    config = config_of(agent)
    config = config.model_copy(update={"budget": config.budget.model_copy(update=overrides)})
    for pair in make_questions([WORLD], 6, seed=2, objectives=2):
        script = script_of(agent)(question=pair.text, max_turns=8, noise=NO_NOISE)
        trajectory = asyncio.run(rollout(config, pair, tokenizer, script))
        answers = [answer.strip() for answer in (trajectory.answer or "").split(";")]
        assert [[answer] for answer in answers] == pair.objectives
        chains = [parse_question(text) for text in pair.text.split("; ")]
        assert len(searches(trajectory)) == sum(len(relations) for _, relations in chains)
        assert [query.split()[0] for query in searches(trajectory)] == [r for _, names in chains for r in names]


def test_a_memory_that_the_prompt_has_opened_is_not_opened_again():
    script = ScriptedMemSearcher(question=QUESTIONS[0].text, noise=NO_NOISE)
    prompt = "<memory>known nothing</memory><tool_response>nothing</tool_response>"
    assert script.reply(prompt) == "<memory>known nothing</memory>"
    assert script.reply(f"{prompt}<memory>") == "known nothing</memory>"


@pytest.mark.parametrize("agent", AGENTS)
def test_all_is_written_in_whole_words(agent, tokenizer):
    """A letter among the tokens would be a word that the tokenizer does not know."""
    letters = {tokenizer.encode_text(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"}
    trajectory, _ = play(agent, QUESTIONS[2], tokenizer)
    assert all(letters.isdisjoint(context.token_ids) for context in trajectory.contexts)


def test_memtrains_memory_holds_all_that_was_read_and_answers_every_recall(tokenizer):
    asked_for = Counter[bool]()
    for question in QUESTIONS:
        trajectory, _ = play("memtrain", question, tokenizer)
        noted = parse_facts(trajectory.contexts[-1].memory_before)
        assert noted == list(dict.fromkeys(stated_facts_of(question))), "in the order of the text"
        needed = [value for _, _, value in parse_facts(trajectory.contexts[-1].action)]
        assert needed == [evidence.value for evidence in question.evidence], "the answer says where it is from"
        for recall in trajectory.recalls:
            assert [(recall.answer or "").strip()] == recall.target
            asked_for[recall.target[0] in {e.value for e in question.evidence}] += 1
    assert asked_for[False] > asked_for[True], "most probes ask for what the question does not need"


def knows(trajectory: Trajectory, question: Question) -> bool:
    """Returns whether the last memory, or the message of an agent without one, holds the last needed fact."""
    evidence, last = question.evidence[-1], trajectory.contexts[-1]
    noted = parse_facts(last.memory_before or last.action)
    return any(evidence.passage_id.endswith(f"/{entity}") and value == evidence.value for entity, _, value in noted)


def stated_facts_of(question: Question) -> list[tuple[str, str, str]]:
    return [fact for line in question.context.splitlines() for fact in stated_facts(line)]


def test_memtrain_answers_nothing_where_the_memory_does_not_help(tokenizer):
    forgets = Noise(answer_early=0.0, vague_query=0.0, forget=1.0)
    trajectory, _ = play("memtrain", QUESTIONS[0], tokenizer, noise=forgets)
    assert {(recall.answer or "").strip() for recall in trajectory.recalls} == {"nothing"}
    assert all(context.action == KNOWS_NOTHING for context in trajectory.contexts[:-1])
    assert (trajectory.answer or "").strip() == "nothing"


def test_the_messages_of_every_agent(tokenizer):
    (question,) = WORLD.questions(1, seed=2, hops=[2])
    (first, second), (start, (r1, r2)) = question.evidence, parse_question(question.text)
    fact, next_fact = f"{start} {r1} {first.value};", f"{first.value} {r2} {second.value};"
    call = '<tool_call>{{"name": "wikipedia_search", "arguments": {{"query": "{} of {}"}}}}</tool_call>'
    assert play("memsearcher", question, tokenizer)[1] == [
        f"need {r1}</think>{call.format(r1, start)}",
        f"<memory>known {fact}</memory>",
        f"need {r2}</think>{call.format(r2, first.value)}",
        f"<memory>known {fact} {next_fact}</memory>",
        f"answer</think>\\boxed{{ {second.value}}}",
    ]
    searched = f"<think>known nothing need {r1}</think><search>{r1} of {start}</search>"
    searched_next = f"<think>known {fact} need {r2}</think><search>{r2} of {first.value}</search>"
    answer = f"answer</think><answer> {second.value}</answer>"
    assert play("mem1", question, tokenizer)[1] == [
        searched,
        searched_next,
        f"<think>known {fact} {next_fact} {answer}",
    ]
    assert play("react", question, tokenizer)[1] == [searched, searched_next, f"<think>known {next_fact} {answer}"]
    *memories, last = play("memagent", question, tokenizer)[1]
    # The passages in between change nothing; each is there before the first, between the two or behind them, or not at
    # all.
    stages = [f"need {r1} of {start} known nothing", f"need {r1} of {start} known {fact}"]
    stages += [f"need {r2} of {first.value} known {fact}", f"need {r2} of {first.value} known {fact} {next_fact}"]
    stages += [f"answer known {fact} {next_fact}"]
    assert len(memories) == 4
    assert {stages[1], stages[3]} <= set(memories)
    assert sorted(memories, key=stages.index) == memories
    assert last == f"\\boxed{{ {second.value}}}"


@pytest.mark.parametrize("agent", SEARCHING)
def test_a_script_that_always_forgets_answers_only_when_its_turns_are_spent(agent, tokenizer):
    trajectory, _ = play(agent, QUESTIONS[0], tokenizer, noise=Noise(answer_early=0.0, vague_query=0.0, forget=1.0))
    assert trajectory.end_reason is EndReason.ANSWERED
    assert (trajectory.answer or "").strip() == parse_question(QUESTIONS[0].text)[0]
    assert len(searches(trajectory)) == config_of(agent).budget.turn_limit - 1
    assert len(set(searches(trajectory))) == 1


def test_a_reader_that_always_forgets_knows_nothing_at_the_end(tokenizer):
    trajectory, messages = play("memagent", QUESTIONS[0], tokenizer, noise=Noise(forget=1.0))
    assert all(message.endswith(KNOWS_NOTHING) for message in messages[:-1])
    assert (trajectory.answer or "").strip() == parse_question(QUESTIONS[0].text)[0]


@pytest.mark.parametrize("agent", SEARCHING)
def test_a_vague_query_names_no_entity_and_teaches_nothing(agent, tokenizer):
    trajectory, messages = play(
        agent, QUESTIONS[0], tokenizer, noise=Noise(answer_early=0.0, vague_query=1.0, forget=0.0)
    )
    assert set(searches(trajectory)) == {parse_question(QUESTIONS[0].text)[1][0]}
    assert not parse_facts(" ".join(messages))


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.slow
def test_mistakes_come_as_often_as_the_noise_says(agent, tokenizer):
    """Questions of one hop: a trajectory that forgets is right later or never, one that answers early knows nothing."""
    questions = WORLD.questions(120, seed=3, hops=[1])
    counts = Counter()
    for seed, question in enumerate(questions):
        trajectory, _ = play(
            agent, question, tokenizer, noise=Noise(answer_early=0.3, vague_query=0.0, forget=0.0), seed=seed
        )
        counts["early"] += (trajectory.answer or "").strip() not in question.golden_answers
        trajectory, _ = play(
            agent, question, tokenizer, noise=Noise(answer_early=0.0, vague_query=0.0, forget=0.4), seed=seed
        )
        counts["forgot"] += len(searches(trajectory)) > 1 if agent in SEARCHING else not knows(trajectory, question)
        trajectory, _ = play(
            agent, question, tokenizer, noise=Noise(answer_early=0.0, vague_query=0.5, forget=0.0), seed=seed
        )
        counts["vague"] += len(searches(trajectory)) > 1
    expected = {"early": 0.3, "forgot": 0.4, "vague": 0.5} if agent in SEARCHING else {"forgot": 0.4}
    expected |= {"early": 0.3} if agent == "full_text" else {}
    for mistake, share in expected.items():
        assert counts[mistake] / len(questions) == pytest.approx(share, abs=0.13), mistake  # three standard errors


@pytest.mark.parametrize("agent", AGENTS)
def test_decisions_are_drawn_per_seed_and_question(agent, tokenizer):
    question = WORLD.questions(1, seed=4, hops=[3])[0]
    runs = [play(agent, question, tokenizer, noise=Noise(forget=0.5), seed=seed)[1] for seed in (1, 1, 2, 3, 4, 5)]
    assert runs[0] == runs[1]
    assert len({tuple(messages) for messages in runs}) > 1


def test_a_script_may_note_only_the_newest_facts(tokenizer):
    question = WORLD.long_question(9, seed=1)
    entity, relations = parse_question(question.text)
    entities = [entity, *(evidence.value for evidence in question.evidence)]
    facts = list(zip(entities, relations, entities[1:], strict=False))
    for num_known in range(1, 9):
        script = ScriptedMemSearcher(question=question.text, max_turns=10, noise=NO_NOISE, num_noted=3)
        prompt = f"{question.text}\n<memory>{known(facts[max(0, num_known - 3) : num_known])}</memory><think>"
        reply = script.reply(prompt)
        assert reply == search_call(relations[num_known], search_query(relations[num_known], entities[num_known]))
        passage = next(passage.text for passage in WORLD.passages if passage.title == entities[num_known])
        memory = script.reply(f"{prompt}{reply}\n<tool_response>{passage}</tool_response>")
        assert memory == f"<memory>{known(facts[max(0, num_known - 2) : num_known + 1])}</memory>"


def test_memtrains_memory_keeps_what_the_question_names_and_the_newest_where_not_all_fits(tokenizer):
    config = load_config(CONFIGS / "tiny_memtrain.yaml", ["budget.memory_tokens=32", "budget.memory_message_tokens=36"])
    limit = facts_that_fit(config.budget.memory_limit or 0)
    assert limit == 6
    for order in ("reading", "reverse", "random"):
        for question in World(5, evidence_order=order).questions(40, seed=2, hops=[1, 2]):
            asked = parse_question(question.text)[1]
            script = ScriptedMemTrain(question=question.text, noise=NO_NOISE, num_noted=limit)
            trajectory = asyncio.run(rollout(config, question, tokenizer, script))
            memories = [context.memory_after for context in trajectory.contexts[:-1]]
            assert not any(context.memory_truncated for context in trajectory.contexts), memories
            noted, stated = parse_facts(memories[-1]), stated_facts_of(question)
            named = [fact for fact in stated if fact[1] in asked]
            others = [fact for fact in stated if fact not in named]
            kept = named[-limit:] + others[len(others) - max(0, limit - len(named)) :]
            assert noted == [fact for fact in stated if fact in kept]
            assert len(stated) > len(noted) == limit
            if len(named) <= limit:
                assert [(trajectory.answer or "").strip()] == question.golden_answers


@pytest.mark.parametrize(("tokens", "facts"), [(64, 14), (32, 6), (9, 1), (8, 1), (1, 1)])
def test_a_note_of_the_facts_that_fit_is_within_the_budget(tokens, facts, tokenizer):
    assert facts_that_fit(tokens) == facts
    note = f"need {search_query('mayor', 'Velmora')} {known([('Velmora', 'mayor', 'Osvin')] * facts)}"
    assert len(tokenizer.encode_text(note)) <= max(tokens, 9)
    assert len(tokenizer.encode_text(f"{note} Velmora mayor Osvin;")) > tokens, "one fact more does not fit"


def test_a_search_is_the_json_of_its_call():
    text = search_call("mayor", search_query("mayor", "Velmora"))
    call = text.partition("<tool_call>")[2].removesuffix("</tool_call>")
    assert call == json.dumps({"name": "wikipedia_search", "arguments": {"query": "mayor of Velmora"}})


def test_a_note_cut_in_the_middle_of_a_fact_keeps_the_whole_facts_before_it():
    assert parse_facts("known A mayor B; B employer") == [("A", "mayor", "B")]
    assert parse_facts("need mayor of A known A mayor B;") == [("A", "mayor", "B")]


def test_the_quickstarts_differ_only_in_agent_and_budget():
    agents = [agent for agent in AGENTS if agent != "memtrain"]
    configs = [config_of(agent).model_dump(exclude={"name", "agent", "budget"}) for agent in agents]
    assert all(config == configs[0] for config in configs)
    assert [config_of(agent).agent.name for agent in AGENTS] == list(AGENTS)
    assert all(re.fullmatch(r"quickstart(-[\w-]+)?", config_of(agent).name) for agent in agents)


def test_memtrains_script_notes_no_fact_of_a_relation_that_is_never_trained():
    question = next(iter(World(5).questions(1, seed=2, hops=[2])))
    asked = parse_question(question.text)[1]
    facts = stated_facts_of(question)
    unseen = frozenset(relation for _, relation, _ in facts) - set(asked)
    script = ScriptedMemTrain(question=question.text, noise=NO_NOISE, unseen=unseen)
    prompt = f"<information>{question.context.splitlines()[0]}</information><memory></memory>"
    memory = parse_facts(script.reply(prompt))
    first = [fact for fact in facts if fact[0] == facts[0][0]]
    assert memory == [fact for fact in first if fact[1] in asked] and len(memory) < len(first)
