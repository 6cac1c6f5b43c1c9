"""Common parts of MEM1 and ReAct: one assistant message that continues after every observation, with queries and
answers between tags.

The policy writes `<search>query</search>` or `<answer>answer</answer>`. What it samples after the first of these
closing tags is dropped: it is in no context and in no loss. The observation follows inside the same message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from mempipe.agents.prompt_set import PromptSet
from mempipe.agents.protocol import Tokenizer, between_blocks, thought_of, without_blocks
from mempipe.agents.rendering import S, SearchRenderer, encode_pieces, fit_passages
from mempipe.agents.tools import InvalidCall, SearchTool
from mempipe.agents.turn import Agent, Turn, without_stop
from mempipe.settings import ConfigError
from mempipe.types import Completion, EndReason, FinishReason, Passage

STOP_TEXTS = ("</search>", "</answer>")
_ACTION_END = re.compile("</(search|answer)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedPrompts(PromptSet):
    """The words around questions and passages; `prompts/react.yaml` explains each key. Raises ConfigError."""

    REQUIRED: ClassVar = {"user": {"question"}, "observation": {"passages"}, "passage": {"text"}}
    OPTIONAL: ClassVar = {"observation": {"turns_left"}, "passage": {"title", "index"}}

    system: str
    user: str
    observation: str
    passage: str
    passage_separator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedMessage:
    """A sampled message up to the end of its action, or all of it when there is none. One of query, answer and fault is
    set.
    """

    token_ids: list[int]  # without the stop token
    text: str
    query: str | None = None
    answer: str | None = None
    fault: EndReason | None = None  # why it is not an action
    breaks_roles: bool = False  # it holds a role mark of the chat template


class TaggedRenderer(SearchRenderer[S]):
    """Prompt and observations of one tokenizer, prompt set, tool and budget. Raises as `Renderer` does."""

    TAGS = ("think", "search", "information", "answer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompts: TaggedPrompts,
        search: SearchTool,
        budget: S,
        question_mark: bool = False,
    ) -> None:
        super().__init__(
            tokenizer,
            system=prompts.system,
            passage=prompts.passage,
            separator=prompts.passage_separator,
            search=search,
            budget=budget,
            instructions=prompts.instructions,
            question_mark=question_mark,
        )
        self._prompt = encode_pieces(tokenizer, self._chat.before_user, prompts.user, self._chat.after_user)
        self._observation = encode_pieces(tokenizer, "", prompts.observation, "")
        needed = len(self._turns_left(budget.max_turns)) + 1
        if budget.observation_tokens < needed:
            raise ConfigError(
                f"budget.observation_tokens is {budget.observation_tokens}, expected at least {needed}: the turns "
                "left and a passage"
            )
        self.template_tokens = self._prompt.num_tokens + self._observation.num_tokens
        self._check_budget()

    def prompt(self, question: list[int]) -> list[int]:
        """Returns a context up to its assistant message."""
        return self._prompt.filled({"question": question})

    def observation(self, passages: Sequence[Passage], *, turns_left: int) -> tuple[list[int], int]:
        """Returns the tokens that follow a search, with as many of the passages as fit, and the number of tokens that
        count against the budget.
        """
        left = self._turns_left(turns_left)
        (shown,) = fit_passages([self._passage_pieces(passages)], room=self.budget.observation_tokens - len(left))
        return self._observation.filled({"passages": shown, "turns_left": left}), len(shown) + len(left)

    def parse(self, token_ids: list[int], *, finish: FinishReason) -> TaggedMessage:
        """Parses the message that was sampled, stop token included."""
        body = without_stop(token_ids, self)
        kept = body[: self.length_until(body, lambda text: _ACTION_END.search(text) is not None)]
        text = self.tokenizer.decode(kept)
        end = _ACTION_END.search(text)
        _, opened, content = text[: end.start()].partition(f"<{end[1]}>") if end else ("", "", "")
        if self.breaks_roles(kept):
            return TaggedMessage(token_ids=kept, text=text, fault=EndReason.NO_ACTION, breaks_roles=True)
        if not end or not opened:
            cut_off = end is None and finish is FinishReason.LENGTH
            return TaggedMessage(token_ids=kept, text=text, fault=EndReason.LENGTH if cut_off else EndReason.NO_ACTION)
        if end[1] == "answer":
            return TaggedMessage(token_ids=kept, text=text, answer=content.strip())
        try:
            return TaggedMessage(token_ids=kept, text=text, query=self.search.checked_query(content))
        except InvalidCall:
            return TaggedMessage(token_ids=kept, text=text, fault=EndReason.INVALID_CALL)

    def _turns_left(self, number: int) -> list[int]:
        return self.encode(str(number)) if "turns_left" in self._observation.slots else []


T = TypeVar("T", bound=TaggedRenderer[Any])


class TaggedAgent(Agent[T]):
    """An agent whose messages are tagged."""

    async def _act(self, turn: Turn) -> tuple[Completion, TaggedMessage]:
        completion = await self._complete(turn, max_tokens=self.renderer.budget.action_tokens)
        return completion, self.renderer.parse(completion.token_ids, finish=completion.finish_reason)

    def _take_in(self, turn: Turn, completion: Completion, message: TaggedMessage, *, ends: bool) -> None:
        """Adds the tokens of the message to the turn.

        The stop token is added only when the trajectory `ends` with this message and the message is not a search: in
        every other case the assistant message continues, and the stop token is dropped.
        """
        whole = len(without_stop(completion.token_ids, self.renderer)) == len(message.token_ids)
        stopped = ends and whole and message.query is None
        turn.sample(completion, num_kept=None if stopped else len(message.token_ids))


def tagged_thought(action: str) -> str:
    """Returns the thoughts of an assistant message with tagged queries and answers; observations are not thoughts."""
    return thought_of(without_blocks(action, "information"), actions=("<search>", "<answer>"))


def tagged_messages(action: str) -> list[str]:
    """Returns the messages of a whole history: the texts around its observations."""
    return [message for message in between_blocks(action, "information") if message.strip()]
