"""A program's messages as tokens, and the limits of a context."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from mempipe.agents.budget import Budget
from mempipe.agents.chat_frame import shows_system
from mempipe.agents.program.tool_calls import CALL_TAG, HERMES, RESULT_TAG, parser_of, reads_calls_of
from mempipe.agents.protocol import ChatTemplateError, Tokenizer
from mempipe.agents.rendering import Renderer
from mempipe.agents.tools import SearchTool
from mempipe.settings import ConfigError
from mempipe.text import Neutralizer

_FIRST_MARK = 0xE000
"""A character of private use that stands for the first message while the chat template is rendered; the following ones
stand for the others."""
_MOST_MESSAGES = 4096


class Refused(ValueError):
    """A request that the gateway does not take; the program reads the message."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a request. The text of an assistant's is the whole one that the policy wrote, calls included."""

    role: str
    text: str


class ProgramBudget(Budget):
    """The `budget` section of this agent. The program decides what a context holds."""

    max_turns: int = Field(12, ge=1)
    """Messages of the policy in one trajectory; a further request is refused."""
    memory_tokens: int | None = Field(None, ge=1)
    """The memory that the program states in the metadata of its requests; a request with a longer one is refused. null:
    it states none, and nothing of a memory is measured."""

    @property
    def memory_limit(self) -> int | None:
        return self.memory_tokens

    @property
    def has_memory(self) -> bool:
        return self.memory_tokens is not None

    @property
    def turn_limit(self) -> int:
        return self.max_turns


@dataclass(frozen=True, slots=True)
class _Gaps:
    """A chat template around messages of some roles."""

    token_ids: list[list[int]]
    """Before the first of the messages, between them, and after the last one."""
    quoted: frozenset[int]
    """Places of the messages that it writes as JSON texts (Llama 3.1: results of tools)."""


class ProgramRenderer(Renderer[ProgramBudget]):
    """The program's messages as tokens. All of them are untrusted: a passage may be among them.

    The tags are the program's choice, so that only what separates roles is broken in its texts, and in the results of
    tools the tags that separate these. Tags of the model in a text are spelled, not encoded as the tokens that they
    name.
    """

    TAGS, HAS_BOX = (), False

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        program: Any,
        search: SearchTool,
        budget: ProgramBudget,
        tool_parser: str = HERMES,
    ) -> None:
        """`program` is a `Program` of mempipe.agents.program.programs."""
        super().__init__(tokenizer, system="", budget=budget)
        self.program, self.search = program, search
        self.parse_calls, self._tool_parser = parser_of(tool_parser, tokenizer), tool_parser
        between_roles = [tokenizer.decode([i]) for i in sorted(self._role_marks | tokenizer.stop_token_ids)]
        self._neutralize = Neutralizer([*between_roles, *self._role_texts], tags=(), box=False)
        self._break_tags = Neutralizer(tokenizer.special_tokens, tags=(CALL_TAG, RESULT_TAG), box=False)
        self._gaps = functools.lru_cache(maxsize=1024)(self._rendered_gaps)
        if budget.has_memory:
            self.empty_memory: list[int] = []
        self.template_tokens = len(tokenizer.encode_template(self._chat.before_user + self._chat.after_user))
        self._check_budget()

    def prompt(self, messages: Sequence[Said], tools: str, replies: Mapping[str, list[int]]) -> list[int]:
        """Returns a context up to its first sampled token.

        `tools` are the program's tools as JSON, "" for none; `replies` are the tokens of what the policy has said in
        this trajectory. Raises Refused when the chat template does not render these roles or the tools.
        """
        return self._tokens(messages, tools, replies, start=0)

    def added(self, messages: Sequence[Said], tools: str, *, num_known: int, last_id: int) -> list[int]:
        """Returns what the messages after the first `num_known` add to a context whose last token is `last_id`. Raises
        as `prompt` does.
        """
        token_ids = self._tokens(messages, tools, {}, start=num_known)
        return token_ids[1:] if last_id == token_ids[0] else token_ids  # the policy closed its message itself

    def _tokens(
        self, messages: Sequence[Said], tools: str, replies: Mapping[str, list[int]], *, start: int
    ) -> list[int]:
        """Returns the tokens of the messages from number `start` on, and of the template around them."""
        gaps = self._gaps(tuple(message.role for message in messages), tools)
        token_ids = list(gaps.token_ids[start])
        for place, message in enumerate(messages[start:], start):
            token_ids += self._said(message, replies, quoted=place in gaps.quoted)
            token_ids += gaps.token_ids[place + 1]
        return token_ids

    def _said(self, message: Said, replies: Mapping[str, list[int]], *, quoted: bool) -> list[int]:
        if message.role == "assistant" and message.text in replies:
            return replies[message.text]
        text = self._break_tags(message.text) if message.role == "tool" else message.text
        return self.encode(json.dumps(text, ensure_ascii=False)[1:-1] if quoted else text)

    def _rendered_gaps(self, roles: tuple[str, ...], tools: str) -> _Gaps:
        joined = roles[0] == "system" and not shows_system(self.tokenizer)  # its text goes before the user's
        shown = roles[1:] if joined else roles
        if len(shown) > _MOST_MESSAGES:
            raise Refused(f"the request has {len(shown)} messages, more than {_MOST_MESSAGES}")
        marks = [chr(_FIRST_MARK + place) for place in range(len(shown))]
        messages = [{"role": role, "content": mark} for role, mark in zip(shown, marks, strict=True)]
        listed = self._safe(json.loads(tools)) if tools else []
        try:
            text = self.tokenizer.render_chat(messages, add_generation_prompt=True, tools=listed)
        except ChatTemplateError as error:
            raise Refused(f"the model's chat template refuses the roles {list(roles)}: {error}") from error
        if listed and listed[0]["function"]["name"] not in text:
            raise Refused("tools: the model's chat template shows none")
        if listed:
            self._check_calls(listed)
        if re.findall(f"[{marks[0]}-{marks[-1]}]", text) != marks:
            raise Refused(f"the model's chat template does not render each of the roles {list(roles)} once")
        gaps = []
        for mark in marks:
            gap, _, text = text.partition(mark)
            gaps.append(gap)
        gaps.append(text)
        if joined:
            gaps.insert(1, "\n\n")
        # White space between a reply and the token that closes it is the template's: the policy did not write it.
        stripped = [
            gap.lstrip() if place and roles[place - 1] == "assistant" else gap for place, gap in enumerate(gaps)
        ]
        places = [place for place, role in enumerate(roles) if role == "tool"]
        quoted = frozenset(place for place in places if gaps[place][-1:] == gaps[place + 1][:1] == '"')
        return _Gaps([self.tokenizer.encode_template(gap) for gap in stripped], quoted)

    def _check_calls(self, tools: list[dict[str, Any]]) -> None:
        try:
            are_read = reads_calls_of(self.tokenizer, tools, self.parse_calls)
        except ConfigError as error:
            raise Refused(f"tools: {error}") from error
        if not are_read:
            raise Refused(
                f"tools: agent.tool_parser is {self._tool_parser!r}, which does not read calls in the form of the "
                "model's chat template; name vLLM's parser for this model, e.g. llama3_json"
            )

    def _safe(self, value: Any) -> Any:
        """Returns the JSON value with texts in which nothing separates roles."""
        if isinstance(value, str):
            return self._neutralize(value)
        if isinstance(value, list):
            return [self._safe(item) for item in value]
        if isinstance(value, dict):
            return {self._neutralize(key): self._safe(item) for key, item in value.items()}
        return value
