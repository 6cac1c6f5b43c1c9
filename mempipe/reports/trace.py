"""Trajectories as lines of text: what the policy saw, did and remembered, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence

from mempipe.reports.examples import choose_examples, golden_text
from mempipe.reports.pages import cut
from mempipe.reports.steps import UNKNOWN_AGENT, ActionText, shown_contexts
from mempipe.reports.traced import Traced, phases_of
from mempipe.settings import ConfigError
from mempipe.types import Group, Question, Trajectory

SNIPPET = 160
_LIMIT = 3


def choose(traced: Sequence[Traced], *, question: str = "", phase: str = "", limit: int | None = None) -> list[Traced]:
    """Returns the trajectories to print: the first `limit` that `select` returns.

    Without a filter returns one question in its first and last phase, preferably one that training fixed. Raises
    ConfigError where nothing fits.
    """
    if not (question or phase or limit is not None) and (pair := _before_and_after(traced)):
        return pair
    return select(traced, question=question, phase=phase, limit=_LIMIT if limit is None else limit)


def select(traced: Sequence[Traced], *, question: str = "", phase: str = "", limit: int | None = None) -> list[Traced]:
    """Returns the first `limit` trajectories of a phase whose question contains `question` in its id or text; an empty
    wish is none.

    Raises ConfigError where nothing fits.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}; expected at least 1")
    if phase and phase not in phases_of(traced):
        raise ConfigError(f"--phase is {phase!r}; the phases are {', '.join(phases_of(traced))}")
    fitting = [
        each
        for each in traced
        if (question in each.question.id or question in each.question.text) and phase in ("", each.phase)
    ]
    if not fitting:
        raise ConfigError(f"no trajectory matches --question {question!r}" if question else "there is no trajectory")
    return fitting[:limit]


def trace_lines(shown: Sequence[Traced], *, total: int) -> list[str]:
    """Returns the text of `shown` and, as its last line, how to see the others of `total`."""
    lines = []
    for each in shown:
        lines += [*trajectory_lines(each.question, each.trajectory, text=each.text), ""]
    if len(shown) == total:
        return lines
    others = "--question TEXT, --phase PHASE and --limit N choose others; --html FILE shows all in a browser"
    return [*lines, f"{len(shown)} of {total:,} trajectories; {others}"]


def trajectory_lines(question: Question, trajectory: Trajectory, *, text: ActionText = UNKNOWN_AGENT) -> list[str]:
    """Returns one trajectory as text. Every message is a turn, also where one context holds several."""
    lines = [
        f"{trajectory.id}",
        f"  question  {question.text}",
        f"  golden    {golden_text(question, between=' | ')}",
    ]
    for shown in shown_contexts(trajectory, text):
        context, first = shown.context, shown.turns[0][0]
        lines.append(f"  turn {first}: {shown.sizes}")
        if text.has_memory:
            lines.append(f"    memory   {context.memory_before or '(empty)'}")
        if context.chunk:
            lines.append(f"    chunk    {_one_line(context.chunk)}")
        for number, step in shown.turns:
            if number > first:
                lines.append(f"  turn {number}")
            lines.append(f"    action   {_one_line(step.message)}")
            for search in step.searches:
                lines += [f"    passage  {_one_line(f'[{p.title}] {p.text}')}" for p in search.passages]
        is_shown = context.memory_after == context.action  # where the message is the memory
        if text.wrote_memory(trajectory, shown.index) and not is_shown:
            truncated = " (cut to its budget)" if context.memory_truncated else ""
            lines.append(f"    wrote    {context.memory_after or '(nothing)'}{truncated}")
    for recall in trajectory.recalls:
        asked = f"memory {recall.step} for {recall.target[0]!r} of chunk {recall.chunk + 1}"
        lines.append(f"  recall    {asked}: {recall.answer!r}, {'right' if recall.score else 'wrong'}")
    answer = f"answer {trajectory.answer!r}" if trajectory.answer is not None else "no answer"
    lines.append(
        f"  {answer}, ended by {trajectory.end_reason}, reward {trajectory.reward:.3f}, em {trajectory.em:.3g}"
    )
    return lines


def _before_and_after(traced: Sequence[Traced]) -> list[Traced]:
    """Returns one question in the first and in the last phase; nothing where there is one phase or none is shared."""
    phases = phases_of(traced)
    if len(phases) < 2:
        return []
    sides = [{each.question.id: each for each in reversed(traced) if each.phase == phases[i]} for i in (0, -1)]
    pairs = choose_examples(*([_group(each) for each in side.values()] for side in sides))
    return [side[pairs[0][0].question.id] for side in sides] if pairs else []


def _group(traced: Traced) -> Group:
    return Group(id=traced.trajectory.group_id, question=traced.question, trajectories=[traced.trajectory])


def _one_line(text: str) -> str:
    return cut(" ".join(text.split()), SNIPPET)
