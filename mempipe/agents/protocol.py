"""What the policy writes and what may be put before it: parsing of sampled text, neutralising of untrusted text.

Also what an agent needs from the outside, as plain callables: a tokenizer, `generate` and `search`.

MemSearcher (arXiv 2511.02805) writes a thought between `<think>` tags, then calls of the one tool, each a JSON object between
`<tool_call>` tags, or an answer in `\\boxed{…}`; a memory message holds the memory between `<memory>` tags. MemAgent answers in a box as
well. MEM1 and ReAct write a thought, then a query between `<search>` tags or an answer between `<answer>` tags (`mempipe.agents.tagged`).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from mempipe.config import AgentConfig, CompatConfig, RetrievalConfig
from mempipe.types import Completion, EndReason, SearchResult

BOX = "\\boxed"


class ChatTemplateError(ValueError):
    """The chat template refuses these messages."""


class UnfitQuestion(ValueError):
    """A question that the agent cannot take: it or its text is too long, or has nothing to read. The message names it and the setting."""


class Tokenizer(Protocol):
    """The text-to-ids boundary (`mempipe.engines.tokenizer.load_tokenizer` makes one)."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end an assistant message."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that only templates and the policy may produce: every special or added token."""
        ...

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts of those tokens."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Ids of trusted text; special tokens in it become their ids. Adds nothing of its own (no BOS)."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of untrusted text; no id of `special_token_ids` can arise, whatever the text holds (lone surrogates too)."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        ...

    def render_chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The chat template applied to role/content messages. Raises ChatTemplateError when it refuses them."""
        ...


class GenerateFn(Protocol):
    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        """Samples one assistant message after `token_ids`. Infrastructure faults raise; they never come back as text."""
        ...


class SearchFn(Protocol):
    async def __call__(self, query: str, *, num_passages: int, partition: str) -> SearchResult:
        """The best passages, at most `num_passages`. Infrastructure faults raise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """The one function that the policy may call, and the limits of every search."""

    name: str
    num_passages: int  # when the call names no number
    max_passages: int
    max_query_chars: int
    promised_passages: int | None = None  # what the schema says instead of num_passages, where published code breaks its word

    @classmethod
    def from_config(cls, agent: AgentConfig, retrieval: RetrievalConfig, compat: CompatConfig) -> Tool:
        return cls(
            name=agent.tool_name,
            num_passages=compat.num_passages or retrieval.num_passages,
            max_passages=retrieval.max_passages,
            max_query_chars=retrieval.max_query_chars,
            promised_passages=retrieval.num_passages,
        )

    def schema(self) -> str:
        """The function as the JSON schema that the policy reads."""
        query = {"type": "string", "description": "What to look for, in a few words.", "maxLength": self.max_query_chars}
        top_n = {
            "type": "integer",
            "description": "How many passages to return.",
            "default": self.promised_passages or self.num_passages,
            "minimum": 1,
            "maximum": self.max_passages,
        }
        parameters = {"type": "object", "properties": {"query": query, "top_n": top_n}, "required": ["query"]}
        function = {"name": self.name, "description": "Finds the passages that fit a query best.", "parameters": parameters}
        return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A valid call. `text` is the call as the policy wrote it."""

    text: str
    query: str
    num_passages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What an assistant message does: search (then `end_reason` is None), answer, or neither."""

    calls: list[ToolCall] = field(default_factory=list)
    answer: str | None = None
    end_reason: EndReason | None = None


class InvalidCall(ValueError):
    """A tool call that cannot be made; the message says what is wrong with it."""


def parse_action(text: str, *, tool: Tool, box_in_thought: bool = False) -> Action:
    """What MemSearcher's message `text` (its pre-filled start included) does. A call beside an answer wins."""
    try:
        calls = [parse_call(call, tool=tool) for call in tool_call_texts(text)]
    except InvalidCall:
        return Action(end_reason=EndReason.INVALID_CALL)
    if calls:
        return Action(calls=calls)
    answer = parse_answer(text, box_in_thought=box_in_thought)
    if answer is None:
        return Action(end_reason=EndReason.NO_ACTION)
    return Action(answer=answer, end_reason=EndReason.ANSWERED)


def tool_call_texts(text: str) -> list[str]:
    """The inner texts of all `<tool_call>` blocks; none when the tags do not pair."""
    return _blocks(text, "tool_call")


def parse_memory(text: str) -> str:
    """The first `<memory>` block of a memory message; "" when there is none or the tags do not pair."""
    return next(iter(_blocks(text, "memory")), "")


def parse_answer(text: str, *, paired: Sequence[str] = ("think", "tool_call"), box_in_thought: bool = False) -> str | None:
    """The last box, outside the thoughts unless `box_in_thought`; None when there is none, or a tag of `paired` does not pair."""
    if not all(_tags_pair(text, tag) for tag in paired):
        return None
    return last_boxed(text if box_in_thought else re.sub("<think>.*?</think>", "", text, flags=re.DOTALL).strip())


def last_stated(text: str) -> str | None:
    """What follows the last "the answer is", without the marks around it; None when it is said nowhere or nothing follows."""
    _, found, rest = text.rpartition("the answer is")
    return (rest.strip(" \n*.:") or None) if found else None


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed`; None when there is none or its braces do not close.

    `\\boxed{a {b}}` holds `a {b}`; the brace-less `\\boxed a` holds everything up to the next `$`. Nothing else is a box.
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


def parse_call(text: str, *, tool: Tool) -> ToolCall:
    """The call that the JSON `text` stands for. Raises InvalidCall unless it is one of `tool` with arguments in their bounds."""
    try:
        call = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError: also numbers of more digits than Python converts
        raise InvalidCall(f"the call is not JSON: {error}") from error
    if not isinstance(call, dict) or call.get("name") != tool.name:
        raise InvalidCall(f"the call does not name {tool.name}")
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        raise InvalidCall("arguments is not an object")
    if unknown := arguments.keys() - {"query", "top_n"}:
        raise InvalidCall(f"unknown arguments {sorted(unknown)}")
    query = arguments.get("query")
    if not isinstance(query, str) or not query.strip():
        raise InvalidCall("query is not a text")
    query = parse_query(query, tool=tool)
    num_passages = arguments.get("top_n", tool.num_passages)
    if type(num_passages) is not int or not 1 <= num_passages <= tool.max_passages:  # True is an int too
        raise InvalidCall(f"top_n is not a whole number from 1 to {tool.max_passages}")
    return ToolCall(text=text, query=query, num_passages=num_passages)


def parse_query(text: str, *, tool: Tool) -> str:
    """The query as it is searched. Raises InvalidCall when it is empty or longer than the tool takes."""
    query = replace_surrogates(text.strip())
    if not query:
        raise InvalidCall("query is empty")
    if len(query) > tool.max_query_chars:
        raise InvalidCall(f"query has {len(query)} characters, more than {tool.max_query_chars}")
    return query


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for every lone surrogate: what can be written as UTF-8."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


class Neutralizer:
    """Breaks what could be read as a special token or a protocol tag in untrusted text; all other text stays as it is.

    One character (a space, unless a special token holds one) goes in behind the first character of every occurrence. That character is
    part of no token, so none is left, none arises, and a second pass changes nothing. Special tokens of a single character cannot be
    broken; `Tokenizer.encode_text` sees to them.
    """

    def __init__(self, special_tokens: Iterable[str], *, tags: Sequence[str]) -> None:
        tokens = [token for token in special_tokens if len(token) > 1]
        used = {character for token in tokens for character in token}
        self._breaker = next(character for character in " _.\u00b7\u2060" if character not in used)
        endings: defaultdict[str, list[str]] = defaultdict(list)
        for token in tokens:
            endings[token[0]].append(re.escape(token[1:]))
        endings["<"].append(f"(?i:/?(?:{'|'.join(tags)})>)")
        endings[BOX[0]].append(f"(?i:{BOX[1:]})")
        # A first character, then a lookahead: the search skips to first characters quickly and overlapping occurrences are all found.
        self._pattern = re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in endings.items()))

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: match[0] + self._breaker, text)


def _blocks(text: str, tag: str) -> list[str]:
    """The stripped texts between the tags; none when they do not pair."""
    if not _tags_pair(text, tag):
        return []
    return [block.strip() for block in re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)]


def _tags_pair(text: str, tag: str) -> bool:
    """Whether there are as many openings as closings, and the n-th opening is before the n-th closing."""
    openings = [match.start() for match in re.finditer(f"<{tag}>", text)]
    closings = [match.start() for match in re.finditer(f"</{tag}>", text)]
    return len(openings) == len(closings) and all(start < end for start, end in zip(openings, closings, strict=True))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
