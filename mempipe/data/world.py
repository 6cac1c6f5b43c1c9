"""The synthetic world: entities, facts, one passage per entity, 1- to 3-hop questions, and a script that answers them, well or badly.

A world is drawn from a seed. All worlds share their name pools, so that a tokenizer knows every name, but no fact of a held-out world
is true in a training world. The language is small on purpose. A question walks its chain from left to right ("What is Velmora's
mayor's employer?"), a passage puts every value right behind the name of its relation ("... is led by mayor Osvin ..."), and a memory is
a list of facts ("known Velmora mayor Osvin;").
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from mempipe.types import Evidence, Passage, Question

TOOL_NAME = "wikipedia_search"
CALL_OPEN = f'<tool_call>{{"name": "{TOOL_NAME}", "arguments": {{"query": "'
CALL_CLOSE = '"}}</tool_call>'
ANSWER_OPEN = "\\boxed{"
KNOWS_NOTHING = "known nothing"


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation of one kind of entity to another. A passage states it as one of the `leads`, its name, the value."""

    name: str
    target: str
    leads: tuple[str, ...]


RELATIONS: dict[str, tuple[Relation, ...]] = {
    "film": (
        Relation("director", "person", ("was shot by", "comes from")),
        Relation("composer", "person", ("has music by", "was scored by")),
    ),
    "book": (
        Relation("author", "person", ("was written by", "tells of")),
        Relation("publisher", "company", ("was printed by", "appeared at")),
    ),
    "person": (
        Relation("hometown", "city", ("grew up in", "was born in")),
        Relation("employer", "company", ("works for", "earns from")),
        Relation("spouse", "person", ("is married to", "lives with")),
    ),
    "company": (
        Relation("seat", "city", ("is run from", "has offices at")),
        Relation("founder", "person", ("was started by", "goes back to")),
    ),
    "city": (
        Relation("country", "country", ("lies in", "belongs to")),
        Relation("mayor", "person", ("is led by", "answers to")),
    ),
    "country": (
        Relation("capital", "city", ("is governed from", "meets in")),
        Relation("president", "person", ("is headed by", "follows")),
    ),
}
COUNTS = {"person": 30, "film": 14, "book": 12, "company": 16, "city": 24, "country": 10}
OPENINGS = ("What is", "Name", "Find", "Look up")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _blend(heads: str, tails: str) -> tuple[str, ...]:
    return tuple(head + tail for head in heads.split() for tail in tails.split())


NAME_POOLS: dict[str, tuple[str, ...]] = {
    "person": _words(
        "Adela Anselm Astrid Balint Beatrix Benno Carmen Casimir Cosima Dagmar Dario Edith Edgar Eleni Enzo Farid Fiona Florian "
        "Gerda Giles Gudrun Hakon Hedda Hugo Ilsa Imre Ingrid Jarek Joanna Jorge Kasper Katya Keiko Laszlo Leonie Lucian Magda "
        "Marius Milena Nestor Noemi Norbert Odette Orson Osvin Paloma Pavel Petra Rafael Ramona Rupert Sabine Selma Stefan "
        "Tamar Tobias Ursula Valerie Viktor Wanda Wilhelm Yvonne Zelda Zoltan"
    ),
    "film": _words(
        "Avalanche Backlight Carousel Daybreak Eclipse Firefly Gaslight Headwind Icebound Jackpot Keystone Landslide Masquerade "
        "Nightfall Outback Pendulum Quicksand Rainmaker Sandstorm Tightrope Undertow Vertigo Waterfall Whirlpool Windmill "
        "Wildfire"
    ),
    "book": _words(
        "Almanac Bestiary Codex Compendium Digest Epistle Fragments Glossary Herbarium Idylls Jottings Lexicon Meditations "
        "Novella Odyssey Parables Quartet Reflections Soliloquy Testament Treatise Vignettes"
    ),
    "company": _blend("Arvo Brix Cypher Dento Fluxo Gravi", "corp dyne nex tron works"),
    "city": _blend("Ald Bren Cor Dun Hel Kar Lun Vel", "bridge ford gate mora vik"),
    "country": _blend("Bor Gal Mer Tor", "avia enia istan una"),
}


def vocabulary() -> list[str]:
    """Every word that worlds and scripts write, names included, sorted."""
    texts = [*OPENINGS, KNOWS_NOTHING, "need answer of and The 's is"]
    for kind, relations in RELATIONS.items():
        texts += [kind, *(f"{' '.join(r.leads)} {r.name}" for r in relations)]
    words = {word for text in texts for word in text.split()}
    return sorted(words.union(*NAME_POOLS.values()))


@dataclass(frozen=True, slots=True)
class Chain:
    """A walk over facts: entities[0] -relations[0]-> entities[1] -> ..."""

    entities: tuple[str, ...]
    relations: tuple[str, ...]


class World:
    """Entities, facts and passages drawn from `seed`. `forbidden` facts (entity, relation, value) are not drawn."""

    def __init__(self, seed: int, *, id: str = "", forbidden: frozenset[tuple[str, str, str]] = frozenset()) -> None:
        self.id = id or f"world-{seed}"
        rng = random.Random(seed)
        self._names = {kind: rng.sample(NAME_POOLS[kind], count) for kind, count in COUNTS.items()}
        self._kind = {name: kind for kind, names in self._names.items() for name in names}
        self._facts: dict[tuple[str, str], str] = {}
        for name, kind in self._kind.items():
            for relation in RELATIONS[kind]:
                values = [v for v in self._names[relation.target] if v != name and (name, relation.name, v) not in forbidden]
                self._facts[name, relation.name] = rng.choice(values)
        self.passages = [self._passage(name, rng) for name in self._kind]
        self._chains: dict[int, list[Chain]] = {}

    def facts_about(self, entity: str) -> list[tuple[str, str, str]]:
        """The facts of one entity as (entity, relation, value)."""
        return [(entity, r.name, self._facts[entity, r.name]) for r in RELATIONS[self._kind[entity]]]

    @property
    def facts(self) -> frozenset[tuple[str, str, str]]:
        """All facts as (entity, relation, value)."""
        return frozenset((entity, relation, value) for (entity, relation), value in self._facts.items())

    def questions(self, count: int, *, seed: int, hops: Sequence[int] = (1, 2, 3)) -> list[Question]:
        """`count` questions about different chains, the hop counts in equal shares and taking turns.

        Raises ValueError when the world has fewer chains than asked for.
        """
        rng = random.Random(seed)
        pools = {}
        for num_hops in set(hops):
            pools[num_hops] = rng.sample(self.chains(num_hops), len(self.chains(num_hops)))
        questions = []
        for i in range(count):
            pool = pools[hops[i % len(hops)]]
            if not pool:
                raise ValueError(
                    f"{self.id} has too few {hops[i % len(hops)]}-hop chains for {count} questions; ask for fewer, or of more worlds"
                )
            questions.append(self._question(pool.pop(), rng.choice(OPENINGS)))
        return questions

    def chains(self, num_hops: int) -> list[Chain]:
        """Every chain of `num_hops` facts in which no relation and no entity occurs twice."""
        if num_hops == 0:
            return [Chain((name,), ()) for name in self._kind]
        if num_hops not in self._chains:
            self._chains[num_hops] = [
                Chain((*chain.entities, value), (*chain.relations, relation))
                for chain in self.chains(num_hops - 1)
                for _, relation, value in self.facts_about(chain.entities[-1])
                if relation not in chain.relations and value not in chain.entities
            ]
        return self._chains[num_hops]

    def _question(self, chain: Chain, opening: str) -> Question:
        return Question(
            id="-".join((self.id, chain.entities[0], *chain.relations)),
            text=question_text(chain, opening),
            golden_answers=[chain.entities[-1]],
            source="world",
            partition=self.id,
            num_hops=len(chain.relations),
            evidence=[
                Evidence(passage_id=self._passage_id(entity), value=value)
                for entity, value in zip(chain.entities, chain.entities[1:], strict=False)
            ],
        )

    def _passage(self, name: str, rng: random.Random) -> Passage:
        relations = list(RELATIONS[self._kind[name]])
        rng.shuffle(relations)
        clauses = [f"{rng.choice(r.leads)} {r.name} {self._facts[name, r.name]}" for r in relations]
        text = f"The {self._kind[name]} {name} {' and '.join(clauses)}."
        return Passage(id=self._passage_id(name), title=name, text=text, partition=self.id)

    def _passage_id(self, name: str) -> str:
        return f"{self.id}/{name}"


def make_worlds(num_train: int, *, num_held_out: int, seed: int) -> tuple[list[World], list[World]]:
    """Training worlds and held-out worlds; no fact of the latter is true in one of the former."""
    held_out = [World(_derive(seed, "held-out", i), id=f"held-out-{i}") for i in range(num_held_out)]
    forbidden = frozenset().union(*(world.facts for world in held_out))
    train = [World(_derive(seed, "train", i), id=f"train-{i}", forbidden=forbidden) for i in range(num_train)]
    return train, held_out


def make_questions(worlds: Sequence[World], count: int, *, seed: int, hops: Sequence[int] = (1, 2, 3)) -> list[Question]:
    """`count` questions spread evenly over the worlds, in an order that mixes worlds and hop counts."""
    shares = [count // len(worlds) + (i < count % len(worlds)) for i in range(len(worlds))]
    questions: list[Question] = []
    for i, (world, share) in enumerate(zip(worlds, shares, strict=True)):
        turned = [hops[(len(questions) + j) % len(hops)] for j in range(len(hops))]
        questions += world.questions(share, seed=_derive(seed, world.id, i), hops=turned)
    random.Random(seed).shuffle(questions)
    return questions


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How often the script errs, as probabilities per decision. Reinforcement learning has to undo exactly this."""

    answer_early: float = 0.2
    """Answer with the last value known although hops are missing."""
    vague_query: float = 0.2
    """Search for the relation without naming the entity."""
    forget: float = 0.65
    """Leave the memory as it was instead of adding the fact just read. Above 0.5, so that the most likely memory is the useless one."""


NO_NOISE = Noise(answer_early=0.0, vague_query=0.0, forget=0.0)


@dataclass(slots=True, kw_only=True)
class ScriptedPolicy:
    """Writes the messages of one trajectory the way a trained policy would, with mistakes drawn from `noise`.

    `reply` reads nothing but the text that a model would see. Same question, same seed and same observations: same replies.
    """

    question: str
    max_turns: int
    noise: Noise = field(default_factory=Noise)
    seed: int | str = 0
    _turn: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed}:{self.question}")

    def reply(self, prompt: str) -> str:
        """The next assistant message, without a stop token, after the decoded `prompt` of a context.

        After an observation it is a memory message, otherwise the rest of an action message that was opened with `<think>`.
        """
        memory = _last_between(prompt, "<memory>", "</memory>")
        if "<tool_response>" not in prompt:
            return self.action(memory)
        query = _last_between(prompt, CALL_OPEN, CALL_CLOSE)
        return self.memory(memory, query=query, observation=_last_between(prompt, "<tool_response>", "</tool_response>"))

    def action(self, memory: str) -> str:
        """A search for the next missing fact, or the answer once the chain is complete or the turns are spent."""
        self._turn += 1
        entity, missing = self._progress(memory)
        if not missing or self._turn >= self.max_turns or self._chance(self.noise.answer_early):
            return answer_action(entity)
        return search_action(missing[0], "" if self._chance(self.noise.vague_query) else entity)

    def memory(self, memory: str, *, query: str, observation: str) -> str:
        """The memory message: the old facts, and the fact that was searched for if it was found, needed and not forgotten."""
        facts = parse_memory(memory)
        entity, missing = self._progress(memory)
        forgets = self._chance(self.noise.forget)
        if missing and query == search_query(missing[0], entity) and not forgets:
            found = re.search(rf"^The \w+ {entity} .*\b{missing[0]} (\w+)", observation, re.MULTILINE)
            facts += [(entity, missing[0], found[1])] if found else []
        return memory_message(facts)

    def _progress(self, memory: str) -> tuple[str, tuple[str, ...]]:
        """The entity that the known facts lead to, and the relations still to be followed from there."""
        entity, relations = parse_question(self.question)
        facts = {(e, relation): value for e, relation, value in parse_memory(memory)}
        while relations and (entity, relations[0]) in facts:
            entity, relations = facts[entity, relations[0]], relations[1:]
        return entity, relations

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


def question_text(chain: Chain, opening: str) -> str:
    return opening + " " + "'s ".join((chain.entities[0], *chain.relations)) + "?"


def parse_question(text: str) -> tuple[str, tuple[str, ...]]:
    """The entity a question starts from and its relations in order. Raises ValueError for a question of another form."""
    match = re.fullmatch(rf"(?:{'|'.join(OPENINGS)}) (\w+)((?:'s \w+)+)\?", text)
    if match is None:
        raise ValueError(f"not a question of the synthetic world: {text!r}; expected e.g. \"What is Velmora's mayor's employer?\"")
    return match[1], tuple(match[2].split("'s ")[1:])


def parse_memory(text: str) -> list[tuple[str, str, str]]:
    """The complete facts of a memory, in order; anything else in it is passed over."""
    return re.findall(r"(\w+) (\w+) (\w+);", text)


def search_query(relation: str, entity: str) -> str:
    return f"{relation} of {entity}" if entity else relation


def search_action(relation: str, entity: str) -> str:
    # The same text as json.dumps of the call; the fixed parts around the query are single tokens of the tiny tokenizer.
    return f"need {relation}</think>{CALL_OPEN}{json.dumps(search_query(relation, entity))[1:-1]}{CALL_CLOSE}"


def answer_action(entity: str) -> str:
    # The space keeps the name the same token as everywhere else.
    return f"answer</think>{ANSWER_OPEN} {entity}}}"


def memory_message(facts: Sequence[tuple[str, str, str]]) -> str:
    known = "known" + "".join(f" {entity} {relation} {value};" for entity, relation, value in facts)
    return f"<memory>{known if facts else KNOWS_NOTHING}</memory>"


def _last_between(text: str, start: str, end: str) -> str:
    """What stands between the last `end` and the `start` before it, stripped; "" when there is none."""
    head, found, _ = text.rpartition(end)
    return head.rpartition(start)[2].strip() if found and start in head else ""


def _derive(seed: int, *parts: str | int) -> int:
    """A seed of its own for every purpose."""
    return random.Random(f"{seed}:{':'.join(map(str, parts))}").getrandbits(48)
