"""Scripts that play agents on questions made of real text, as well or as badly as wanted.

A script reads only what a model would read: the question, its memory, and passages. What the question was made of tells
it what to look for (the evidence of a cloze question, the entities of a masked document); what it notes is copied from
the passages, in the words around it. Its faults are what reinforcement learning can mend.
"""

from __future__ import annotations

import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mempipe.data.scripted_agents import MEMORY_OPEN, NO_NOISE, TOOL_NAME, Noise, last_between
from mempipe.masking.cloze import GAP, LINK
from mempipe.masking.entities import RuleFinder
from mempipe.spelling import is_written, written
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
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
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
        """Returns whether the question holds the facts that the script needs."""

    @abstractmethod
    def reply(self, prompt: str) -> str:
        """Returns the next message after the decoded prompt of a context, without the text that the harness writes
        before it."""

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


@dataclass(slots=True, kw_only=True)
class ClozeDemonstration(Demonstration):
    """The base of the scripts that search for the gap of a question of `mempipe.masking.cloze`."""

    _turn: int = 0

    @staticmethod
    def can_play(question: Question) -> bool:
        # Other questions with evidence have no gap, and joined ones have a gap for each objective.
        return bool(question.evidence) and GAP in question.text and not question.objectives

    def _next(self, known: str) -> tuple[str, str] | None:
        """Returns the mark that is missing from the notes and the query for it; None to answer: when all is known, when
        the turns are spent, or early by mistake."""
        self._turn += 1
        missing = self._missing(known)
        last = self.max_turns is not None and self._turn >= self.max_turns
        if not missing or last or self._chance(self.noise.answer_early):
            return None
        return missing, self._query(missing)

    def _answer(self, known: str) -> str:
        """Returns the golden answer where the notes have all facts, else a name of the question."""
        missing = self._missing(known)
        named = self._names(self._part(missing)) if missing else self.question.golden_answers
        return named[0] if named else KNOWS_NOTHING

    def _read(self, known: str, observation: str) -> str | None:
        """Returns the missing fact if the passages have it and it is not forgotten."""
        missing = self._missing(known)
        fact = self._fact(missing, observation)
        return None if not missing or fact is None or self._chance(self.noise.forget) else fact

    def _missing(self, memory: str) -> str:
        """Returns the mark that is not known yet: of the link first, then of the gap; "" when both are."""
        marks = [LINK, GAP] if self.question.num_hops == 2 else [GAP]
        for mark, fact in zip(marks, self.question.evidence, strict=True):
            if fact.value not in memory:
                return mark
        return ""

    def _fact(self, mark: str, observation: str) -> str | None:
        """Returns the fact behind the mark as the passages write it; None when it is not there."""
        if not mark:
            return None
        value = self.question.evidence[0 if mark == LINK else -1].value
        if value not in observation:
            return None
        return self._part(mark).replace(mark, f"[{value}]", 1)

    def _query(self, mark: str) -> str:
        part = self._part(mark)
        if mark == GAP and self.question.num_hops == 2:
            part = part.replace(LINK, self.question.evidence[0].value)
        words = [w for name in self._names(part) for w in name.split()] or _WORD.findall(part.replace(mark, " "))
        words = list(dict.fromkeys(word for word in words if word != "X"))
        if self._chance(self.noise.vague_query):
            words = words[-1:]
        return " ".join(words[:_MAX_QUERY_WORDS]).replace('"', "")

    def _part(self, mark: str) -> str:
        """Returns the sentence that contains the mark."""
        parts = self.question.text.split(f" / {LINK}: ")
        return parts[0] if mark == LINK or len(parts) == 1 else f"{LINK}: {parts[1]}"

    @staticmethod
    def _names(text: str) -> list[str]:
        return [entity.text for entity in _FINDER.find([text.replace(GAP, "____")])[0]]


class ClozeMemSearcher(ClozeDemonstration):
    """Writes a thought and a call or a box, and after passages the memory."""

    def reply(self, prompt: str) -> str:
        head, searched, observation = prompt.rpartition("<tool_response>")
        memory = last_between(head if searched else prompt, "<memory>", "</memory>")
        if searched:
            notes = [note for note in (memory, self._read(memory, observation)) if note and note != KNOWS_NOTHING]
            opened = "" if prompt.endswith(MEMORY_OPEN) else MEMORY_OPEN
            return f"{opened}{'; '.join(notes) or KNOWS_NOTHING}</memory>"
        wanted = self._next(memory)
        if wanted is None:
            return f"the gap is known</think>{_boxed(self._answer(memory))}"
        missing, query = wanted
        tool = self.agent.get("tool_name", TOOL_NAME)
        call = json.dumps({"name": tool, "arguments": {"query": query}}, ensure_ascii=False)
        return f"I need {missing}</think><tool_call>{call}</tool_call>"


class ClozeMem1(ClozeDemonstration):
    """Writes a thought that holds all notes, and a query or an answer."""

    def reply(self, prompt: str) -> str:
        notes = self._notes(prompt)
        fact = self._read("; ".join(notes), last_between(prompt, "<information>", "</information>"))
        return self._message([*notes, fact] if fact else notes, fact)

    def _message(self, notes: list[str], new: str | None) -> str:
        known = "; ".join(notes)
        thought = "".join(f"{note}; " for note in self._thought(notes, new))
        wanted = self._next(known)
        if wanted is None:
            return f"<think>{thought}the gap is known</think><answer>{self._answer(known)}</answer>"
        missing, query = wanted
        return f"<think>{thought}I need {missing}</think><search>{query}</search>"

    def _thought(self, notes: list[str], new: str | None) -> list[str]:
        """Returns the notes that the next thought repeats."""
        return notes

    @staticmethod
    def _notes(prompt: str) -> list[str]:
        """Returns the notes of the thoughts in the prompt, whose last part is a plan. The prompt's own words may name
        the opening tag."""
        thoughts = (block.rpartition("<think>")[2] for block in prompt.split("</think>")[:-1])
        return [note for thought in thoughts for note in thought.split("; ")[:-1]]


class ClozeReact(ClozeMem1):
    """Writes the same, but a thought has only the new fact: earlier thoughts stay readable."""

    def _thought(self, notes: list[str], new: str | None) -> list[str]:
        return [new] if new else []


@dataclass(slots=True, kw_only=True)
class ReadingMemAgent(Demonstration):
    """MemAgent on a question whose text writes the answer.

    Its memory has the sentences that write a value of the evidence or a golden answer, in the words of the text. It
    answers when the memory writes a golden answer.
    """

    @staticmethod
    def can_play(question: Question) -> bool:
        return bool(question.context) and is_written(question.context, question.golden_answers)

    def reply(self, prompt: str) -> str:
        memory = last_between(prompt, "<memory>", "</memory>")
        section = last_between(prompt, "<section>", "</section>")
        golden = self.question.golden_answers
        if not section:
            return _boxed(golden[0] if is_written(memory, golden) else KNOWS_NOTHING)
        noted = self._telling(memory.splitlines())
        found = self._telling(_SENTENCE_END.split(section))
        new = [sentence for sentence in found if sentence not in noted and not self._chance(self.noise.forget)]
        return "\n".join([*noted, *new][-_MAX_LINES:]) or KNOWS_NOTHING

    def _telling(self, sentences: Iterable[str]) -> list[str]:
        values = [*(fact.value for fact in self.question.evidence), *self.question.golden_answers]
        return [sentence.strip() for sentence in sentences if is_written(sentence, values)]


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
        """Returns the lines to note from a section, in its order."""
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
