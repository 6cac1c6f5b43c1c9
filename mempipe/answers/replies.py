"""The part of attempts that clients see: turns, cost, and the chosen answer."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from mempipe.answers.api import (
    CompletionTokensDetails,
    PassageReply,
    PromptTokensDetails,
    SearchReply,
    TokenLogprob,
    ToolReply,
    TurnReply,
    Usage,
)
from mempipe.evaluation.rollout_metrics import growing_history
from mempipe.rl.rewards import normalize_answer
from mempipe.text import changed_runs
from mempipe.types import Context, Passage, Trajectory

HALF = "\ufffd"
"""The character that stands for a part of one: a token may hold only some of its bytes."""


def turn_replies(
    contexts: Iterable[Context],
    *,
    thought: Callable[[str], str],
    messages: Callable[[str], list[str]],
    memory_limit: int | None,
) -> Iterator[TurnReply]:
    """Yields the contexts of an attempt as the service shows them; `thought` and `messages` find them in the text of an
    action.

    `contexts` may be a list that still grows: one is read for one that is yielded.
    """
    for context, history in growing_history(contexts):
        yield _turn(context, thought(context.action), messages(context.action), history, memory_limit)


def _turn(context: Context, thought: str, messages: list[str], history: int, limit: int | None) -> TurnReply:
    added, dropped = changes(context.memory_before, context.memory_after)
    wrote = context.num_new_memory_tokens > 0
    return TurnReply(
        index=context.index,
        thought=thought,
        action=context.action,
        messages=messages,
        chunk=context.chunk,
        searches=[SearchReply(query=s.query, passages=list(map(passage_reply, s.passages))) for s in context.searches],
        tools=[ToolReply(tool=use.tool, arguments=use.arguments, texts=use.texts) for use in context.tool_uses],
        memory_before=context.memory_before,
        memory_after=context.memory_after,
        memory_added=added,
        memory_dropped=dropped if wrote else [],
        memory_tokens=context.num_memory_tokens,
        memory_limit=limit,
        prompt_tokens=context.num_prompt_tokens,
        full_history_tokens=history,
        sampled_tokens=context.num_sampled_tokens + context.num_dropped_tokens,
        context_tokens=context.num_tokens,
        generate_seconds=context.generate_seconds,
        search_seconds=context.search_seconds,
    )


def changes(before: str, after: str) -> tuple[list[str], list[str]]:
    """Returns the runs of words that only `after` has, and those that only `before` has."""
    runs = list(changed_runs(before, after))
    return [text for kind, text in runs if kind == "added"], [text for kind, text in runs if kind == "dropped"]


def passage_reply(passage: Passage) -> PassageReply:
    """Returns a passage as the service shows it."""
    return PassageReply(id=passage.id, title=passage.title, text=passage.text, score=passage.score)


def most_frequent(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, float | None]:
    """Returns the first attempt with the most frequent answer, and its share; attempts without answer have no vote."""
    votes = Counter(normalize_answer(t.answer) for t in trajectories if t.answer is not None)
    if not votes:
        return trajectories[0], None if len(trajectories) == 1 else 0.0
    winner, count = votes.most_common(1)[0]
    chosen = next(t for t in trajectories if t.answer is not None and normalize_answer(t.answer) == winner)
    return chosen, None if len(trajectories) == 1 else count / len(trajectories)


def finish_reason(end_reason: str) -> Literal["length", "stop"]:
    """Returns what the OpenAI API calls the end of an attempt: `length` where a limit ended it."""
    return "length" if end_reason in ("length", "max_turns", "context_limit") else "stop"


def reasoning(turn: TurnReply) -> str:
    """Returns the thought of a turn and the memory that it wrote as a text that chat clients show; "" for neither."""
    parts = [turn.thought, f"Memory: {turn.memory_after}" if turn.memory_after else ""]
    return "".join(f"{part}\n\n" for part in parts if part)


def answer_logprobs(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> list[TokenLogprob]:
    """Returns the tokens that the answer was sampled in, with their log-probs; none where there is no answer.

    Their texts in order hold the answer. The first and the last of them may hold characters besides it, such as a
    blank. A character of several tokens is the text of the last of them.
    """
    token_ids, logprobs = _last_message(trajectory)
    places = _places_of_answer(trajectory, token_ids, decode)
    texts, told = list[str](), decode(token_ids[: places.start])
    for place in places:
        text = decode(token_ids[: place + 1])
        if text.endswith(HALF) and place != places[-1]:
            texts.append("")
        else:
            texts.append(text[len(told) :])
            told = text
    return [
        TokenLogprob(token=text, logprob=logprobs[place], bytes=list(text.encode()))
        for text, place in zip(texts, places, strict=True)
    ]


def _last_message(trajectory: Trajectory) -> tuple[list[int], list[float]]:
    """Returns the tokens of the last sampled message and their log-probs; none of an attempt without a context."""
    if not trajectory.contexts:
        return [], []
    context = trajectory.contexts[-1]
    mask = list(context.loss_mask)
    first = next((i + 1 for i in reversed(range(len(mask))) if not mask[i]), 0)
    return list(context.token_ids[first:]), list(context.logprobs[first:])


def _places_of_answer(
    trajectory: Trajectory, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> range:
    """Returns the places of the answer's tokens in the last message; none where there is no answer."""
    answer = (trajectory.answer or "").strip()
    start = decode(token_ids).rfind(answer)
    if not answer or start < 0:
        return range(0)

    def holding(chars: int, halves: str) -> int:
        """Returns how many of the tokens hold the first `chars` characters; `halves` at their end do not count."""
        lengths = range(len(token_ids))
        return bisect.bisect_left(lengths, chars, key=lambda count: len(decode(token_ids[:count]).rstrip(halves)))

    # A token that begins a character is the first one that holds it, and the token that completes it the last one.
    return range(holding(start + 1, "") - 1, holding(start + len(answer), HALF))


def usage_of(
    trajectories: Sequence[Trajectory], *, cached_tokens: int, decode: Callable[[Sequence[int]], str]
) -> Usage:
    """Counts the tokens that were read and sampled over all contexts and attempts; the engine's prefix cache held
    `cached_tokens` of those that were read.
    """
    contexts = [context for trajectory in trajectories for context in trajectory.contexts]
    sampled = sum(context.num_sampled_tokens + context.num_dropped_tokens for context in contexts)
    read = sum(len(context.loss_mask) - context.num_sampled_tokens for context in contexts)
    answers = sum(len(_places_of_answer(each, _last_message(each)[0], decode)) for each in trajectories)
    return Usage(
        prompt_tokens=read,
        completion_tokens=sampled,
        total_tokens=read + sampled,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=min(cached_tokens, read)),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=sampled - answers),
    )
