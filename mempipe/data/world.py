"""The synthetic world: entities, facts, one passage per entity, and questions that need a chain of facts.

A seed draws a world. All worlds share their name pools, so that a tokenizer knows every name, but no fact of a held-out
world is true in a training world. The language is small on purpose. A question names its chain from left to right
("What is Velmora's mayor's employer?"), and a passage puts every value right after the name of its relation
("... is led by mayor Osvin ..."). Agents that search find the passages in an index; for agents that read, every
question has a document of a few of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Literal

from mempipe.data.objectives import join_objectives
from mempipe.text import TARGET
from mempipe.types import Evidence, Passage, Question


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
LONG_WALKS = 1000
DOCUMENT_PASSAGES = 4
"""Passages in the document of a question unless a world says otherwise; a question with more hops has one for each hop.
"""
EvidenceOrder = Literal["reading", "reverse", "random"]
"""Order of the needed passages in a document: that of the question's chain, its reverse, or a drawn one. In the order
of the chain a reader knows at once which fact it needs; in another order it knows only later."""
PASSAGE_TOKENS = 21
"""Words and punctuation marks of every passage of a document, its line break included: budget.chunk_tokens of an
agent that reads one passage at a time."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _blend(heads: str, tails: str) -> tuple[str, ...]:
    return tuple(head + tail for head in heads.split() for tail in tails.split())


NAME_POOLS: dict[str, tuple[str, ...]] = {
    "person": _words(
        "Adela Anselm Astrid Balint Beatrix Benno Carmen Casimir Cosima Dagmar Dario Edith Edgar Eleni Enzo Farid "
        "Fiona Florian "
        "Gerda Giles Gudrun Hakon Hedda Hugo Ilsa Imre Ingrid Jarek Joanna Jorge Kasper Katya Keiko Laszlo Leonie "
        "Lucian Magda "
        "Marius Milena Nestor Noemi Norbert Odette Orson Osvin Paloma Pavel Petra Rafael Ramona Rupert Sabine "
        "Selma Stefan "
        "Tamar Tobias Ursula Valerie Viktor Wanda Wilhelm Yvonne Zelda Zoltan"
    ),
    "film": _words(
        "Avalanche Backlight Carousel Daybreak Eclipse Firefly Gaslight Headwind Icebound Jackpot Keystone "
        "Landslide Masquerade "
        "Nightfall Outback Pendulum Quicksand Rainmaker Sandstorm Tightrope Undertow Vertigo Waterfall Whirlpool "
        "Windmill "
        "Wildfire"
    ),
    "book": _words(
        "Almanac Bestiary Codex Compendium Digest Epistle Fragments Glossary Herbarium Idylls Jottings Lexicon "
        "Meditations "
        "Novella Odyssey Parables Quartet Reflections Soliloquy Testament Treatise Vignettes"
    ),
    "company": _blend("Arvo Brix Cypher Dento Fluxo Gravi", "corp dyne nex tron works"),
    "city": _blend("Ald Bren Cor Dun Hel Kar Lun Vel", "bridge ford gate mora vik"),
    "country": _blend("Bor Gal Mer Tor", "avia enia istan una"),
}


def relation_names() -> list[str]:
    """Returns the names of all relations, sorted."""
    return sorted({relation.name for relations in RELATIONS.values() for relation in relations})


def words() -> set[str]:
    """Returns every word of questions and passages, names included."""
    texts = [*OPENINGS, "'s The and"]
    for kind, relations in RELATIONS.items():
        texts += [kind, *(f"{' '.join(r.leads)} {r.name}" for r in relations)]
    return {word for text in texts for word in text.split()}.union(*NAME_POOLS.values())


Chain = tuple[tuple[str, ...], tuple[str, ...]]
"""A walk over facts: its entities, and the relations that lead from one to the next. A run has hundreds of thousands of
chains, and garbage collections skip plain tuples of texts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relations:
    """Says which chains are asked about, by the names of their relations."""

    without: frozenset[str] = frozenset()
    """No relation of the chain is one of these."""
    through: frozenset[str] = frozenset()
    """One relation of the chain, or more, is one of these; empty: any chain."""

    def allow(self, chain: Chain) -> bool:
        """Returns whether the chain may be asked about."""
        _, relations = chain
        return self.without.isdisjoint(relations) and not (self.through and self.through.isdisjoint(relations))


ALL_RELATIONS = Relations()


class World:
    """Draws entities, facts and passages from `seed`, without the `forbidden` facts (entity, relation, value).

    Its questions are the same whatever `document_passages` and `evidence_order` are. The first makes their documents
    longer; the second moves the needed passages among their own places.
    """

    def __init__(
        self,
        seed: int,
        *,
        id: str = "",
        forbidden: frozenset[tuple[str, str, str]] = frozenset(),
        document_passages: int = DOCUMENT_PASSAGES,
        evidence_order: EvidenceOrder = "reading",
    ) -> None:
        self.id, self.document_passages, self.evidence_order = id or f"world-{seed}", document_passages, evidence_order
        rng = random.Random(seed)
        self._names = {kind: rng.sample(NAME_POOLS[kind], count) for kind, count in COUNTS.items()}
        self._kind = {name: kind for kind, names in self._names.items() for name in names}
        self._facts: dict[str, dict[str, str]] = {}
        for name, kind in self._kind.items():
            self._facts[name] = {}
            for relation in RELATIONS[kind]:
                values = [
                    v for v in self._names[relation.target] if v != name and (name, relation.name, v) not in forbidden
                ]
                self._facts[name][relation.name] = rng.choice(values)
        self._passages = {name: self._passage(name, rng) for name in self._kind}

    @property
    def passages(self) -> list[Passage]:
        """Returns one passage per entity."""
        return list(self._passages.values())

    def facts_about(self, entity: str) -> list[tuple[str, str, str]]:
        """Returns the facts of one entity as (entity, relation, value)."""
        return [(entity, relation, value) for relation, value in self._facts[entity].items()]

    @property
    def facts(self) -> frozenset[tuple[str, str, str]]:
        """Returns all facts as (entity, relation, value)."""
        return frozenset(fact for entity in self._facts for fact in self.facts_about(entity))

    def questions(
        self, count: int, *, seed: int, hops: Sequence[int] = (1, 2, 3), relations: Relations = ALL_RELATIONS
    ) -> list[Question]:
        """Returns `count` questions about different chains that follow `relations`; the hop counts take turns.

        Raises ValueError when the world has fewer chains than asked for.
        """
        rng = random.Random(seed)
        pools = {}
        for num_hops in set(hops):
            chains = [chain for chain in self.chains(num_hops) if relations.allow(chain)]
            pools[num_hops] = rng.sample(chains, len(chains))
        questions = []
        for i in range(count):
            pool = pools[hops[i % len(hops)]]
            if not pool:
                raise ValueError(
                    f"{self.id} has too few {hops[i % len(hops)]}-hop chains for {count} questions; ask for fewer, "
                    "or of more worlds"
                )
            questions.append(self._question(pool.pop(), rng.choice(OPENINGS), without=relations.without))
        return questions

    def chains(self, num_hops: int) -> list[Chain]:
        """Returns every chain of `num_hops` facts in which no relation and no entity occurs twice."""
        if num_hops == 0:
            return [((name,), ()) for name in self._kind]
        return [
            ((*entities, value), (*relations, relation))
            for entities, relations in self.chains(num_hops - 1)
            for relation, value in self._facts[entities[-1]].items()
            if relation not in relations and value not in entities
        ]

    def long_question(self, num_hops: int, *, seed: int) -> Question:
        """Returns a question about a random walk of `num_hops` facts. No entity and no three neighbouring relations
        occur twice, so that the last three facts tell how far one has come.

        Raises ValueError when no such walk is found.
        """
        rng = random.Random(f"{seed}:{self.id}:long")
        for _ in range(LONG_WALKS):
            chain = self._walk(num_hops, rng)
            if len(chain[1]) == num_hops:
                return self._question(chain, rng.choice(OPENINGS))
        raise ValueError(
            f"{self.id}: {LONG_WALKS} walks found no chain of {num_hops} facts without repetition; ask for a "
            "shorter one"
        )

    def _walk(self, num_hops: int, rng: random.Random) -> Chain:
        """Draws a chain of `num_hops` facts, or of fewer where it cannot continue."""
        entities, relations = (rng.choice(list(self._kind)),), ()
        while len(relations) < num_hops:
            triples = set(zip(relations, relations[1:], relations[2:], strict=False))
            ways = [
                (relation, value)
                for _, relation, value in self.facts_about(entities[-1])
                if value not in entities and (*relations[-2:], relation) not in triples
            ]
            if not ways:
                break
            relation, value = rng.choice(ways)
            entities, relations = (*entities, value), (*relations, relation)
        return entities, relations

    def _question(self, chain: Chain, opening: str, *, without: frozenset[str] = frozenset()) -> Question:
        """Makes a question whose recall targets are not stated by a relation of `without`."""
        entities, relations = chain
        id = "-".join((self.id, entities[0], *relations))
        described = self._described(entities, random.Random(id))
        return Question(
            id=id,
            text=question_text(chain, opening),
            golden_answers=[entities[-1]],
            source="world",
            partition=self.id,
            num_hops=len(relations),
            evidence=[
                Evidence(passage_id=self._passage_id(entity), value=value) for entity, value in pairwise(entities)
            ],
            context=self._document(described),
            recall_targets=[[value] for value in self._values(described, without) if value != entities[-1]],
        )

    def _described(self, entities: Sequence[str], rng: random.Random) -> list[str]:
        """Returns the entities whose passages make the document: those that the chain needs, in `evidence_order`, among
        others.
        """
        needed = entities[:-1]
        others = rng.sample(
            [name for name in self._kind if name not in needed], max(0, self.document_passages - len(needed))
        )
        places = rng.sample(range(len(needed) + len(others)), len(needed))
        if self.evidence_order != "random":
            places.sort(reverse=self.evidence_order == "reverse")
        for place, name in sorted(zip(places, needed, strict=True)):
            others.insert(place, name)
        return others

    def _values(self, names: Sequence[str], without: frozenset[str]) -> list[str]:
        """Returns the values that the passages about these entities state, in reading order, each once; none that a
        relation of `without` has there.
        """
        facts = [fact for name in names for fact in self.facts_about(name)]
        unseen = {value for _, relation, value in facts if relation in without}
        return list(dict.fromkeys(value for _, _, value in facts if value not in unseen))

    def _document(self, names: Sequence[str]) -> str:
        """Returns the passages about these entities, one a line, filled up with full stops to equal length."""
        texts = [self._passages[name].text for name in names]
        return "\n".join(text + "." * (PASSAGE_TOKENS - 1 - len(re.findall(r"\w+|\.", text))) for text in texts)

    def _passage(self, name: str, rng: random.Random) -> Passage:
        relations = list(RELATIONS[self._kind[name]])
        rng.shuffle(relations)
        clauses = [f"{rng.choice(r.leads)} {r.name} {self._facts[name][r.name]}" for r in relations]
        text = f"The {self._kind[name]} {name} {' and '.join(clauses)}."
        return Passage(id=self._passage_id(name), title=name, text=text, partition=self.id)

    def _passage_id(self, name: str) -> str:
        return f"{self.id}/{name}"


@lru_cache(maxsize=1)  # the start of a run needs the same ones three times
def make_worlds(
    num_train: int,
    *,
    num_held_out: int,
    seed: int,
    document_passages: int = DOCUMENT_PASSAGES,
    evidence_order: EvidenceOrder = "reading",
) -> tuple[list[World], list[World]]:
    """Returns training worlds and held-out worlds, not to be changed; no fact of the latter is true in one of the
    former."""
    world = partial(World, document_passages=document_passages, evidence_order=evidence_order)
    held_out = [world(_derive(seed, "held-out", i), id=f"held-out-{i}") for i in range(num_held_out)]
    forbidden = frozenset().union(*(world.facts for world in held_out))
    train = [world(_derive(seed, "train", i), id=f"train-{i}", forbidden=forbidden) for i in range(num_train)]
    return train, held_out


def make_questions(
    worlds: Sequence[World],
    count: int,
    *,
    seed: int,
    hops: Sequence[int] = (1, 2, 3),
    relations: Relations = ALL_RELATIONS,
    objectives: int = 1,
) -> list[Question]:
    """Returns `count` questions spread evenly over the worlds, in an order that mixes worlds and hop counts. With
    `objectives` above 1 each of them asks that many questions about one world (`join_objectives`).
    """
    shares = [count // len(worlds) + (i < count % len(worlds)) for i in range(len(worlds))]
    questions: list[Question] = []
    for i, (world, share) in enumerate(zip(worlds, shares, strict=True)):
        turned = [hops[(len(questions) + j) % len(hops)] for j in range(len(hops))]
        asked = world.questions(share * objectives, seed=_derive(seed, world.id, i), hops=turned, relations=relations)
        questions += asked if objectives == 1 else join_objectives(asked, objectives=objectives)
    random.Random(seed).shuffle(questions)
    return questions


def question_text(chain: Chain, opening: str) -> str:
    entities, relations = chain
    return opening + " " + "'s ".join((entities[0], *relations)) + "?"


def stated_facts(text: str) -> list[tuple[str, str, str]]:
    """Returns the facts (entity, relation, value) of a passage in order; a name may be a [TARGET]."""
    name = rf"(\w+|{re.escape(TARGET)})"
    passage = re.search(rf"The \w+ {name} (.*)", text)
    if passage is None:
        return []
    names = "|".join(relation_names())
    return [(passage[1], relation, value) for relation, value in re.findall(rf"\b({names}) {name}", passage[2])]


def parse_question(text: str) -> tuple[str, tuple[str, ...]]:
    """Returns the entity that a question starts from and its relations in order.

    Raises ValueError for a question of another form.
    """
    match = re.fullmatch(rf"(?:{'|'.join(OPENINGS)}) (\w+)((?:'s \w+)+)\?", text)
    if match is None:
        raise ValueError(
            f"not a question of the synthetic world: {text!r}; expected e.g. \"What is Velmora's mayor's employer?\""
        )
    return match[1], tuple(match[2].split("'s ")[1:])


def _derive(seed: int, *parts: str | int) -> int:
    """Returns a separate seed for every purpose."""
    return random.Random(f"{seed}:{':'.join(map(str, parts))}").getrandbits(48)
