"""Example trajectories of a report: the same questions before and after training, turn by turn, and how the memory
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mempipe.data.partitions import main_partition
from mempipe.evaluation.metrics import right_answers
from mempipe.facts import finds, golden_by_objective
from mempipe.reports.pages import cut
from mempipe.reports.steps import UNKNOWN_AGENT, ActionText, Step, shown_contexts
from mempipe.text import changed_runs
from mempipe.types import Context, Group, Question, Trajectory

_NUM_EXAMPLES = 3
_MAX_CHARS = 1500  # of a message, a memory
_MAX_PASSAGE_CHARS = 220
_MAX_COMPARED = 10_000  # characters of a memory; the time to compare two grows with their product

Words = list[tuple[str, str]]
"""(kind, text) with the kinds "kept", "added" and "dropped"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPassage:
    title: str
    text: str
    needed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """A turn as a page shows it."""

    number: int
    last: int  # the last of the turns that were the same as this one, `number` where the next one differs
    sizes: str
    thought: str
    queries: list[str]
    action: str  # the whole message, of a turn that neither thought nor searched
    passages: list[ShownPassage]  # or the chunk, without a title
    wrote: bool
    memory_head: str
    memory: Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One attempt of several at the same question."""

    label: str
    style: str
    turns: list[ShownTurn]
    right: bool
    answer: str
    reward: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    question: str
    facts: list[str]
    sides: list[Side]


def examples(before: Sequence[Group], after: Sequence[Group], *, text: ActionText = UNKNOWN_AGENT) -> list[Example]:
    """Returns the examples of the page for the questions that `choose_examples` chooses."""
    return [
        Example(
            question=last.question.text,
            facts=facts_of(last.question),
            sides=[
                side("Before", first, style="before", text=text),
                side("After", last, style="after", text=text),
            ],
        )
        for first, last in choose_examples(before, after)
    ]


def choose_examples(before: Sequence[Group], after: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Returns (before, after) of at most three questions: two that training repaired, more hops first, and one that is
    still wrong, if they exist.
    """
    first = {group.question.id: group for group in before}
    pairs = [
        (first[g.question.id], g)
        for g in after
        if g.question.id in first and g.trajectories and first[g.question.id].trajectories
    ]
    # A service of the run searches this part of its corpus if a request names none.
    served = main_partition([after.question for _, after in pairs])
    pairs.sort(key=lambda pair: (pair[1].question.partition != served, -pair[1].question.num_hops, pair[1].question.id))
    repaired = [pair for pair in pairs if not _is_right(pair[0]) and _is_right(pair[1])]
    here = [pair for pair in repaired if pair[1].question.partition == served]
    wrong = [pair for pair in pairs if not _is_right(pair[1])]
    chosen = [*_spread(here), *_spread(repaired[len(here) :])][: _NUM_EXAMPLES - bool(wrong)] + wrong[:1]
    others = [pair for pair in pairs if pair not in chosen]
    return chosen + others[: _NUM_EXAMPLES - len(chosen)]


def facts_of(question: Question) -> list[str]:
    """Returns the right answer, the hops and the searched part of a question, for a person."""
    facts = [f"right answer: {golden_text(question)}"]
    facts += [f"{question.num_hops} hops"] * (question.num_hops > 1)
    return [*facts, *([f"searched in {question.partition}"] if question.partition else [])]


def golden_text(question: Question, *, between: str = " or ") -> str:
    """Returns the golden answers with `between` those that count alike; "; " separates several objectives."""
    return "; ".join(between.join(answers) for answers in golden_by_objective(question))


def verdict(trajectory: Trajectory, question: Question) -> str:
    """Returns "right" or "wrong", and how many answers to several objectives are right if only some are."""
    right = right_answers(trajectory, question)
    return "right" if all(right) else f"{sum(right)} of {len(right)} right" if any(right) else "wrong"


def shown_turns(trajectory: Trajectory, question: Question, *, text: ActionText = UNKNOWN_AGENT) -> list[ShownTurn]:
    """Returns the turns as a page shows them, long texts cut. Every message is a turn, also where one context holds
    several: the last one of them has its memory. Turns that repeat the one before are shown once."""
    shown: list[ShownTurn] = []
    before = None
    for each in shown_contexts(trajectory, text):
        context, sizes = each.context, each.sizes
        for number, step in each.turns:
            wrote = number == each.turns[-1][0] and text.wrote_memory(trajectory, each.index)
            content = (step, context.chunk, context.memory_before, context.memory_after, context.memory_truncated)
            if content == before:
                shown[-1] = replace(shown[-1], last=number)
            else:
                shown.append(_shown_turn(number, context, step, question, text, sizes=sizes, wrote=wrote))
            before, sizes = content, ""
    return shown


def _shown_turn(
    number: int, context: Context, step: Step, question: Question, text: ActionText, *, sizes: str, wrote: bool
) -> ShownTurn:
    needed = {fact.passage_id for fact in question.evidence}
    passages = [(p.title, p.text, p.id in needed) for search in step.searches for p in search.passages]
    if context.chunk:
        passages.append(("", context.chunk, any(finds(context, fact) for fact in question.evidence)))
    truncated = " (cut to its budget)" if context.memory_truncated else ""
    thinking, queries = text.thought(step.message), [search.query for search in step.searches]
    return ShownTurn(
        number=number,
        last=number,
        sizes=sizes,
        thought=cut(thinking, _MAX_CHARS),
        queries=[cut(query, _MAX_CHARS) for query in queries],
        action="" if thinking or queries else cut(step.message, _MAX_CHARS),
        passages=[
            ShownPassage(title=title, text=cut(text, _MAX_PASSAGE_CHARS), needed=is_needed)
            for title, text, is_needed in passages
        ],
        wrote=wrote,
        memory_head=f"memory, {context.num_new_memory_tokens:,} tokens{truncated}: ",
        memory=_changed_words(context),
    )


def _changed_words(context: Context) -> Words:
    """Returns the words of the memory before and after the turn, cut after they were compared: the end of a memory that
    is too long to be shown was not dropped for that."""
    words, left = Words(), _MAX_CHARS
    for kind, text in changed_runs(cut(context.memory_before, _MAX_COMPARED), cut(context.memory_after, _MAX_COMPARED)):
        words.append((kind, cut(text, left)))
        left -= len(text)
        if left <= 0:
            break
    return words


def _spread(pairs: list[tuple[Group, Group]]) -> list[tuple[Group, Group]]:
    """Returns the pairs with hop counts not seen yet first."""
    seen: set[int] = set()
    fresh = []
    for pair in pairs:
        hops = pair[1].question.num_hops
        if hops not in seen:
            fresh.append(pair)
            seen.add(hops)
    return fresh + [pair for pair in pairs if pair not in fresh]


def _is_right(group: Group) -> bool:
    return group.trajectories[0].em == 1.0


def side(label: str, group: Group, *, style: str, text: ActionText) -> Side:
    """Returns the first attempt of the group as one column of an example."""
    trajectory = group.trajectories[0]
    reason = str(trajectory.end_reason).replace("_", " ")
    answer = trajectory.answer if trajectory.answer is not None else f"no answer: {reason}"
    return Side(
        label=label,
        style=style,
        turns=shown_turns(trajectory, group.question, text=text),
        right=trajectory.em == 1.0,
        answer=cut(answer, _MAX_CHARS),
        reward=f"reward {trajectory.reward:.2f}",
    )
