"""What the agent service takes and gives, as its OpenAPI schema says it. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_OBJECTIVES = 16
MAX_SAMPLES = 16
MAX_MESSAGES = 256
MAX_QUESTION_CHARS = 100_000
_Text = Annotated[str, Field(strict=True, min_length=1, pattern=r"\S")]
_Question = Annotated[_Text, Field(max_length=MAX_QUESTION_CHARS)]
_Id = Annotated[str, Field(strict=True, min_length=1, max_length=200)]
_Count = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class BudgetChanges(_Request):
    """Limits in place of the served agent's own; each agent takes those that mean something to it."""

    question_tokens: _Count | None = None
    action_tokens: _Count | None = None
    memory_tokens: _Count | None = None
    observation_tokens: _Count | None = None
    chunk_tokens: _Count | None = None
    max_turns: _Count | None = None


class Sampling(_Request):
    """Says how the policy is sampled, where that differs from the service's own way."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=1_000_000)] | None = None


class Options(_Request):
    """Holds what both ways of asking share; in chat completions it is the field `mempipe`."""

    agent: _Id | None = None
    """One of the served agents; null: the service's own."""
    budget: BudgetChanges = BudgetChanges()
    document: _Id | None = None
    """An uploaded document that the agent reads (POST /v1/documents)."""
    partition: Annotated[str, Field(strict=True, max_length=1000)] = ""
    """The part of the corpus that is searched; empty: all of it."""
    num_samples: Annotated[int, Field(strict=True, ge=1, le=MAX_SAMPLES)] = 1
    """Attempts; with more than one the most frequent answer is given, and its share of them as `confidence`."""
    session: _Id | None = None
    """A session, whose memory the agent starts from (POST /v1/sessions)."""


class AnswerRequest(Options):
    """A question, or several that are answered together."""

    question: _Question | None = None
    objectives: Annotated[list[_Question], Field(min_length=1, max_length=MAX_OBJECTIVES)] | None = None
    """Several questions in place of one."""
    text: _Text | None = None
    """A text that the agent reads, in place of an uploaded document."""
    model: _Id | None = None
    """The served model; null: there is one only."""
    sampling: Sampling = Sampling()
    stream: Annotated[bool, Field(strict=True)] = False
    """Server-sent events while the agent works, the answer last."""

    @model_validator(mode="after")
    def _one_of_each(self) -> AnswerRequest:
        if (self.question is None) == (self.objectives is None):
            raise ValueError("give question or objectives, one of them")
        if self.text is not None and self.document is not None:
            raise ValueError("give text or document, not both")
        return self


class ChatMessage(_Request):
    role: Literal["user", "assistant"]
    """The agent has instructions of its own: there is no system role."""
    content: _Question


class StreamOptions(_Request):
    include_usage: Annotated[bool, Field(strict=True)] = False


class ChatRequest(_Request):
    """A chat: its last message is the question, what was said before is noted in the memory that the agent starts
    from."""

    model: _Id
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    n: Literal[1] = 1
    stream: Annotated[bool, Field(strict=True)] = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(strict=True, max_length=1000)] | None = None
    """Taken and not looked at."""
    mempipe: Options = Options()
    """What the OpenAI API has no field for."""

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> ChatRequest:
        if self.messages[-1].role != "user":
            raise ValueError("messages: the last one is the question, of role 'user'")
        return self


class PassageReply(BaseModel):
    id: str
    title: str
    text: str
    score: float


class SearchReply(BaseModel):
    query: str
    passages: list[PassageReply]


class ToolReply(BaseModel):
    tool: str
    arguments: str
    texts: list[str]


class TurnReply(BaseModel):
    """One context of the agent: what it thought, did, read and kept."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    index: int
    thought: str
    action: str
    """The sampled message as it was written."""
    chunk: str = ""
    """The part of a long text that it read, for agents that read."""
    searches: list[SearchReply]
    tools: list[ToolReply]
    memory_before: str
    memory_after: str
    memory_added: list[str]
    """Words of memory_after that memory_before does not have, in runs."""
    memory_dropped: list[str]
    """Words of memory_before that memory_after no longer has, in runs; none where no memory was written."""
    memory_tokens: int
    """Of the memory that the turn started from."""
    memory_limit: int | None
    prompt_tokens: int
    """What the model read before its first token in this turn."""
    full_history_tokens: int
    """What it would have read with every earlier action and passage kept instead of a memory."""
    sampled_tokens: int
    context_tokens: int
    generate_seconds: float
    search_seconds: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerReply(BaseModel):
    """An answer and how it was found."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())

    id: str
    object: Literal["answer"] = "answer"
    created: int
    model: str
    model_version: str
    """The weights that sampled all of it."""
    agent: str
    question: str
    answer: str | None
    """null: the agent ended without one; end_reason says how."""
    answers: list[str]
    """One per objective, where there are several."""
    end_reason: str
    confidence: float | None
    """Share of the attempts that gave this answer; null with one attempt."""
    turns: list[TurnReply]
    usage: Usage
    seconds: float
    session: str | None


class ChatReplyMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int = 0
    message: ChatReplyMessage
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


class ModelReply(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["mempipe"] = "mempipe"
    version: str
    agents: list[str]


class ModelsReply(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelReply]


class SessionReply(BaseModel):
    id: str
    object: Literal["session"] = "session"
    memory: str
    num_questions: int
    created_at: float
    expires_at: float


class SessionsReply(BaseModel):
    object: Literal["list"] = "list"
    data: list[SessionReply]


class DocumentReply(BaseModel):
    id: str
    object: Literal["document"] = "document"
    num_bytes: int
    created_at: float
    expires_at: float


class DeletedReply(BaseModel):
    id: str
    deleted: Literal[True] = True


class StatusReply(BaseModel):
    status: str
    model: str = ""
    model_version: str = ""
    detail: dict[str, Any] = {}
