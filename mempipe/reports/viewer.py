"""The trajectory viewer: one HTML file that holds its trajectories, style and script, for a browser without network.

Only its own script runs: the page's policy names the script's hash, and the script writes texts as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mempipe.facts import FactState, fact_states, finds, places_by_objective
from mempipe.reports.examples import golden_text, verdict
from mempipe.reports.pages import cut, page_script, render
from mempipe.reports.steps import ShownContext, shown_contexts
from mempipe.reports.traced import Traced
from mempipe.storage.files import write_text
from mempipe.text import changed_runs
from mempipe.types import Context, Passage, Question

MAX_TRAJECTORIES = 3000  # a browser holds them, and their file stays below some tens of megabytes
_MAX_CHARS = 20_000  # of a message or a memory
_MAX_CHUNK_CHARS = 2_000


def write_viewer(path: Path, traced: Sequence[Traced], *, title: str) -> int:
    """Writes the page, atomically, with `MAX_TRAJECTORIES` at most. Returns the number of trajectories."""
    shown = _first_questions(traced)
    page = render(
        "trace.html",
        title=title,
        num_left_out=len(traced) - len(shown),
        data=viewer_data(shown),
        **page_script("trace.js"),
    )
    write_text(path, page)
    return len(shown)


def _first_questions(traced: Sequence[Traced]) -> list[Traced]:
    """Returns the trajectories of the first questions, those of every phase, in their order."""
    places: dict[str, int] = {}
    questions = [places.setdefault(each.question.id, len(places)) for each in traced]
    chosen = sorted(range(len(traced)), key=questions.__getitem__)[:MAX_TRAJECTORIES]
    return [traced[index] for index in sorted(chosen)]


def viewer_data(traced: Sequence[Traced]) -> dict[str, Any]:
    """Returns the data of the page's script: the trajectories, and every passage once."""
    passages: dict[tuple[str, str, str], int] = {}

    def number(passage: Passage) -> int:
        return passages.setdefault((passage.id, passage.title, passage.text), len(passages))

    trajectories = [_trajectory(each, number) for each in traced]
    return {"trajectories": trajectories, "passages": [{"title": title, "text": text} for _, title, text in passages]}


def _trajectory(traced: Traced, number) -> dict[str, Any]:
    question, trajectory = traced.question, traced.trajectory
    states = fact_states(trajectory, question)
    needed = {fact.passage_id for fact in question.evidence}
    return {
        "id": traced.key,
        "phase": traced.phase,
        "questionId": question.id,
        "question": question.text,
        "golden": golden_text(question),
        "hops": question.num_hops,
        "answer": trajectory.answer,
        "reward": trajectory.reward,
        "right": trajectory.em == 1.0,
        "verdict": verdict(trajectory, question),
        "end": str(trajectory.end_reason).replace("_", " "),
        "budget": traced.memory_budget,
        "lost": any(FactState.LOST in turn for turn in states),
        "facts": [fact.value for fact in question.evidence],
        "factsOf": places_by_objective(question),
        "turns": [
            _turn(traced, shown, needed, number) | {"facts": [str(state) for state in states[shown.index]]}
            for shown in shown_contexts(trajectory, traced.text)
        ],
    }


def _turn(traced: Traced, shown: ShownContext, needed: set[str], number) -> dict[str, Any]:
    context = shown.context
    return {
        "first": shown.turns[0][0],
        "last": shown.turns[-1][0],
        "message": cut(context.action, _MAX_CHARS),
        "steps": [
            {
                "thought": cut(traced.text.thought(step.message), _MAX_CHARS),
                "searches": [
                    {"query": search.query, "passages": [[number(p), p.id in needed] for p in search.passages]}
                    for search in step.searches
                ],
            }
            for _, step in shown.turns
        ],
        "tools": [
            {"tool": use.tool, "arguments": use.arguments, "texts": [cut(text, _MAX_CHARS) for text in use.texts]}
            for use in context.tool_uses
        ],
        "chunk": _chunk(context, traced.question, number),
        "wrote": traced.text.wrote_memory(traced.trajectory, shown.index),
        "memory": [*changed_runs(cut(context.memory_before, _MAX_CHARS), cut(context.memory_after, _MAX_CHARS))],
        "truncated": context.memory_truncated,
        "tokens": {
            "prompt": context.num_prompt_tokens,
            "memory read": context.num_memory_tokens,
            "passages": context.num_observation_tokens,
            "sampled": context.num_sampled_tokens,
            "memory written": context.num_new_memory_tokens,
        },
    }


def _chunk(context: Context, question: Question, number) -> tuple[int, bool] | None:
    """Returns the chunk as a passage without a title, and whether it holds a needed fact."""
    if not context.chunk:
        return None
    passage = Passage(id="", title="", text=cut(context.chunk, _MAX_CHUNK_CHARS))
    return number(passage), any(finds(context, fact) for fact in question.evidence)
