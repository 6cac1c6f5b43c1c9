"""The program's messages as tokens, and the limits of a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from mempipe.agents.budget import Budget
from mempipe.agents.chat_frame import chat_frame
from mempipe.agents.protocol import Tokenizer
from mempipe.agents.rendering import Renderer
from mempipe.agents.tools import SearchTool

Program = Callable[..., Any]
"""async (question, client, search) -> the answer, or None for none. `search(query)` returns texts, best first."""


class ProgramBudget(Budget):
    """The `budget` section of this agent. The program decides what a context holds."""

    max_turns: int = Field(12, ge=1)
    """Messages of the policy in one trajectory; a further request is refused."""

    @property
    def turn_limit(self) -> int:
        return self.max_turns


class ProgramRenderer(Renderer[ProgramBudget]):
    """The program's messages as tokens. All of them are untrusted: a passage may be among them."""

    TAGS, HAS_BOX = (), False  # the grammar is the program's

    def __init__(self, tokenizer: Tokenizer, *, program: Program, search: SearchTool, budget: ProgramBudget) -> None:
        super().__init__(tokenizer, system="", budget=budget)
        self.program, self.search = program, search
        self.template_tokens = len(tokenizer.encode_template(self._chat.before_user + self._chat.after_user))
        self._check_budget()

    def prompt(self, system: str, texts: Sequence[str], replies: dict[str, list[int]]) -> list[int]:
        """Returns a context up to its first sampled token. `texts` are the messages of user and assistant in turn, the
        last one of the user; `replies` are the tokens of what the policy has said in this trajectory.
        """
        frame = chat_frame(self.tokenizer, system=self._neutralize(system)) if system else self._chat
        encode = self.tokenizer.encode_template
        token_ids = [*encode(frame.before_user), *self.encode(texts[0]), *encode(frame.after_user)]
        for reply, text in zip(texts[1::2], texts[2::2], strict=True):
            said = replies[reply] if reply in replies else self.encode(reply)
            token_ids += [*said, *encode(frame.after_action), *self.encode(text), *encode(frame.after_observation)]
        return token_ids

    def answer_to(self, text: str, *, last_id: int) -> list[int]:
        """Returns what the user's message `text` adds to a context whose last token is `last_id`."""
        closing, *rest = self.tokenizer.encode_template(self._chat.after_action)
        after = self.tokenizer.encode_template(self._chat.after_observation)
        return [*([] if last_id == closing else [closing]), *rest, *self.encode(text), *after]
