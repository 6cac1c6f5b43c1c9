"""Measures how well an agent uses its memory, on recorded trajectories: what it found, kept and lost, and whether it
answered too early.

Definitions. `Question.evidence` lists the facts in the order of need; a fact is *known* in a text when the words of
its value occur there next to each other (`contains_value`). It is *found* in a turn when a search returned its passage,
or when the turn read a chunk that knows it. In a turn, the *next needed* fact is the first one that `memory_before`
does not know. A *memory turn* is a turn that wrote a memory or was required to write one: it left a memory, was
followed by another turn, or searched and did not answer (where MEM1 answers, it reads its last passages and notes them
nowhere). A question has one *objective*, a joined question (`Question.objectives`) several. The facts of each are a
separate chain with a next needed fact, and each has an answer.

    found_rate         turns whose searches returned the passage of the next needed fact of any objective
                       / turns that searched while a fact was needed
    kept_rate          facts of the denominator that memory_after knows
                       / needed facts not yet known that a memory turn found
    lost_rate          facts of the denominator that memory_after does not know
                       / needed facts known in memory_before, over memory turns
    early_answer_rate  answers although no memory of the trajectory ever knew the last needed fact of their objective
                       and the answering turn did not find it
                       / answers
    answer_in_memory   objectives with a golden answer that the new memory knows / objectives, over memory turns
    truncation_rate    memory turns whose memory was cut / memory turns
    memory_tokens      tokens of the memories that memory turns left / memory turns
    budget_use         memory_tokens / budget.memory_tokens
    copy_rate          words of new memories inside runs of at least 5 words that occur in the turn's passages
                       or chunk
                       / words of new memories
    compression        tokens of new memories / tokens of the passages or chunks read, over memory turns
    irrelevant_rate    words of new memories that occur neither in the question, nor in the value of a needed fact, nor
                       in a needed passage that was read by then, nor in the memory that the attempt began with
                       (the empty memory of a prompt, such as "known nothing")
                       / words of new memories, over questions with evidence
    contradiction_rate statements of the denominator that do not hold the fact's value
                       / statements of new memories about needed facts whose passages were read by then

A *statement about a fact* is a part of a memory, up to a full stop, a semicolon or a line's end, that holds the title
of the fact's passage and its *cue*: the last word of four letters or more before the value in the passage's sentence
("born" in "Ann Lee was born in Oslo"). A value without a cue, or without a sentence, is not looked for.

All are ratios of sums over the trajectories that are put together, never means of ratios; a ratio without a case is
absent. Questions without evidence count for the answer, memory tokens, truncation, copying and compression only. A
fact that two objectives need counts for each. If an objective has no evidence, its question does not count for
`found_rate` and `irrelevant_rate`, since a search or a word may be for that objective.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mempipe.facts import (
    contains_value,
    finds,
    golden_by_objective,
    is_memory_turn,
    places_by_objective,
    spaced,
    words_of,
)
from mempipe.rl.rewards import split_answers
from mempipe.types import Context, EndReason, Evidence, Group, Passage, Question, Trajectory

_COPY_WORDS = 5
_CUE_LETTERS = 4
_SENTENCE_END = re.compile(r"[.;](?:\s+|$)|[。；]|\n+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuality:
    """Counts that the rates are made of. Counts of several trajectories add up."""

    searches_in_need: int = 0
    searches_found: int = 0
    facts_retrieved: int = 0
    facts_kept: int = 0
    facts_held: int = 0
    facts_lost: int = 0
    answers: int = 0
    early_answers: int = 0
    answers_asked: int = 0
    answers_in_memory: int = 0
    memory_turns: int = 0
    memories_truncated: int = 0
    memory_tokens: int = 0
    observation_tokens: int = 0
    memory_words: int = 0
    copied_words: int = 0
    judged_words: int = 0
    irrelevant_words: int = 0
    statements: int = 0
    contradictions: int = 0

    def __add__(self, other: MemoryQuality) -> MemoryQuality:
        return MemoryQuality(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)}
        )

    def rates(self, *, memory_budget: int | None = None) -> dict[str, float]:
        """Returns the rates of the module's docstring; `memory_budget` in tokens (None: no `budget_use`)."""
        ratios = self.ratios(memory_budget=memory_budget)
        return {name: above / below for name, (above, below) in ratios.items() if below}

    def ratios(self, *, memory_budget: int | None = None) -> dict[str, tuple[int, int]]:
        """Returns the counts of each rate: (numerator, denominator)."""
        return {
            "found_rate": (self.searches_found, self.searches_in_need),
            "kept_rate": (self.facts_kept, self.facts_retrieved),
            "lost_rate": (self.facts_lost, self.facts_held),
            "early_answer_rate": (self.early_answers, self.answers),
            "answer_in_memory": (self.answers_in_memory, self.answers_asked),
            "truncation_rate": (self.memories_truncated, self.memory_turns),
            "memory_tokens": (self.memory_tokens, self.memory_turns),
            "budget_use": (self.memory_tokens, self.memory_turns * (memory_budget or 0)),
            "copy_rate": (self.copied_words, self.memory_words),
            "compression": (self.memory_tokens, self.observation_tokens),
            "irrelevant_rate": (self.irrelevant_words, self.judged_words),
            "contradiction_rate": (self.contradictions, self.statements),
        }


def memory_quality(groups: Iterable[Group], *, memory_budget: int | None = None) -> dict[str, float]:
    """Returns the rates over all trajectories of `groups`."""
    counts = (trajectory_quality(trajectory, group.question) for group in groups for trajectory in group.trajectories)
    return sum(counts, MemoryQuality()).rates(memory_budget=memory_budget)


def trajectory_quality(
    trajectory: Trajectory, question: Question, turns: Sequence[MemoryQuality] | None = None
) -> MemoryQuality:
    """Returns the counts of one trajectory; `turns` are its `turn_qualities` where the caller has them."""
    counts = sum(turn_qualities(trajectory, question) if turns is None else turns, MemoryQuality())
    memories = [text for context in trajectory.contexts for text in (context.memory_before, context.memory_after)]
    for places, answered in zip(places_by_objective(question), _answered(trajectory, question), strict=True):
        if answered and places:
            last = question.evidence[places[-1]]
            found = any(finds(context, last) for context in trajectory.contexts[-1:])  # a user's agent may have none
            known = found or any(contains_value(text, last.value) for text in memories)
            counts += MemoryQuality(answers=1, early_answers=int(not known))
    return counts


def _answered(trajectory: Trajectory, question: Question) -> list[bool]:
    """Returns for each objective whether the trajectory gave it an answer."""
    ended = trajectory.end_reason is EndReason.ANSWERED
    if not question.objectives:
        return [ended]
    parts = split_answers(trajectory.answer or "", len(question.objectives))
    return [ended and part is not None for part in parts]


def turn_qualities(trajectory: Trajectory, question: Question) -> list[MemoryQuality]:
    """Returns the counts of every turn; answers are counted by `trajectory_quality` alone."""
    turns = []
    read: dict[str, Passage] = {}
    for index, context in enumerate(trajectory.contexts):
        wrote = is_memory_turn(trajectory, index)
        counts = _evidence_counts(context, question, wrote=wrote)
        read |= {passage.id: passage for search in context.searches for passage in search.passages}
        if wrote:
            counts += _memory_counts(context) + _answer_counts(context, question)
            counts += _relevance_counts(
                context.memory_after, question, read, first=trajectory.contexts[0].memory_before
            )
        turns.append(counts)
    return turns


def _evidence_counts(context: Context, question: Question, *, wrote: bool) -> MemoryQuality:
    known = [contains_value(context.memory_before, fact.value) for fact in question.evidence]
    known_after = [contains_value(context.memory_after, fact.value) for fact in question.evidence]
    found = [finds(context, fact) for fact in question.evidence]
    chains = places_by_objective(question)
    missing = [[place for place in places if not known[place]] for places in chains]
    next_needed = [places[0] for places in missing if places] if all(chains) else []
    searched = bool(context.searches and next_needed)
    facts = range(len(known)) if wrote else ()
    new = [index for index in facts if found[index] and not known[index]]
    held = [index for index in facts if known[index]]
    return MemoryQuality(
        searches_in_need=int(searched),
        searches_found=int(searched and any(found[place] for place in next_needed)),
        facts_retrieved=len(new),
        facts_kept=sum(known_after[index] for index in new),
        facts_held=len(held),
        facts_lost=sum(not known_after[index] for index in held),
    )


def _memory_counts(context: Context) -> MemoryQuality:
    memory = words_of(context.memory_after)
    read = [f"{passage.title} {passage.text}" for search in context.searches for passage in search.passages]
    return MemoryQuality(
        memory_turns=1,
        memories_truncated=int(context.memory_truncated),
        memory_tokens=context.num_new_memory_tokens,
        observation_tokens=context.num_observation_tokens,
        memory_words=len(memory),
        copied_words=_num_copied(memory, [words_of(text) for text in [*read, context.chunk]]),
    )


def _answer_counts(context: Context, question: Question) -> MemoryQuality:
    golds = [answers for answers in golden_by_objective(question) if answers]
    held = [any(contains_value(context.memory_after, answer) for answer in answers) for answers in golds]
    return MemoryQuality(answers_asked=len(held), answers_in_memory=sum(held))


def _relevance_counts(memory: str, question: Question, read: Mapping[str, Passage], *, first: str) -> MemoryQuality:
    if not question.evidence:
        return MemoryQuality()
    needed = [(fact, read[fact.passage_id]) for fact in question.evidence if fact.passage_id in read]
    texts = [question.text, first, *(fact.value for fact in question.evidence)]
    texts += [text for _, passage in needed for text in (passage.title, passage.text)]
    relevant = {word for text in texts for word in words_of(text)}
    words = words_of(memory) if all(places_by_objective(question)) else ()
    held = [(statement, fact.value) for fact, passage in needed for statement in _statements(memory, fact, passage)]
    return MemoryQuality(
        judged_words=len(words),
        irrelevant_words=sum(word not in relevant for word in words),
        statements=len(held),
        contradictions=sum(not contains_value(statement, value) for statement, value in held),
    )


def contradicts(memory: str, fact: Evidence, passage: Passage) -> bool:
    """Returns whether a statement of the memory about the fact, which `passage` states, does not hold its value."""
    return any(not contains_value(statement, fact.value) for statement in _statements(memory, fact, passage))


def _statements(memory: str, fact: Evidence, passage: Passage) -> list[str]:
    """Returns the parts of a memory that are about the fact."""
    cue = _cue(fact, passage)
    return [part for part in _SENTENCE_END.split(memory) if cue and passage.title and _is_about(part, passage, cue)]


def _is_about(text: str, passage: Passage, cue: str) -> bool:
    return contains_value(text, passage.title) and cue in words_of(text)


def _cue(fact: Evidence, passage: Passage) -> str:
    """Returns the last longer word before the value in the first sentence that holds it; "" where there is none."""
    value = spaced(words_of(fact.value))
    for sentence in _SENTENCE_END.split(passage.text):
        before, found, _ = spaced(words_of(sentence)).partition(value)
        if found and words_of(fact.value):
            return next((word for word in reversed(before.split()) if len(word) >= _CUE_LETTERS), "")
    return ""


def _num_copied(words: Sequence[str], sources: Sequence[Sequence[str]]) -> int:
    known = {run for source in sources for run in _runs(source)}
    copied: set[int] = set()
    for start, run in enumerate(_runs(words)):
        if run in known:
            copied.update(range(start, start + _COPY_WORDS))
    return len(copied)


def _runs(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields every run of `_COPY_WORDS` consecutive words."""
    return zip(*(words[offset:] for offset in range(_COPY_WORDS)), strict=False)
