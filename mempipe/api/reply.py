"""The answer to one question, as a person and a notebook read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mempipe.answers.api import AnswerReply, SearchReply, TurnReply
from mempipe.reports.pages import cut, render
from mempipe.reports.steps import with_searches
from mempipe.types import EndReason

if TYPE_CHECKING:
    import polars as pl

_MAX_CHARS = 500  # of a passage or a message in `trace`


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer and how the agent found it. `str(reply)` is the answer; a notebook shows the turns."""

    question: str
    answer: str | None
    """None where the agent ended without an answer; `end_reason` says how."""
    end_reason: str
    """"answered", or the reason why the agent stopped (`mempipe.types.EndReason`)."""
    turns: list[TurnReply]
    """One context of the agent each: thought, action, searches with their passages, the memory before and after it,
    and its tokens (docs/serving.md)."""
    memory: str
    """The memory for the next question: `agent.ask(..., memory=reply.memory)` resumes from here."""
    answers: list[str]
    """The answers of all attempts (`num_samples`); "" for an attempt without one. The first is `answer`."""
    confidence: float | None
    """The share of the attempts that gave `answer`; None with one attempt."""
    prompt_tokens: int
    """Tokens that the model read, over all turns and attempts."""
    completion_tokens: int
    """Tokens that the model sampled, over all turns and attempts."""
    seconds: float
    """Wall time."""

    @property
    def tokens(self) -> int:
        """Returns the tokens that were read and sampled."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def memory_by_turn(self) -> list[str]:
        """Returns the memory that each turn started from; the first turn starts from an empty one."""
        return [turn.memory_before for turn in self.turns]

    @property
    def table(self) -> pl.DataFrame:
        """Returns a row for each turn: its number, memory, action, searches, and its tokens."""
        import polars as pl

        return pl.DataFrame(
            [
                {
                    "turn": turn.index + 1,
                    "memory": turn.memory_before,
                    "memory_tokens": turn.memory_tokens,
                    "action": turn.action,
                    "searches": [search.query for search in turn.searches],
                    "prompt_tokens": turn.prompt_tokens,
                    "full_history_tokens": turn.full_history_tokens,
                    "sampled_tokens": turn.sampled_tokens,
                }
                for turn in self.turns
            ],
            schema_overrides={"searches": pl.List(pl.String)},
        )

    @property
    def trace(self) -> str:
        """Returns the turns as text for a terminal."""
        return "\n".join([*(line for turn in self.turns for line in turn_lines(turn)), self.summary])

    @property
    def summary(self) -> str:
        """Returns the answer, or why there is none, and what it cost."""
        ended = f"answer {self.answer!r}"
        if self.answer is None:
            ended = f"no answer, because {EndReason(self.end_reason).sentence}"
        turns = f"{len(self.turns)} turn{'s' * (len(self.turns) != 1)}"
        return f"{ended}, {turns}, {self.tokens:,} tokens, {self.seconds:.1f} s"

    def __str__(self) -> str:
        return self.answer or ""

    def __repr__(self) -> str:
        return f"<Reply: {self.summary}>"

    def _repr_html_(self) -> str:
        return render("reply.html", reply=self, steps=message_steps)


def reply_of(answered: AnswerReply) -> Reply:
    """Makes the reply of what the service would send."""
    return Reply(
        question=answered.question,
        answer=answered.answer,
        end_reason=answered.end_reason,
        turns=answered.turns,
        memory=answered.memory,
        answers=[attempt.answer or "" for attempt in answered.attempts],
        confidence=answered.confidence,
        prompt_tokens=answered.usage.prompt_tokens,
        completion_tokens=answered.usage.completion_tokens,
        seconds=answered.seconds,
    )


def turn_lines(turn: TurnReply) -> Iterator[str]:
    """Yields the lines that show one turn on a terminal."""
    limit = "" if turn.memory_limit is None else f" of {turn.memory_limit}"
    yield f"turn {turn.index + 1}: {turn.prompt_tokens} prompt tokens, {turn.sampled_tokens} sampled"
    if turn.memory_limit is not None:
        yield f"  memory   {_one_line(turn.memory_before) or '(empty)'}  [{turn.memory_tokens}{limit} tokens]"
    if turn.chunk:
        yield f"  chunk    {_one_line(turn.chunk)}"
    for message, searches in message_steps(turn):
        yield f"  action   {_one_line(message)}"
        for passage in (passage for search in searches for passage in search.passages):
            yield f"  passage  {_one_line(f'[{passage.title}] {passage.text}')}"
    for use in turn.tools:
        yield from (f"  {use.tool}  {_one_line(text)}" for text in use.texts)
    if turn.memory_added or turn.memory_dropped:
        yield f"  wrote    {_one_line(turn.memory_after) or '(nothing)'}"


def message_steps(turn: TurnReply) -> list[tuple[str, list[SearchReply]]]:
    """Returns the messages of a turn, each with its searches."""
    return with_searches(turn.messages or [turn.action], turn.searches)


def _one_line(text: str) -> str:
    return cut(" ".join(text.split()), _MAX_CHARS)
