"""Example trajectories of a report:
the same questions before and after training, turn by turn, with what changed in the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from mempipe.reports.html import Markup, element, fragment
from mempipe.types import Context, Group, Question, Trajectory

_NUM_EXAMPLES = 3
_MAX_CHARS = 1200
_MAX_MEMORY_CHARS = 6000
_MAX_PASSAGE_CHARS = 240


def examples_section(before: Sequence[Group], after: Sequence[Group]) -> Markup | None:
    """Two questions that training repaired and one that it did not, as far as there are such; all texts are escaped."""
    pairs = choose_examples(before, after)
    if not pairs:
        return None
    legend = element(
        "p",
        "In memories: ",
        element("ins", "added"),
        " in this turn, ",
        element("del", "dropped"),
        " in it, the rest was kept. ",
        element("b", "●", class_="needed"),
        " marks passages that the question needs.",
        class_="diff-legend",
    )
    return element("section", element("h2", "Questions before and after"), legend, *(_example(*pair) for pair in pairs))


def choose_examples(before: Sequence[Group], after: Sequence[Group]) -> list[tuple[Group, Group]]:
    """(before, after) of at most three questions: more hops first, and one that is still wrong if there is one."""
    first = {group.question.id: group for group in before}
    pairs = [
        (first[g.question.id], g)
        for g in after
        if g.question.id in first and g.trajectories and first[g.question.id].trajectories
    ]
    pairs.sort(key=lambda pair: (-pair[1].question.num_hops, pair[1].question.id))
    repaired = [pair for pair in pairs if not _is_right(pair[0]) and _is_right(pair[1])]
    wrong = [pair for pair in pairs if not _is_right(pair[1])]
    chosen = _spread(repaired)[: _NUM_EXAMPLES - bool(wrong)] + wrong[:1]
    others = [pair for pair in pairs if pair not in chosen]
    return chosen + others[: _NUM_EXAMPLES - len(chosen)]


def memory_diff(before: str, after: str) -> Markup:
    """The new memory, with words that were added and words that were dropped marked as such."""
    old, new = before.split(), after.split()
    parts: list[str] = []
    for kind, old_start, old_end, new_start, new_end in SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if kind in ("delete", "replace"):
            parts += [element("del", " ".join(old[old_start:old_end])), " "]
        if kind in ("insert", "replace"):
            parts += [element("ins", " ".join(new[new_start:new_end])), " "]
        if kind == "equal":
            parts += [" ".join(new[new_start:new_end]), " "]
    return fragment(*parts) if parts else element("span", "empty", class_="nothing")


def _spread(pairs: list[tuple[Group, Group]]) -> list[tuple[Group, Group]]:
    """Pairs with hop counts not seen yet first."""
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


def _example(before: Group, after: Group) -> Markup:
    question = after.question
    golds = " or ".join(question.golden_answers)
    facts = f"right answer: {golds}" + (f" · {question.num_hops} hops" if question.num_hops > 1 else "")
    return element(
        "article",
        element("h3", question.text),
        element("p", facts, class_="facts"),
        element("div", _side("Before", before, "before"), _side("After", after, "after"), class_="sides"),
        class_="example",
    )


def _side(label: str, group: Group, style: str) -> Markup:
    trajectory = group.trajectories[0]
    turns = [_turn(context, group.question) for context in trajectory.contexts]
    return element("div", element("h4", label), *turns, _outcome(trajectory), class_=f"side {style}")


def _turn(context: Context, question: Question) -> Markup:
    sizes = f"{context.num_prompt_tokens:,} prompt tokens, {sum(context.loss_mask):,} sampled"
    return element(
        "div",
        element("div", f"Turn {context.index + 1}", element("span", sizes), class_="turn-head"),
        element("pre", _cut(context.action, _MAX_CHARS)),
        _passages(context, question),
        _memory(context),
        class_="turn",
    )


def _passages(context: Context, question: Question) -> Markup | None:
    needed = {fact.passage_id for fact in question.evidence}
    rows = []
    for search in context.searches:
        for passage in search.passages:
            mark = element("b", "● ", class_="needed") if passage.id in needed else None
            rows.append(element("li", mark, element("b", passage.title), " ", _cut(passage.text, _MAX_PASSAGE_CHARS)))
    return element("ul", *rows, class_="passages") if rows else None


def _memory(context: Context) -> Markup | None:
    if not context.searches and not context.memory_after:
        return None
    cut = " (cut to its budget)" if context.memory_truncated else ""
    head = element("span", f"memory, {context.num_new_memory_tokens:,} tokens{cut}: ", class_="memory-head")
    diff = memory_diff(_cut(context.memory_before, _MAX_MEMORY_CHARS), _cut(context.memory_after, _MAX_MEMORY_CHARS))
    return element("div", head, diff, class_="memory")


def _outcome(trajectory: Trajectory) -> Markup:
    right = trajectory.em == 1.0
    reason = str(trajectory.end_reason).replace("_", " ")
    answer = trajectory.answer if trajectory.answer is not None else f"no answer: {reason}"
    text = f"{'✓' if right else '✗'} {_cut(answer, _MAX_CHARS)}"
    return element(
        "p", text, element("span", f"reward {trajectory.reward:.2f}"), class_=f"outcome {'right' if right else 'wrong'}"
    )


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
