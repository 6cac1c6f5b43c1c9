from __future__ import annotations

import json
from collections import Counter

import pytest

from mempipe.agents.protocol import Tool, parse_action, parse_memory
from mempipe.data import world as tiny_world
from mempipe.data.world import KNOWS_NOTHING, NO_NOISE, Noise, ScriptedPolicy, World, make_questions, make_worlds
from mempipe.engines.encoders import HashingEncoder
from mempipe.types import Question

TOOL = Tool(name="wikipedia_search", num_passages=2, max_passages=2, max_query_chars=1000)
TRAIN, HELD_OUT = make_worlds(5, num_held_out=2, seed=7)
WORLD = HELD_OUT[0]
MAX_TURNS = 6


def play(question: Question, policy: ScriptedPolicy, world: World) -> tuple[str | None, list[str]]:
    """The answer and all messages of a script that is shown the passages it names, as a perfect retriever would."""
    memory, messages = KNOWS_NOTHING, []
    for _ in range(MAX_TURNS):
        prompt = f"{question.text}\n<memory>{memory}</memory><think>"
        messages.append(policy.reply(prompt))
        action = parse_action(f"<think>{messages[-1]}", tool=TOOL)
        if action.answer is not None:
            return action.answer.strip(), messages
        (call,) = action.calls
        found = "\n".join(passage.text for passage in world.passages if passage.title in call.query.split())
        messages.append(policy.reply(f"{prompt}{messages[-1]}\n<tool_response>{found}</tool_response>"))
        memory = parse_memory(messages[-1])
        assert memory, "an empty memory would end the trajectory"
    return None, messages


def script(question: Question, noise: Noise = NO_NOISE, seed: int = 0) -> ScriptedPolicy:
    return ScriptedPolicy(question=question.text, max_turns=MAX_TURNS, noise=noise, seed=seed)


def test_a_seed_gives_the_same_world_and_another_seed_another():
    assert World(3).passages == World(3).passages
    assert World(3).facts != World(4).facts


def test_no_fact_of_a_held_out_world_is_true_in_a_training_world():
    held_out = frozenset().union(*(world.facts for world in HELD_OUT))
    assert all(held_out.isdisjoint(world.facts) for world in TRAIN)
    free = World(1)
    assert WORLD.facts & frozenset().union(*(World(seed).facts for seed in range(40))), "by chance alone, worlds do share facts"
    assert World(1, forbidden=free.facts).facts.isdisjoint(free.facts)


def test_a_passage_states_every_fact_of_its_entity_with_the_value_behind_the_relation():
    texts = {passage.title: passage.text for passage in WORLD.passages}
    assert len(texts) == sum(tiny_world.COUNTS.values())
    assert all(f"{relation} {value}" in texts[entity] for entity, relation, value in WORLD.facts)


def test_questions_walk_a_chain_of_facts_and_list_it_as_evidence():
    for question in WORLD.questions(60, seed=1):
        entity, relations = tiny_world.parse_question(question.text)
        assert len(relations) == question.num_hops == len(question.evidence)
        for relation, evidence in zip(relations, question.evidence, strict=True):
            assert (entity, relation, evidence.value) in WORLD.facts
            assert evidence.passage_id == f"{WORLD.id}/{entity}"
            entity = evidence.value
        assert question.golden_answers == [entity]
        assert question.partition == WORLD.id


def test_hop_counts_come_in_equal_shares_over_all_worlds_and_no_chain_twice():
    questions = make_questions(HELD_OUT, 96, seed=5)
    assert Counter(q.num_hops for q in questions) == {1: 32, 2: 32, 3: 32}
    assert Counter(q.partition for q in questions) == {"held-out-0": 48, "held-out-1": 48}
    assert len({q.id for q in questions}) == 96
    assert questions == make_questions(HELD_OUT, 96, seed=5)


def test_more_questions_than_chains_are_refused():
    with pytest.raises(ValueError, match="too few 1-hop chains for 1000 questions"):
        WORLD.questions(1000, seed=1, hops=[1])


def test_a_question_of_another_form_is_refused():
    with pytest.raises(ValueError, match="not a question of the synthetic world"):
        tiny_world.parse_question("Who wrote Faust?")


def test_the_query_of_a_fact_finds_the_passage_of_its_entity():
    encoder = HashingEncoder()
    passages = encoder.encode_passages(WORLD.passages)
    facts = sorted(WORLD.facts)
    scores = encoder.encode_queries([tiny_world.search_query(relation, entity) for entity, relation, _ in facts]) @ passages.T
    best_two = scores.argsort(axis=1)[:, -2:]
    found = [entity in {WORLD.passages[i].title for i in best} for (entity, _, _), best in zip(facts, best_two, strict=True)]
    assert sum(found) >= 0.98 * len(facts)


@pytest.mark.parametrize("num_hops", [1, 2, 3])
def test_without_noise_the_script_answers_right_in_one_turn_per_hop_and_one(num_hops):
    for question in WORLD.questions(20, seed=2, hops=[num_hops]):
        answer, messages = play(question, script(question), WORLD)
        assert [answer] == question.golden_answers
        assert len(messages) == 2 * num_hops + 1


def test_the_script_notes_one_fact_after_the_other():
    (question,) = WORLD.questions(1, seed=2, hops=[2])
    _, messages = play(question, script(question), WORLD)
    (first, second), (start, relations) = question.evidence, tiny_world.parse_question(question.text)
    assert messages[1] == f"<memory>known {start} {relations[0]} {first.value};</memory>"
    assert messages[3] == f"<memory>known {start} {relations[0]} {first.value}; {first.value} {relations[1]} {second.value};</memory>"


def test_a_search_is_the_json_of_its_call():
    text = tiny_world.search_action("mayor", "Velmora")
    call = text.partition("<tool_call>")[2].removesuffix("</tool_call>")
    assert call == json.dumps({"name": "wikipedia_search", "arguments": {"query": "mayor of Velmora"}})


def test_a_script_that_always_forgets_answers_only_when_its_turns_are_spent():
    (question,) = WORLD.questions(1, seed=3, hops=[1])
    answer, messages = play(question, script(question, Noise(answer_early=0.0, vague_query=0.0, forget=1.0)), WORLD)
    assert len(messages) == 2 * (MAX_TURNS - 1) + 1
    assert answer == tiny_world.parse_question(question.text)[0]
    assert set(messages[1::2]) == {f"<memory>{KNOWS_NOTHING}</memory>"}


def test_a_vague_query_names_no_entity_and_teaches_nothing():
    (question,) = WORLD.questions(1, seed=3, hops=[1])
    _, messages = play(question, script(question, Noise(answer_early=0.0, vague_query=1.0, forget=0.0)), WORLD)
    (relation,) = tiny_world.parse_question(question.text)[1]
    assert all(f'"query": "{relation}"' in action for action in messages[:-1:2])
    assert set(messages[1::2]) == {f"<memory>{KNOWS_NOTHING}</memory>"}


def test_decisions_are_drawn_per_seed_and_question():
    question = WORLD.questions(1, seed=4, hops=[3])[0]
    noise = Noise(answer_early=0.3, vague_query=0.3, forget=0.5)
    runs = [play(question, script(question, noise, seed), WORLD)[1] for seed in (1, 1, 2, 3, 4)]
    assert runs[0] == runs[1]
    assert len({tuple(messages) for messages in runs}) > 1


def test_a_memory_cut_in_the_middle_of_a_fact_keeps_the_whole_facts_before_it():
    assert tiny_world.parse_memory("known A mayor B; B employer") == [("A", "mayor", "B")]
