"""Requests and replies of `/v1/responses`: every field of the OpenAI API, as its OpenAPI schema says it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mempipe.answers.api import (
    AnswerReply,
    Count,
    EncodableText,
    Id,
    Metadata,
    Options,
    RequestBody,
    Sampling,
    Seed,
    Temperature,
    TokenLogprob,
    TopK,
    TopP,
)
from mempipe.openai_api.chat_api import MAX_MESSAGES, Content, StreamOptions
from mempipe.openai_api.fields import ExtendedBody

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probs."""


class SummaryText(BaseModel):
    type: Literal["summary_text"] = "summary_text"
    text: str


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(BaseModel):
    """One turn of the agent."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Literal["in_progress", "completed"] = "completed"
    summary: list[SummaryText]
    """The memory after the turn, where it wrote one."""
    content: list[ReasoningText]
    """The thought, where it had one."""


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class MessageItem(BaseModel):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    content: list[OutputText]


MAX_DEPTH = 100
"""Objects and lists within each other in an item of an input."""


class InputItem(BaseModel):
    """An item of any client or of an earlier response. Its text and its calls are read, and the memory of a reasoning
    item of this service."""

    model_config = ConfigDict(extra="allow")

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Any = None
    summary: Any = None
    name: str = ""
    arguments: str = ""
    input: str = ""
    output: Content = ""

    @model_validator(mode="before")
    @classmethod
    def _can_be_written_again(cls, fields: Any) -> Any:
        """Refuses what could not be stored with its response. Raises ValueError."""
        level, depth = [fields], 0
        while nested := [value for value in level if isinstance(value, dict | list)]:
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"the item is nested too deep; expected at most {MAX_DEPTH} levels")
            level = [each for value in nested for each in (value.values() if isinstance(value, dict) else value)]
        return fields


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _id(value: Any) -> Any:
    return value["id"] if isinstance(value, dict) and set(value) == {"id"} else value


class ResponseRequest(ExtendedBody):
    """A question, with the earlier messages: in `input`, in the response `previous_response_id`, or in a
    `conversation`.

    What has no meaning here is taken and listed in the response header `x-mempipe-ignored`.
    """

    model: Id | None = None
    """The served model; null: there is one only."""
    input: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(_items)]
    """A text, or items whose last one is a message of role user."""
    instructions: EncodableText | None = None
    previous_response_id: Id | None = None
    """A stored response, whose memory the agent starts from."""
    conversation: Annotated[Id, BeforeValidator(_id)] | None = None
    """A conversation or a session, whose memory the agent starts from and leaves its own in."""
    max_output_tokens: Count | None = None
    """The most tokens of one message of the policy: of a thought with its search or answer, or of a memory."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` gives the log-probs of the answer's tokens; the others change nothing."""
    metadata: Metadata | None = None
    """Kept with the response, and with the MLflow trace of the question where there is one."""
    store: Annotated[bool, Field(strict=True)] | None = None
    """false: the response is not kept, and no other one can resume from it."""
    stream: Annotated[bool, Field(strict=True)] | None = None
    stream_options: StreamOptions | None = None
    mempipe: Options | None = None
    """Options for which the OpenAI API has no field."""

    # Taken and not looked at: they change nothing of an answer.
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    max_tool_calls: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    service_tier: Any = None
    truncation: Any = None

    # Refused unless they request nothing (`mempipe.openai_api.fields`).
    background: Any = None
    moderation: Any = None
    prompt: Any = None
    text: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_output_tokens,
            seed=self.seed,
        )


class InputTokensRequest(ResponseRequest):
    """A question whose first prompt is counted."""

    personality: Any = None


class InputTokensReply(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(BaseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ConversationOfResponse(BaseModel):
    id: str


class ResponseReply(BaseModel):
    """A response. `mempipe` is the whole answer with its trace, which a stored response no longer has."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[ReasoningItem | MessageItem] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    conversation: ConversationOfResponse | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    metadata: dict[str, str]
    store: bool
    background: Literal[False] = False
    parallel_tool_calls: Literal[False] = False
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    text: dict[str, Any] = {"format": {"type": "text"}}
    truncation: Literal["disabled"] = "disabled"
    mempipe: AnswerReply | None = Field(None, exclude_if=lambda trace: trace is None)


class DeletedResponseReply(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemOfInput(BaseModel):
    """An item of a request as it was sent, with a separate id; the content of a message is a list of parts."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


class ConversationRequest(RequestBody):
    """The first items of a conversation.

    What has no meaning here is taken and listed in the response header `x-mempipe-ignored`.
    """

    items: Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)] | None = None
    metadata: Metadata | None = None
    """Kept with the conversation."""


class ConversationUpdate(RequestBody):
    metadata: Metadata | None
    """Replaces the metadata of the conversation."""


class ItemsRequest(RequestBody):
    """Items that the memory of a conversation notes."""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]


class ConversationReply(BaseModel):
    """A conversation is a session under the name that the OpenAI API has for it."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str] = {}


class DeletedConversationReply(BaseModel):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
