"""Parses the policy's messages, and defines the interfaces that an agent needs: a tokenizer, `generate` and `search`.

MemSearcher (arXiv 2511.02805) writes a thought between `<think>` tags, then calls of its tools, each a JSON object
between `<tool_call>` tags, or an answer in `\\boxed{…}`; a memory message holds the memory between `<memory>` tags.
MemAgent answers in a box as well. MEM1 and ReAct write a thought, then a query between `<search>` tags or an answer
between `<answer>` tags (`mempipe.agents.tagged`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mempipe.agents.tools import InvalidCall, Toolbox, ToolCall
from mempipe.text import BOX, until_first
from mempipe.types import Completion, EndReason, SearchResult


class ChatTemplateError(ValueError):
    """The chat template refuses these messages."""


class UnreadableCall(ValueError):
    """A message of the policy holds a call of a tool in a form that cannot be read."""


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """A message of the policy as a parser of tool calls takes it apart."""

    content: str
    """The text besides the calls."""
    calls: list[tuple[str, str]]
    """Name and arguments, as JSON, of each."""


ParseCalls = Callable[[str, str], ParsedCalls]
"""(message, tools as JSON) -> its calls; raises UnreadableCall."""


class UnfitQuestion(ValueError):
    """A question that the agent cannot take: the question or its text is too long, or there is nothing to read. The
    message names the question and the setting.
    """


class QuestionTooLong(UnfitQuestion):
    """The question or its text does not fit its budget."""


class Tokenizer(Protocol):
    """The text-to-ids boundary (`mempipe.engines.tokenizer.load_tokenizer` makes one)."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Returns the ids that end an assistant message."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Returns the ids that only templates and the policy may produce: every special or added token."""
        ...

    @property
    def special_tokens(self) -> Sequence[str]:
        """Returns the texts of the special tokens."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Encodes trusted text; special tokens in it become their ids. Adds no token (no BOS)."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Encodes untrusted text; no id of `special_token_ids` can arise, whatever the text holds (lone surrogates
        too).
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the ids, special tokens included."""
        ...

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """Applies the chat template to role/content messages, and to tools in OpenAI's form. Raises ChatTemplateError
        when it refuses them.
        """
        ...

    def tool_parser(self, name: str) -> ParseCalls:
        """Returns the parser of tool calls that has this name. Raises ConfigError for another name, and for a parser
        that does not fit the vocabulary; the parser raises it for tools that it does not take.
        """
        ...


class GenerateFn(Protocol):
    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        """Samples one assistant message after `token_ids`. Infrastructure faults raise; they never come
        back as text.
        """
        ...


class SearchFn(Protocol):
    async def __call__(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        """Returns the best passages, at most `num_passages`. Infrastructure faults raise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The action of an assistant message: calls of tools (then `end_reason` is None), or the end of the trajectory."""

    calls: list[ToolCall] = field(default_factory=list)
    answer: str | None = None
    end_reason: EndReason | None = None


def parse_action(text: str, *, tools: Toolbox, box_in_thought: bool = False) -> Action:
    """Parses MemSearcher's message `text`, its pre-filled start included. If a message has both, the call wins."""
    try:
        calls = [tools.parse(call) for call in tool_call_texts(text)]
    except InvalidCall:
        return Action(end_reason=EndReason.INVALID_CALL)
    if calls:
        return Action(calls=calls)
    answer = parse_answer(text, box_in_thought=box_in_thought)
    if answer is None:
        return Action(end_reason=EndReason.NO_ACTION)
    return Action(answer=answer, end_reason=EndReason.ANSWERED)


def between_blocks(text: str, tag: str) -> list[str]:
    """Returns the parts of the text around those from an opening tag to the next closing one, tags included."""
    pieces: list[str] = []
    place = 0
    for start, end in _spans(text, tag):
        pieces.append(text[place:start])
        place = end
    return [*pieces, text[place:]]


def without_blocks(text: str, tag: str) -> str:
    """Returns the text without the parts from an opening tag to the next closing one, tags included."""
    return "".join(between_blocks(text, tag))


def tool_call_texts(text: str) -> list[str]:
    """Returns the inner texts of all `<tool_call>` blocks; none when the tags do not pair."""
    return _blocks(text, "tool_call")


def parse_memory(text: str) -> str:
    """Returns the first `<memory>` block of a memory message; "" when there is none or the tags do not pair."""
    return next(iter(_blocks(text, "memory")), "")


def parse_answer(
    text: str, *, paired: Sequence[str] = ("think", "tool_call"), box_in_thought: bool = False
) -> str | None:
    """Returns the last box, outside the thoughts unless `box_in_thought`; None when there is none, or a tag of `paired`
    does not pair.
    """
    if not all(_tags_pair(text, tag) for tag in paired):
        return None
    return last_boxed(text if box_in_thought else without_blocks(text, "think").strip())


def last_stated(text: str) -> str | None:
    """Returns what follows the last "the answer is", without the marks around it; None if nothing follows it or it does
    not occur.
    """
    _, found, rest = text.rpartition("the answer is")
    return (rest.strip(" \n*.:") or None) if found else None


def last_boxed(text: str) -> str | None:
    """Returns the content of the last `\\boxed`; None when there is none or its braces do not close.

    `\\boxed{a {b}}` holds `a {b}`; the brace-less `\\boxed a` holds everything up to the next `$`. Nothing else is a
    box.
    """
    _, box, rest = text.rpartition(BOX)
    if not box:
        return None
    if rest.startswith(" "):
        return rest[1:].partition("$")[0]
    if not rest.startswith("{"):
        return None
    depth = 0
    for brace in re.finditer("[{}]", rest):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[1 : brace.start()]
    return None


def _blocks(text: str, tag: str) -> list[str]:
    """Returns the stripped texts between the tags; none when they do not pair."""
    return _between(text, tag) if _tags_pair(text, tag) else []


def _tags_pair(text: str, tag: str) -> bool:
    """Returns whether there are as many openings as closings, and the n-th opening precedes the n-th closing."""
    openings = [match.start() for match in re.finditer(f"<{tag}>", text)]
    closings = [match.start() for match in re.finditer(f"</{tag}>", text)]
    return len(openings) == len(closings) and all(start < end for start, end in zip(openings, closings, strict=True))


def thought_of(text: str, *, actions: Sequence[str]) -> str:
    """Returns the thoughts in an assistant message: the texts between its think tags, or all that precedes the first of
    `actions`.

    A message whose opening tag was written for the policy starts inside its first thought.
    """
    before, closing, _ = text.partition("</think>")
    if closing and "<think>" not in before:
        text = "<think>" + text
    if thoughts := _between(text, "think"):
        return "\n".join(thoughts)
    return until_first(text, actions).removeprefix("<think>").strip()


def _between(text: str, tag: str) -> list[str]:
    """Returns the stripped texts from each opening tag to the next closing one."""
    return [text[start + len(f"<{tag}>") : end - len(f"</{tag}>")].strip() for start, end in _spans(text, tag)]


def _spans(text: str, tag: str) -> Iterator[tuple[int, int]]:
    """Yields where each opening tag starts and the next closing one ends, in linear time: after an opening that nothing
    closes there is no further one to be looked for.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    place = 0
    while (start := text.find(opening, place)) >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        place = end + len(closing)
        yield start, place
