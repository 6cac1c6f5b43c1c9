"""A trajectory as lines of text: what the policy saw, did and remembered, turn by turn."""

from __future__ import annotations

from mempipe.evaluation.memory_quality import is_memory_turn
from mempipe.types import Question, Trajectory

SNIPPET = 160


def trajectory_lines(question: Question, trajectory: Trajectory) -> list[str]:
    lines = [
        f"{trajectory.id}",
        f"  question  {question.text}",
        f"  golden    {' | '.join(question.golden_answers)}",
    ]
    for index, context in enumerate(trajectory.contexts):
        lines.append(
            f"  turn {context.index + 1}: {context.num_prompt_tokens} prompt tokens, {sum(context.loss_mask)} sampled"
        )
        lines.append(f"    memory   {context.memory_before or '(empty)'}")
        lines.append(f"    action   {_one_line(context.action)}")
        for search in context.searches:
            lines += [f"    passage  {_one_line(f'[{p.title}] {p.text}')}" for p in search.passages]
        if (
            is_memory_turn(trajectory, index) and context.memory_after != context.action
        ):  # whose message is not its memory
            cut = " (cut to its budget)" if context.memory_truncated else ""
            lines.append(f"    wrote    {context.memory_after or '(nothing)'}{cut}")
    lines.append(
        f"  {trajectory.end_reason}: {trajectory.answer!r}  reward {trajectory.reward:.3f}  em {trajectory.em:.0f}"
    )
    return lines


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SNIPPET else text[: SNIPPET - 1] + "…"
