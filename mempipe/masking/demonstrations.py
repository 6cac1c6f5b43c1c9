"""A script that answers questions with known evidence in an agent's own words, as well or as badly as wanted.

It reads only what a model would read: the question and, in the observation, the passages. From the evidence it knows
which fact to look for; what it notes is the fact in the words around it, copied from the passage. Its faults are what
reinforcement learning can mend.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from mempipe.data.scripted_agents import NO_NOISE, Noise
from mempipe.masking.cloze import GAP, LINK
from mempipe.masking.entities import RuleFinder
from mempipe.types import Question

KNOWS_NOTHING = "nothing yet"
_FINDER = RuleFinder()
_MAX_QUERY_WORDS = 10
_WORD = re.compile(r"\w[\w'’.-]*")


@dataclass(slots=True, kw_only=True)
class Demonstration:
    """The messages of one MemSearcher trajectory about a question of `mempipe.masking.cloze`."""

    question: Question
    noise: Noise = NO_NOISE
    seed: int | str = 0
    max_turns: int | None = None
    style: str = "marked"
    _turn: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.seed}:{self.question.id}")

    def reply(self, prompt: str) -> str:
        """The next message after the decoded prompt of a context, without what the harness writes before it."""
        if "<tool_response>" not in prompt:
            return self._act(_last_between(prompt, "<memory>", "</memory>"))
        return self._remember(prompt)

    def _act(self, memory: str) -> str:
        self._turn += 1
        missing = self._missing(memory)
        last = self.max_turns is not None and self._turn >= self.max_turns
        if not missing or last or self._chance(self.noise.answer_early):
            answer = (
                self.question.golden_answers[0]
                if not missing
                else (self._names(self._part(missing)) or [KNOWS_NOTHING])[0]
            )
            return f"the gap is known</think>\\boxed{{{answer}}}"
        query = self._query(missing, memory)
        call = f'{{"name": "wikipedia_search", "arguments": {{"query": "{query}"}}}}'
        return f"I need {missing}</think><tool_call>{call}</tool_call>"

    def _remember(self, prompt: str) -> str:
        head, _, observation = prompt.rpartition("<tool_response>")
        memory = _last_between(head, "<memory>", "</memory>")
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
        if self.style == "fact":
            return f"{mark} = {value}"
        left = self._part(mark).partition(mark)[0].split()[-4:]
        if self.style == "words":
            return f"{mark} = {' '.join([*left, value])}"
        if self.style == "marked":
            return self._part(mark).replace(mark, f"[{value}]", 1)
        return self._part(mark).replace(mark, value)

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
        """The sentence that the mark stands in."""
        parts = self.question.text.split(f" / {LINK}: ")
        return parts[0] if mark == LINK or len(parts) == 1 else f"{LINK}: {parts[1]}"

    @staticmethod
    def _names(text: str) -> list[str]:
        return [entity.text for entity in _FINDER.find([text.replace(GAP, "____")])[0]]

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


def _last_between(text: str, start: str, end: str) -> str:
    """Returns what stands between the last `end` and the `start` before it, stripped; "" when there is none."""
    head, found, _ = text.rpartition(end)
    return head.rpartition(start)[2].strip() if found and start in head else ""
