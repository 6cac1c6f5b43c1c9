"""Requests and replies of `/v1/chat/completions`: every field of the OpenAI API, as its OpenAPI schema says it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from mempipe.answers.api import (
    AnswerReply,
    Count,
    Id,
    Metadata,
    NumSamples,
    Options,
    RequestBody,
    Sampling,
    Seed,
    Temperature,
    TokenLogprob,
    TopK,
    TopP,
    Usage,
)
from mempipe.openai_api.fields import ExtendedBody
from mempipe.text import replace_surrogates

MAX_MESSAGES = 10_000
MAX_STOPS = 16
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the field that holds it."""


def _joined(content: Any) -> Any:
    """Returns the content of a message as one text that can be encoded; its parts are on separate lines. Raises
    ValueError.
    """
    if content is None:
        return ""
    text = "\n".join(map(_part, content)) if isinstance(content, list) else content
    return replace_surrogates(text) if isinstance(text, str) else text


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _PARTS:
        raise ValueError(f"a content part is of type {str(kind)[:40]!r}; this service reads parts of type 'text' only")
    if not isinstance(text := part.get(_PARTS[kind]), str):
        raise ValueError(f"a content part of type {kind!r} has no text in its field {_PARTS[kind]!r}")
    return text


_CONTENT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}},
        },
        {"type": "null"},
    ]
}
Content = Annotated[str, Field(strict=True), BeforeValidator(_joined), WithJsonSchema(_CONTENT)]

_STOPS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Stops = Annotated[
    list[str],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    WithJsonSchema(_STOPS),
]


class ChatMessage(BaseModel):
    """A message of any client: its text and its calls are read, and nothing else of it."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """system and developer: instructions; tool and function: what a call of the client's own tools gave."""
    content: Content = ""
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None

    def said(self) -> Iterator[str]:
        """Yields its texts, including its calls; blank texts are nothing."""
        calls = [call.get("function") or call.get("custom") for call in self.tool_calls or []]
        for call in (*calls, self.function_call):
            if isinstance(call, dict):
                yield replace_surrogates(f"{call.get('name', '')} {call.get('arguments') or call.get('input') or ''}")
        if self.content.strip():
            yield self.content


class StreamOptions(RequestBody):
    include_usage: Annotated[bool, Field(strict=True)] | None = None
    """Send a last chunk with the tokens that were used."""
    continuous_usage_stats: Any = None
    include_obfuscation: Any = None


class ChatRequest(ExtendedBody):
    """A chat: its last message of role user is the question, earlier messages are put into the memory that the agent
    starts from, and messages of role system or developer are instructions.

    What has no meaning here is taken and listed in the response header `x-mempipe-ignored`.
    """

    model: Id
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    max_tokens: Count | None = None
    """The most tokens of one message of the policy: of a thought with its search or answer, or of a memory."""
    max_completion_tokens: Count | None = None
    """The same under its newer name; the lower one of both holds."""
    stop: Stops | None = None
    """The answer ends before the first of these texts."""
    seed: Seed | None = None
    n: NumSamples | None = None
    """Attempts, a choice for each: first one with the most frequent answer."""
    logprobs: Annotated[bool, Field(strict=True)] | None = None
    """Give the log-probs of the answer's tokens."""
    stream: Annotated[bool, Field(strict=True)] | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    """Kept with the MLflow trace of the question, where there is one."""
    include_reasoning: Annotated[bool, Field(strict=True)] | None = None
    """Give the thought and the memory of each turn as `reasoning_content`; null: as the service is set."""
    mempipe: Options | None = None
    """Options for which the OpenAI API has no field."""

    # Taken and not looked at: they change nothing of an answer.
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None

    # Refused unless they request nothing (`mempipe.openai_api.fields`).
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    web_search_options: Any = None

    @property
    def stops(self) -> list[str]:
        """Returns the texts that end an answer."""
        return [text for text in self.stop or [] if text]

    @property
    def sampling(self) -> Sampling:
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=min(limits, default=None),
            seed=self.seed,
        )


class ChatReplyMessage(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | None = Field(None, exclude_if=lambda text: text is None)
    """The thought and the memory of each turn, where they are asked for."""
    refusal: None = None


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatReplyMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatReply(BaseModel):
    """A chat completion; `mempipe` is the whole answer with its trace."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    mempipe: AnswerReply
