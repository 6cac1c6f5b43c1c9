"""Tells whoever listens what happens in one attempt at a question, when it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mempipe.answers.api import TurnReply
from mempipe.answers.replies import passage_reply
from mempipe.types import Completion, Context, SearchResult

Emit = Callable[[str, dict[str, Any]], None]
"""Takes an event: its name and its data."""
Event = tuple[str, dict[str, Any] | str]
"""An event as a stream sends it: its name, which may be empty, and its data, an object or a text as it is."""


class AttemptEvents:
    """Makes the events of one attempt: message, search, passages and turn."""

    def __init__(
        self,
        emit: Emit,
        *,
        sample: int,
        decode: Callable[[Sequence[int]], str],
        thought: Callable[[str], str],
        turn_replies: Callable[[Iterable[Context]], Iterator[TurnReply]],
    ) -> None:
        """`sample` is the number of the attempt; `thought` finds it in the text of a message; `turn_replies` returns
        the shown part of each turn (`mempipe.answers.replies`).
        """
        self._emit = emit
        self._sample = sample
        self._decode = decode
        self._thought = thought
        self._contexts: list[Context] = []
        self._turns = turn_replies(self._contexts)
        self._begun: dict[int, int] = {}
        """The turn of each context that has a message."""

    def message(self, completion: Completion, *, context: int) -> None:
        """Tells that the policy has written. `context` counts those that messages have begun; an agent can go back to
        one, and can finish turns without a message.
        """
        following = max([len(self._contexts), *(turn + 1 for turn in self._begun.values())])
        turn = self._begun.setdefault(context, following)
        text = self._decode(completion.token_ids)
        self._tell("message", turn, thought=self._thought(text), text=text)

    def search(self, query: str) -> int:
        """Tells that the newest turn searches, and returns its number."""
        turn = max([len(self._contexts), *self._begun.values()])
        self._tell("search", turn, query=query)
        return turn

    def passages(self, query: str, result: SearchResult, *, turn: int) -> None:
        """Tells what a search of a turn has found."""
        found = [passage_reply(passage).model_dump() for passage in result.passages]
        self._tell("passages", turn, query=query, passages=found)

    def turn(self, context: Context) -> None:
        """Tells that a turn is finished."""
        self._contexts.append(context)
        self._emit("turn", {"sample": self._sample, **next(self._turns).model_dump()})

    def _tell(self, name: str, turn: int, **data: Any) -> None:
        self._emit(name, {"sample": self._sample, "turn": turn, **data})
