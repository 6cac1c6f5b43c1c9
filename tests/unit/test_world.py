from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mempipe.data import world as tiny_world
from mempipe.data.config import WorldConfig
from mempipe.data.qa import read_questions
from mempipe.data.scripted_agents import search_query
from mempipe.data.world import Relations, World, make_questions, make_worlds, parse_question, relation_names
from mempipe.loader import load_config, parse_config
from mempipe.retrieval.encoders import HashingEncoder
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.types import Question
from pipelines import demonstrations
from pipelines.prepare import prepare
from pipelines.prepare import worlds as prepared_worlds

QUICKSTART = Path(__file__).parents[2] / "jobs" / "configs" / "quickstart.yaml"

TRAIN, HELD_OUT = make_worlds(5, num_held_out=2, seed=7)
WORLD = HELD_OUT[0]


def test_a_seed_gives_the_same_world_and_another_seed_another():
    assert World(3).passages == World(3).passages
    assert World(3).facts != World(4).facts


def test_the_questions_of_a_seed_stay_those_of_the_measured_figures():
    train, held_out = make_worlds(2, num_held_out=1, seed=1)
    assert [(q.text, q.golden_answers) for worlds in (train, held_out) for q in make_questions(worlds, 3, seed=1)] == [
        ("Name Galuna's capital's country?", ["Toravia"]),
        ("Look up Rafael's employer's founder's hometown?", ["Lunbridge"]),
        ("Name Yvonne's hometown?", ["Dungate"]),
        ("Find Dunbridge's country's president?", ["Carmen"]),
        ("Look up Adela's spouse's hometown's country?", ["Galenia"]),
        ("Find Dentonex's seat?", ["Corbridge"]),
    ]
    assert train[0].passages[0].text == (
        "The person Orson lives with spouse Anselm and was born in hometown Dungate and works for employer Gravitron."
    )


def test_no_fact_of_a_held_out_world_is_true_in_a_training_world():
    held_out = frozenset().union(*(world.facts for world in HELD_OUT))
    assert all(held_out.isdisjoint(world.facts) for world in TRAIN)
    free = World(1)
    assert WORLD.facts & frozenset().union(*(World(seed).facts for seed in range(40))), (
        "by chance alone, worlds do share facts"
    )
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
    scores = encoder.encode_queries([search_query(relation, entity) for entity, relation, _ in facts]) @ passages.T
    best_two = scores.argsort(axis=1)[:, -2:]
    found = [
        entity in {WORLD.passages[i].title for i in best} for (entity, _, _), best in zip(facts, best_two, strict=True)
    ]
    assert sum(found) >= 0.98 * len(facts)


def test_a_document_holds_what_the_question_needs_in_reading_order_among_others():
    texts = {passage.text: passage.id for passage in WORLD.passages}
    places = Counter()
    for question in WORLD.questions(60, seed=1):
        lines = question.context.splitlines()
        ids = [texts[line.rstrip(".") + "."] for line in lines]
        needed = [evidence.passage_id for evidence in question.evidence]
        assert len(ids) == len(set(ids)) == tiny_world.DOCUMENT_PASSAGES
        assert [id for id in ids if id in needed] == needed
        places[ids.index(needed[0])] += 1
    assert set(places) == set(range(tiny_world.DOCUMENT_PASSAGES)), "what is needed stands anywhere"


def placed(world: World, question: Question) -> tuple[list[str], list[int]]:
    """Returns the passages of a document that the question does not need, and where those that it needs are, in the
    order of need."""
    texts = {passage.text: passage.id for passage in world.passages}
    ids = [texts[line.rstrip(".") + "."] for line in question.context.splitlines()]
    needed = [evidence.passage_id for evidence in question.evidence]
    return [id for id in ids if id not in needed], [ids.index(id) for id in needed]


def test_the_order_of_evidence_moves_the_needed_passages_among_their_own_places():
    worlds = {order: World(5, document_passages=6, evidence_order=order) for order in ("reading", "reverse", "random")}
    found: dict[str, list[list[int]]] = {order: [] for order in worlds}
    for asked in zip(*(world.questions(60, seed=1) for world in worlds.values()), strict=True):
        assert len({question.id for question in asked}) == 1
        assert all(question.evidence == asked[0].evidence for question in asked)
        parts = {order: placed(world, question) for (order, world), question in zip(worlds.items(), asked, strict=True)}
        others, places = parts["reading"]
        assert places == sorted(places)
        assert parts["reverse"] == (others, places[::-1])
        assert parts["random"][0] == others and sorted(parts["random"][1]) == places
        for order, (_, own) in parts.items():
            found[order].append(own)
    assert found["reading"] == [
        placed(World(5, document_passages=6), q)[1] for q in worlds["reading"].questions(60, seed=1)
    ]
    drawn = Counter(tuple(sorted(own).index(place) for place in own) for own in found["random"] if len(own) == 3)
    assert len(drawn) >= 5, "the orders of three facts are drawn"


def test_a_run_has_its_order_of_evidence_in_every_document():
    settings = ["world.num_train_worlds=2", "world.hops=[2]", "warm_start=null"]
    memagent = QUICKSTART.parent / "quickstart_memagent.yaml"
    train, held_out = prepared_worlds(load_config(memagent, [*settings, "world.evidence_order=reverse"]))
    for world in (*train, *held_out):
        for question in world.questions(5, seed=1, hops=[2]):
            first, second = placed(world, question)[1]
            assert first > second


def test_a_script_that_needs_reading_order_is_refused_in_another():
    memagent = QUICKSTART.parent / "quickstart_memagent.yaml"
    assert load_config(memagent).script().endswith("ScriptedMemAgent")
    with pytest.raises(
        ConfigError, match=r"agent.name 'memagent' notes .* world.evidence_order is 'random'; set it to"
    ):
        load_config(memagent, ["world.evidence_order=random"]).script()
    assert load_config(QUICKSTART, ["world.evidence_order=random"]).script(), "a searching agent reads no document"


def test_a_search_function_of_another_name_is_refused_where_a_script_calls_it():
    with pytest.raises(ConfigError, match=r"the script calls 'wikipedia_search', but agent.tool_name is 'lookup'"):
        load_config(QUICKSTART, ["agent.tool_name=lookup"]).script()


def test_longer_documents_are_about_the_same_questions():
    short, long = (
        make_questions(make_worlds(0, num_held_out=2, seed=1, document_passages=passages)[1], 20, seed=1)
        for passages in (4, 12)
    )
    assert [question.id for question in short] == [question.id for question in long]
    assert {len(question.context.splitlines()) for question in long} == {12}
    assert all(
        len(question.recall_targets) > len(other.recall_targets) for question, other in zip(long, short, strict=True)
    )


def test_a_long_question_walks_without_repetition_and_its_document_has_every_passage():
    for seed in range(5):
        question = WORLD.long_question(20, seed=seed)
        entity, relations = tiny_world.parse_question(question.text)
        entities = [entity, *(evidence.value for evidence in question.evidence)]
        assert len(relations) == question.num_hops == 20
        assert len(set(entities)) == 21
        assert len(set(zip(relations, relations[1:], relations[2:], strict=False))) == 18
        assert all(fact in WORLD.facts for fact in zip(entities, relations, entities[1:], strict=False))
        assert len(question.context.splitlines()) == 20
    assert question == WORLD.long_question(20, seed=4) != WORLD.long_question(20, seed=3)


def test_a_walk_that_no_world_has_is_refused():
    with pytest.raises(ValueError, match="found no chain of 110 facts without repetition"):
        World(1).long_question(110, seed=1)


def followed(questions: list[Question]) -> list[set[str]]:
    return [set(parse_question(question.text)[1]) for question in questions]


def test_questions_follow_only_the_relations_that_they_may():
    without = make_questions(TRAIN, 90, seed=5, relations=Relations(without=frozenset({"mayor", "spouse"})))
    assert not set().union(*followed(without)) & {"mayor", "spouse"}
    through = make_questions(HELD_OUT, 60, seed=5, relations=Relations(through=frozenset({"mayor", "spouse"})))
    assert all(relations & {"mayor", "spouse"} for relations in followed(through))
    assert Counter(question.num_hops for question in through) == {1: 20, 2: 20, 3: 20}


def test_a_recall_asks_for_nothing_that_an_unseen_relation_states():
    unseen = frozenset({"mayor", "spouse", "founder"})
    for question in make_questions(TRAIN, 60, seed=5, relations=Relations(without=unseen)):
        stated = [fact for line in question.context.splitlines() for fact in tiny_world.stated_facts(line)]
        hidden = {value for _, relation, value in stated if relation in unseen}
        assert not hidden & {form for target in question.recall_targets for form in target}


def test_without_a_choice_of_relations_the_questions_are_the_same_as_ever():
    everything = Relations(through=frozenset(relation_names()))
    assert make_questions(TRAIN, 30, seed=5, relations=everything) == make_questions(TRAIN, 30, seed=5)


def test_a_run_holds_out_relations_and_hop_counts_and_trains_on_neither(tmp_path):
    sizes = ["world.num_train_worlds=3", "world.num_train_questions=60", "world.num_validation_questions=30"]
    unseen = ["world.unseen_relations=[mayor, employer]", "world.unseen_hops=[4]", "world.hops=[1, 2]"]
    run = load_config(QUICKSTART, [*sizes, *unseen, f"model.path={tmp_path / 'model'}", f"output={tmp_path}"])
    (tmp_path / "model").mkdir()
    prepare(Run(run))
    files = {
        name: read_questions(run.folder / "world" / f"{name}.parquet")
        for name in ("train", "validation", "unseen_relations", "unseen_hops")
    }
    assert {name: len(questions) for name, questions in files.items()} == {
        "train": 60,
        "validation": 30,
        "unseen_relations": 30,
        "unseen_hops": 30,
    }
    held_out = {"mayor", "employer"}
    for name in ("train", "validation", "unseen_hops"):
        assert not set().union(*followed(files[name])) & held_out, name
    assert all(relations & held_out for relations in followed(files["unseen_relations"]))
    hops = {name: {question.num_hops for question in questions} for name, questions in files.items()}
    assert hops == {"train": {1, 2}, "validation": {1, 2}, "unseen_relations": {1, 2}, "unseen_hops": {4}}
    shown = demonstrations._questions(run, 40, seed=9)
    assert not set().union(*followed(list(shown))) & held_out, "demonstrations show none of them either"


def test_a_world_asks_several_questions_as_one(tmp_path):
    sizes = ["world.num_train_worlds=3", "world.num_train_questions=20", "world.num_validation_questions=8"]
    wanted = ["world.objectives=2", "budget.question_tokens=48", "budget.max_turns=7"]
    (tmp_path / "model").mkdir()
    where = [f"model.path={tmp_path / 'model'}", f"output={tmp_path}"]
    run = load_config(QUICKSTART.with_name("quickstart_mem1.yaml"), [*sizes, *wanted, *where])
    prepare(Run(run))
    files = {name: read_questions(run.folder / "world" / f"{name}.parquet") for name in ("train", "validation")}
    assert {name: len(questions) for name, questions in files.items()} == {"train": 20, "validation": 8}
    for question in [*files["train"], *files["validation"], *demonstrations._questions(run, 10, seed=9)]:
        assert len(question.objectives) == 2 and len(question.id.split("+")) == 2
        assert all(id.startswith(f"{question.partition}-") for id in question.id.split("+"))
        assert question.golden_answers == ["; ".join(answers[0] for answers in question.objectives)]


@pytest.mark.parametrize(
    ("agent", "settings", "sentence"),
    [
        ("memagent", {}, "world.objectives is 2, but agent.name 'memagent' reads the document of one question"),
        ("mem1", {}, "world.hops has 3 for each of 2 objectives, which takes 7 turns, but budget.max_turns is 5"),
        (
            "mem1",
            {"budget": {"max_turns": 7, "action_tokens": 24}, "warm_start": {}},
            "notes 6 facts for them, but a memory of 24 tokens holds 4; raise the memory's limit in budget",
        ),
    ],
)
def test_objectives_that_an_agent_cannot_answer_are_refused(agent, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"world": {"objectives": 2}, "agent": {"name": agent}, **settings})


@pytest.mark.parametrize(
    ("world", "sentence"),
    [
        ({"unseen_relations": ["uncle"]}, "world.unseen_relations has 'uncle'; the relations are author, capital"),
        ({"unseen_relations": relation_names()}, "world.unseen_relations has every relation; leave some"),
        ({"unseen_hops": [3]}, r"world.unseen_hops has 3, and world.hops is \[1, 2, 3\]"),
        ({"unseen_hops": [0]}, "world.unseen_hops has 0"),
        ({"unseen_hops": [5]}, "world.unseen_hops has 5, which takes 6 turns, but budget.max_turns is 5; raise it"),
    ],
)
def test_what_cannot_be_held_out_is_refused(world, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"world": world})
    assert WorldConfig().unseen == {}
