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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mempipe.data.objectives import joinable
from mempipe.data.scripted_agents import MEMORY_OPEN, NO_NOISE, TOOL_NAME, Noise, last_between
from mempipe.facts import facts_by_objective, golden_by_objective
from mempipe.masking.cloze import GAP, LINK, SECOND_SENTENCE
from mempipe.masking.entities import RuleFinder
from mempipe.spelling import is_written, written
from mempipe.text import TARGET
from mempipe.types import Evidence, Question

KNOWS_NOTHING = "nothing yet"
UNKNOWN = "unknown"
"""Answers a recall that the memory does not help with, and is noted for a fact that a search did not find."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """A fact that a cloze question asks for."""

    mark: str
    """GAP or LINK."""
    sentence: str
    """As the question writes it, with the mark."""
    value: str
    link: str = ""
    """Value of the sentence's other mark."""

    @property
    def known(self) -> str:
        """Returns the sentence with the value of its other mark, which is filled first."""
        return self.sentence.replace(LINK, self.link) if self.link else self.sentence

    def whole_note(self) -> str:
        return self.sentence.replace(self.mark, f"[{self.value}]", 1)

    def short_note(self, value: str) -> str:
        """Returns the value in brackets with the words around it."""
        return self.around(f"[{value}]")

    def around(self, filling: str) -> str:
        """Returns the filling, and _NUM_WORDS words of the sentence on each side of it, without the semicolons that
        separate notes."""
        before, _, after = self.known.replace(";", "").partition(self.mark)
        return " ".join([*before.split()[-_NUM_WORDS:], filling, *after.split()[:_NUM_WORDS]])


@dataclass(slots=True, kw_only=True)
class ClozeDemonstration(Demonstration):
    """The base of the scripts that search for the gaps of a question of `mempipe.masking.cloze`.

    Of several objectives it fills one gap after the other, and a thought names the next one by the words around it. So
    that a memory holds all of them, its notes are the few words around each gap, and it notes that a search has not
    found a fact, so that the next objective has its turn.
    """

    _turn: int = 0
    _objectives: list[list[_Gap]] = field(init=False)
    """The gaps of each objective, in the order in which they can be filled."""

    def __post_init__(self) -> None:
        super(ClozeDemonstration, self).__post_init__()
        self._objectives = [
            _gaps(text, facts)
            for text, facts in zip(_separate(self.question), facts_by_objective(self.question), strict=True)
        ]

    @staticmethod
    def can_play(question: Question) -> bool:
        # Other questions with evidence have no gap.
        texts, facts = _separate(question), facts_by_objective(question)
        return len(texts) == len(facts) and all(facts) and all(GAP in text for text in texts)

    @property
    def _are_several(self) -> bool:
        return len(self._objectives) > 1

    def _next(self, known: str) -> tuple[str, str] | None:
        """Returns the gap that is missing from the notes, in words, and the query for it; None to answer: when all is
        known, when the turns are spent, or early by mistake."""
        self._turn += 1
        gap = self._missing(known)
        last = self.max_turns is not None and self._turn >= self.max_turns
        if gap is None or last or self._chance(self.noise.answer_early):
            return None
        return gap.around(gap.mark) if self._are_several else gap.mark, self._query(gap)

    def _answer(self, known: str) -> str:
        """Returns the golden answer of every objective whose facts are all in the notes, else a name of its text."""
        answers = []
        for gaps, golden in zip(self._objectives, golden_by_objective(self.question), strict=True):
            missing = next((gap for gap in gaps if gap.value not in known), None)
            answers.append(joinable(golden) if missing is None else self._guess(missing))
        return "; ".join(answers)

    def _guess(self, missing: _Gap) -> str:
        return next(iter(self._names(missing.sentence)), KNOWS_NOTHING)

    def _read(self, known: str, observation: str) -> str | None:
        """Returns the note of the missing fact if the passages have it and it is not forgotten."""
        gap = self._missing(known)
        if gap is None or not observation:
            return None
        if gap.value in observation:
            note = gap.short_note(gap.value) if self._are_several else gap.whole_note()
        elif self._are_several:
            note = gap.short_note(UNKNOWN)
        else:
            return None
        return None if self._chance(self.noise.forget) else note

    def _missing(self, known: str) -> _Gap | None:
        """Returns the next gap that is neither known nor given up; None when there is no such gap."""
        for gaps in self._objectives:
            gap = next((gap for gap in gaps if gap.value not in known), None)
            if gap is not None and gap.short_note(UNKNOWN) not in known:
                return gap
        return None

    def _query(self, gap: _Gap) -> str:
        words = [w for name in self._names(gap.known) for w in name.split()]
        words = words or _WORD.findall(gap.known.replace(gap.mark, " "))
        words = list(dict.fromkeys(word for word in words if word != "X"))
        if self._chance(self.noise.vague_query):
            words = words[-1:]
        return " ".join(words[:_MAX_QUERY_WORDS]).replace('"', "")

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


def _separate(question: Question) -> list[str]:
    """Returns the text of each objective. A text that cannot be told from its neighbour gives another number."""
    if not question.objectives:
        return [question.text]
    return question.text.removesuffix("?").split("?; ")


def _gaps(text: str, facts: Sequence[Evidence]) -> list[_Gap]:
    """Returns the gap of a question about one sentence, or link and gap of one about two."""
    described, _, about = text.partition(SECOND_SENTENCE)
    *links, answer = (fact.value for fact in facts)
    if not (links and about):
        return [_Gap(mark=GAP, sentence=text, value=answer)]
    (link,) = links
    return [
        _Gap(mark=LINK, sentence=described, value=link),
        _Gap(mark=GAP, sentence=f"{LINK}: {about}", value=answer, link=link),
    ]


def _passages(section: str) -> Iterator[tuple[str, str]]:
    """Yields title and text of every passage; the title of one whose beginning another section has is "..."."""
    for passage in section.split("\n\n"):
        title, found, text = passage.strip().partition("\n")
        yield (title, text) if found else ("...", title)


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
