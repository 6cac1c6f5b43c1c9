"""Scripts that play the agents on questions of the synthetic world, well or badly. The tiny model imitates them before
it learns by itself.

Every agent has a script that writes messages in the agent's own grammar. All scripts note the same list of facts
("known Velmora mayor Osvin;") and make the same errors: they do not note a fact that they read, search without naming
the entity, or answer too early.
"""

from __future__ import annotations

import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from mempipe.data.world import parse_question, stated_facts, words
from mempipe.text import TARGET

TOOL_NAME = "wikipedia_search"
CALL_OPEN = f'<tool_call>{{"name": "{TOOL_NAME}", "arguments": {{"query": "'
CALL_CLOSE = '"}}</tool_call>'
MEMORY_OPEN = "<memory>"
ANSWER_OPEN = "\\boxed{"
NOTHING = "nothing"
KNOWS_NOTHING = f"known {NOTHING}"
FACT_TOKENS = 4
"""Tokens of a fact in a note, for the tiny tokenizer: three names and a semicolon."""
PLAN_TOKENS = 5
"""The most tokens of a memory that come before its first fact ("need mayor of Velmora known")."""

Fact = tuple[str, str, str]
"""Entity, relation, value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Says how often a script errs, as probabilities per decision. Reinforcement learning has to undo exactly this."""

    answer_early: float = 0.2
    """Answer with the last value known although hops are missing (where the agent decides when to answer)."""
    vague_query: float = 0.2
    """Search for the relation without naming the entity."""
    forget: float = 0.65
    """Leave out of the note the fact just read. Above 0.5, so that the most likely note is the useless one."""


NO_NOISE = Noise(answer_early=0.0, vague_query=0.0, forget=0.0)


@dataclass(slots=True, kw_only=True)
class ScriptedAgent(ABC):
    """Writes the messages of one trajectory the way a trained policy would, with mistakes drawn from `noise`.

    `reply` reads nothing but the text that a model would see. The same question, seed and observations give the same
    replies. A memory keeps at most `num_noted` facts, the newest ones unless the script says otherwise; 0: all.
    """

    question: str
    max_turns: int | None = None
    noise: Noise = field(default_factory=Noise)
    seed: int | str = 0
    num_noted: int = 0
    unseen: frozenset[str] = frozenset()
    """Relations whose facts no demonstration may hold (`world.unseen_relations`)."""
    _turn: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed}:{self.question}")

    @property
    def _objectives(self) -> list[tuple[str, tuple[str, ...]]]:
        """Returns the entity that a question starts from and its relations, for each question that is asked."""
        return [parse_question(text) for text in self.question.split("; ")]

    @abstractmethod
    def reply(self, prompt: str) -> str:
        """Returns the next message, without a stop token, after the decoded `prompt` of a context."""

    def _next_query(self, facts: Sequence[Fact]) -> tuple[str, str] | None:
        """Returns the next missing relation and the query for it.

        Returns None to answer: when the chain is complete, when the turns are spent, or early by mistake.
        """
        self._turn += 1
        entity, missing = self._progress(facts)
        if (
            not missing
            or (self.max_turns is not None and self._turn >= self.max_turns)
            or self._chance(self.noise.answer_early)
        ):
            return None
        return missing[0], search_query(missing[0], "" if self._chance(self.noise.vague_query) else entity)

    def _read(self, facts: list[Fact], observation: str) -> list[Fact]:
        """Returns the next missing fact, if it is in the observation and is not forgotten."""
        entity, missing = self._progress(facts)
        if self._chance(self.noise.forget) or not missing:
            return []
        found = re.search(rf"^The \w+ {entity} .*\b{missing[0]} (\w+)", observation, re.MULTILINE)
        return [(entity, missing[0], found[1])] if found else []

    def _searched(self, facts: Sequence[Fact], query: str) -> bool:
        """Returns whether the query asks for the next missing fact; other passages teach nothing."""
        entity, missing = self._progress(facts)
        return bool(missing) and query == search_query(missing[0], entity)

    def _progress(self, facts: Sequence[Fact]) -> tuple[str, tuple[str, ...]]:
        """Returns the entity that the facts lead to, and the relations still to be followed from there. Of several
        objectives it is the first one that misses a relation, or the last one.
        """
        objectives = self._objectives
        if len(objectives) > 1:
            reached = [followed(facts, *objective) for objective in objectives]
            return next((each for each in reached if each[1]), reached[-1])
        [(entity, relations)] = objectives
        if not facts:
            return entity, relations
        noted = tuple(relation for _, relation, _ in facts)
        known = next(end for end in range(len(noted), len(relations) + 1) if relations[end - len(noted) : end] == noted)
        return facts[-1][2], relations[known:]

    def _answer(self, facts: Sequence[Fact]) -> str:
        """Returns the entity that the facts lead to, or one for each objective, joined by "; "."""
        if len(self._objectives) > 1:
            return "; ".join(followed(facts, *objective)[0] for objective in self._objectives)
        return self._progress(facts)[0]

    def _noted(self, facts: list[Fact]) -> list[Fact]:
        return facts[-self.num_noted :]

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


class ScriptedMemSearcher(ScriptedAgent):
    """Writes a thought and a call or a box, and after passages the memory."""

    def reply(self, prompt: str) -> str:
        facts = parse_facts(last_between(prompt, "<memory>", "</memory>"))
        if "<tool_response>" not in prompt:
            wanted = self._next_query(facts)
            return search_call(*wanted) if wanted else f"answer</think>{boxed(self._answer(facts))}"
        new = []
        if self._searched(facts, last_between(prompt, CALL_OPEN, CALL_CLOSE)):
            new = self._read(facts, last_between(prompt, "<tool_response>", "</tool_response>"))
        opened = "" if prompt.endswith(MEMORY_OPEN) else MEMORY_OPEN  # a prompt set may begin the message itself
        return f"{opened}{known(self._noted([*facts, *new]))}</memory>"


class ScriptedMem1(ScriptedAgent):
    """Writes a thought that holds all that is known, and a query or an answer."""

    def reply(self, prompt: str) -> str:
        facts, new = self._facts(prompt)
        return self._message([*facts, *new], noted=self._noted([*facts, *new]))

    def _facts(self, prompt: str) -> tuple[list[Fact], list[Fact]]:
        """Returns the facts of the thoughts in the prompt, and those found since."""
        facts = parse_facts(" ".join(re.findall("<think>(.*?)</think>", prompt)))
        searched = self._searched(facts, last_between(prompt, "<search>", "</search>"))
        return facts, self._read(facts, last_between(prompt, "<information>", "</information>")) if searched else []

    def _message(self, facts: list[Fact], *, noted: Sequence[Fact]) -> str:
        wanted = self._next_query(facts)
        if wanted is None:
            # The space keeps the name the same token as everywhere else.
            return f"<think>{known(noted)} answer</think><answer> {self._answer(facts)}</answer>"
        relation, query = wanted
        return f"<think>{known(noted)} need {relation}</think><search>{query}</search>"


class ScriptedReact(ScriptedMem1):
    """Writes the same, but a thought has only the new facts: earlier thoughts stay readable."""

    def reply(self, prompt: str) -> str:
        facts, new = self._facts(prompt)
        return self._message([*facts, *new], noted=new)


class ScriptedMemAgent(ScriptedAgent):
    """Writes a memory with the fact to search for and the known facts, and at the end a box."""

    def reply(self, prompt: str) -> str:
        facts = parse_facts(last_between(prompt, "<memory>", "</memory>"))
        entity, missing = self._progress(facts)
        if "<information>" not in prompt:
            return boxed(entity)
        plan = f"need {search_query(missing[0], entity)}" if missing else "answer"
        new = self._read(facts, last_between(prompt, "<information>", "</information>"))
        return f"{plan} {known(self._noted([*facts, *new]))}"


class ScriptedFullText(ScriptedAgent):
    """Writes the facts of the text that lead to the answer, one after the other, and a box. A mistake ends the chain
    early: the answer is then the last name that was reached.
    """

    def reply(self, prompt: str) -> str:
        section = last_between(prompt, "<information>", "</information>")
        facts = (fact for line in section.splitlines() for fact in stated_facts(line))
        stated = {(name, relation): value for name, relation, value in facts}
        [(entity, relations)] = self._objectives
        chain: list[Fact] = []
        for relation in relations:
            value = stated.get((entity, relation))
            if value is None or self._chance(self.noise.answer_early) or self._chance(self.noise.forget):
                break
            chain.append((entity, relation, value))
            entity = value
        return f"{known(chain)} {boxed(entity)}"


class ScriptedMemTrain(ScriptedAgent):
    """A memory of all that was read, not only of what the question needs, as long as it fits; at last the facts that
    lead to the answer, and a box. A recall is answered from the memory. Where the memory does not help, the answer is
    "nothing".
    """

    def _noted(self, facts: list[Fact]) -> list[Fact]:
        """Keeps all facts if they fit; else those whose relation the question names, then the newest others."""
        if not self.num_noted or len(facts) <= self.num_noted:
            return facts
        [(_, asked)] = self._objectives
        by_worth = sorted(range(len(facts)), key=lambda place: (facts[place][1] in asked, place))
        return [facts[place] for place in sorted(by_worth[-self.num_noted :])]

    def reply(self, prompt: str) -> str:
        facts = parse_facts(last_between(prompt, "<memory>", "</memory>"))
        section = last_between(prompt, "<information>", "</information>")
        if TARGET in section:
            return boxed(_recalled(facts, section))
        if not section:
            chain = self._chain(facts)
            return f"{known(chain)} {boxed(chain[-1][2])}"
        read = [fact for fact in stated_facts(section) if fact not in facts and fact[1] not in self.unseen]
        return known(self._noted([*facts, *(fact for fact in read if not self._chance(self.noise.forget))]))

    def _chain(self, facts: Sequence[Fact]) -> list[Fact]:
        """Returns the facts that lead to the answer, up to the first one whose value is not known."""
        [(entity, relations)] = self._objectives
        values = {(subject, relation): value for subject, relation, value in facts}
        chain: list[Fact] = []
        for relation in relations:
            chain.append((entity, relation, values.get((entity, relation), NOTHING)))
            entity = chain[-1][2]
            if entity == NOTHING:
                break
        return chain


def followed(facts: Sequence[Fact], entity: str, relations: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Returns the entity that the facts lead to from `entity`, and the relations that are not followed yet."""
    values = {(subject, relation): value for subject, relation, value in facts}
    for place, relation in enumerate(relations):
        if (entity, relation) not in values:
            return entity, relations[place:]
        entity = values[entity, relation]
    return entity, ()


def vocabulary() -> list[str]:
    """Returns every word that worlds and scripts write, names included, sorted."""
    return sorted(words().union(f"{KNOWS_NOTHING} need answer of".split()))


def facts_that_fit(memory_tokens: int) -> int:
    """Returns how many facts fit into a memory after its plan; one at least."""
    return max(1, (memory_tokens - PLAN_TOKENS) // FACT_TOKENS)


def known(facts: Sequence[Fact]) -> str:
    """Returns the facts as a note."""
    return (
        "known" + "".join(f" {entity} {relation} {value};" for entity, relation, value in facts)
        if facts
        else KNOWS_NOTHING
    )


def parse_facts(text: str) -> list[Fact]:
    """Returns the complete facts of a note in order, and passes over anything else in it."""
    return re.findall(r"(\w+) (\w+) (\w+);", text)


def search_query(relation: str, entity: str) -> str:
    return f"{relation} of {entity}" if entity else relation


def search_call(relation: str, query: str) -> str:
    # The same text as json.dumps of the call; the fixed parts around the query are single tokens of the tiny tokenizer.
    return f"need {relation}</think>{CALL_OPEN}{json.dumps(query)[1:-1]}{CALL_CLOSE}"


def boxed(entity: str) -> str:
    # The space keeps the name the same token as everywhere else.
    return f"{ANSWER_OPEN} {entity}}}"


def _recalled(facts: Sequence[Fact], section: str) -> str:
    """Returns the name that a known fact puts in the place of [TARGET]."""
    for asked in stated_facts(section):
        for fact in facts:
            hidden = [value for name, value in zip(asked, fact, strict=True) if name == TARGET]
            if hidden and all(name in (TARGET, value) for name, value in zip(asked, fact, strict=True)):
                return hidden[0]
    return NOTHING


def last_between(text: str, start: str, end: str) -> str:
    """Returns the text between the last `end` and the `start` before it, stripped; "" when there is none."""
    head, found, _ = text.rpartition(end)
    return head.rpartition(start)[2].strip() if found and start in head else ""
