"""Scripts that play agents on questions made of real text, as well or as badly as wanted.

A script reads only what a model would read: the question, its memory, and passages. What the question was made of tells
it what to look for (the evidence of a cloze question, the entities of a masked document); what it notes is copied from
the passages, in the words around it. Its faults are what reinforcement learning can mend.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mempipe.data.scripted_agents import NO_NOISE, Noise, last_between
from mempipe.masking.cloze import GAP, LINK
from mempipe.masking.entities import RuleFinder
from mempipe.spelling import written
from mempipe.text import TARGET
from mempipe.types import Question

KNOWS_NOTHING = "nothing yet"
UNKNOWN = "unknown"
"""Answers a recall that the memory does not help with."""
_FINDER = RuleFinder()
_MAX_QUERY_WORDS = 10
_WORD = re.compile(r"\w[\w'’.-]*")
_IS = " = "
"""Separates the title of a passage from its note."""
_MAX_LINES = 10
_NUM_WORDS = 4
"""Words before the mask, and after it, that are noted."""


@dataclass(slots=True, kw_only=True)
class Demonstration(ABC):
    """The messages of one trajectory about one question. The same question, seed and prompts give the same messages."""

    question: Question
    agent: Mapping[str, Any] = field(default_factory=dict)  # its settings
    noise: Noise = NO_NOISE
    seed: int | str = 0
    max_turns: int | None = None
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed}:{self.question.id}")

    @staticmethod
    @abstractmethod
    def can_play(question: Question) -> bool:
        """Whether the question says what the script must know."""

    @abstractmethod
    def reply(self, prompt: str) -> str:
        """Returns the next message after the decoded prompt of a context, without what the harness writes before it."""

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


@dataclass(slots=True, kw_only=True)
class ClozeDemonstration(Demonstration):
    """MemSearcher on a question of `mempipe.masking.cloze`."""

    _turn: int = 0

    @staticmethod
    def can_play(question: Question) -> bool:
        return bool(question.evidence) and GAP in question.text  # other questions with evidence have no gap

    def reply(self, prompt: str) -> str:
        if "<tool_response>" not in prompt:
            return self._act(last_between(prompt, "<memory>", "</memory>"))
        return self._remember(prompt)

    def _act(self, memory: str) -> str:
        self._turn += 1
        missing = self._missing(memory)
        last = self.max_turns is not None and self._turn >= self.max_turns
        if not missing or last or self._chance(self.noise.answer_early):
            named = self._names(self._part(missing)) if missing else self.question.golden_answers
            return f"the gap is known</think>{_boxed(named[0] if named else KNOWS_NOTHING)}"
        query = self._query(missing, memory)
        call = f'{{"name": "wikipedia_search", "arguments": {{"query": "{query}"}}}}'
        return f"I need {missing}</think><tool_call>{call}</tool_call>"

    def _remember(self, prompt: str) -> str:
        head, _, observation = prompt.rpartition("<tool_response>")
        memory = last_between(head, "<memory>", "</memory>")
        missing = self._missing(memory)
        fact = self._fact(missing, observation)
        if not missing or fact is None or self._chance(self.noise.forget):
            return f"{memory}</memory>"
        notes = [] if memory == KNOWS_NOTHING else [memory]
        return f"{'; '.join([*notes, fact])}</memory>"

    def _missing(self, memory: str) -> str:
        """The mark that is not known yet: of the link first, then of the gap; "" when both are."""
        marks = [LINK, GAP] if self.question.num_hops == 2 else [GAP]
        for mark, fact in zip(marks, self.question.evidence, strict=True):
            if fact.value not in memory:
                return mark
        return ""

    def _fact(self, mark: str, observation: str) -> str | None:
        """The fact behind the mark as the passages write it; None when it is not there."""
        if not mark:
            return None
        value = self.question.evidence[0 if mark == LINK else -1].value
        if value not in observation:
            return None
        return self._part(mark).replace(mark, f"[{value}]", 1)

    def _query(self, mark: str, memory: str) -> str:
        part = self._part(mark)
        if mark == GAP and self.question.num_hops == 2:
            part = part.replace(LINK, self.question.evidence[0].value)
        words = [w for name in self._names(part) for w in name.split()] or _WORD.findall(part.replace(mark, " "))
        words = list(dict.fromkeys(word for word in words if word != "X"))
        if self._chance(self.noise.vague_query):
            words = words[-1:]
        return " ".join(words[:_MAX_QUERY_WORDS]).replace('"', "")

    def _part(self, mark: str) -> str:
        """The sentence that contains the mark."""
        parts = self.question.text.split(f" / {LINK}: ")
        return parts[0] if mark == LINK or len(parts) == 1 else f"{LINK}: {parts[1]}"

    @staticmethod
    def _names(text: str) -> list[str]:
        return [entity.text for entity in _FINDER.find([text.replace(GAP, "____")])[0]]


@dataclass(slots=True, kw_only=True)
class ReadingDemonstration(Demonstration):
    """MemTrain on a document of `mempipe.masking.documents`.

    Its memory has a line for every entity that a recall may ask for, under the title of its passage, and for the mask,
    with the words around it. A recall is answered from the line of the target's passage. What the mask stands for is
    nowhere to be read, so the script knows it.
    """

    @staticmethod
    def can_play(question: Question) -> bool:
        return bool(question.context and question.recall_targets)

    def reply(self, prompt: str) -> str:
        memory = last_between(prompt, "<memory>", "</memory>")
        section = last_between(prompt, "<section>", "</section>")
        if not section:
            return _boxed(self.question.golden_answers[0])
        if TARGET in section:
            return _boxed(self._recalled(memory, section))
        noted = [line for line in memory.splitlines() if _IS in line]
        new = [line for line in self._lines(section) if line not in noted and not self._chance(self.noise.forget)]
        return "\n".join([*noted, *new][-_MAX_LINES:]) or KNOWS_NOTHING

    def _lines(self, section: str) -> list[str]:
        """Returns what to note of a section, in its order."""
        mask, lines = self.agent["mask"], []
        for subject, text in _passages(section):
            places = [written(text, target)[:1] for target in self.question.recall_targets]
            notes = {start: text[start:end] for place in places for start, end in place}
            if (start := text.find(mask)) >= 0:
                before, after = text[:start].split(), text[start + len(mask) :].split()
                notes[start] = " ".join([*before[-_NUM_WORDS:], mask, *after[:_NUM_WORDS]])
            lines += [f"{subject}{_IS}{notes[start]}" for start in sorted(notes)]
        return lines

    def _recalled(self, memory: str, section: str) -> str:
        subjects = [subject for subject, text in _passages(section) if TARGET in text]
        for line in memory.splitlines():
            subject, _, value = line.partition(_IS)
            if subject in subjects and self.agent["mask"] not in value:
                return value
        return UNKNOWN


def _passages(section: str) -> Iterator[tuple[str, str]]:
    """Yields title and text of every passage; the title of one whose beginning another section has is "..."."""
    for passage in section.split("\n\n"):
        title, found, text = passage.strip().partition("\n")
        yield (title, text) if found else ("...", title)


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
