"""Requests and replies of the agent service, as in its OpenAPI schema. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mempipe.text import replace_surrogates

MAX_OBJECTIVES = 16
MAX_SAMPLES = 16
MAX_QUESTION_CHARS = 100_000
MAX_ID_CHARS = 200
Text = Annotated[str, Field(strict=True, min_length=1, pattern=r"\S")]
QuestionText = Annotated[Text, Field(max_length=MAX_QUESTION_CHARS)]
Id = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_ID_CHARS)]


def _encodable(value: object) -> Any:
    """Returns a text with half characters replaced, which no answer could repeat; another value stays as it is."""
    return replace_surrogates(value) if isinstance(value, str) else value


def _encodable_texts(value: object) -> Any:
    if not isinstance(value, dict):
        return value
    return {_encodable(name): _encodable(each) for name, each in value.items()}


def _whole(value: object) -> Any:
    """Returns a float that is an integer as one: JSON has a single type of number, so 10.0 is 10."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


EncodableText = Annotated[str, Field(strict=True, max_length=MAX_QUESTION_CHARS), BeforeValidator(_encodable)]
Metadata = Annotated[dict[str, str], Field(max_length=16), BeforeValidator(_encodable_texts)]
_WHOLE = BeforeValidator(_whole)
Count = Annotated[int, Field(strict=True, ge=1, le=10_000_000), _WHOLE]
UserId = Annotated[str, Field(strict=True, max_length=MAX_ID_CHARS), BeforeValidator(_encodable)]
NumSamples = Annotated[int, Field(strict=True, ge=1, le=MAX_SAMPLES), _WHOLE]
TopK = Annotated[int, Field(strict=True, ge=-1, le=1_000_000), _WHOLE]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63), _WHOLE]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class BudgetChanges(RequestBody):
    """Limits in place of the served agent's own; each agent takes those that mean something to it."""

    question_tokens: Count | None = None
    action_tokens: Count | None = None
    memory_tokens: Count | None = None
    observation_tokens: Count | None = None
    chunk_tokens: Count | None = None
    document_tokens: Count | None = None
    max_turns: Count | None = None


class Sampling(RequestBody):
    """Says how the policy is sampled, where that differs from the service's own way."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    """0: the likeliest token, as with temperature 0."""
    top_k: TopK | None = None
    max_tokens: Count | None = None
    """The most tokens of one message of the policy, where the agent's own limit is higher."""
    seed: Seed | None = None
    """The same question with the same seed and settings is sampled alike, as long as the weights are the same."""


class Options(RequestBody):
    """Holds what both ways of asking share; in chat completions it is the field `mempipe`."""

    agent: Id | None = None
    """One of the served agents; null: the service's own."""
    budget: BudgetChanges = BudgetChanges()
    document: Id | None = None
    """An uploaded document that the agent reads (POST /v1/documents)."""
    partition: Annotated[str, Field(strict=True, max_length=1000)] | None = None
    """The part of the corpus that is searched; null: the service's own (GET /v1/corpus); empty: all of it."""
    num_samples: NumSamples = 1
    """Attempts; with more than one the most frequent answer is given, and its share of them as `confidence`."""
    session: Id | None = None
    """A session, whose memory the agent starts from (POST /v1/sessions)."""
    user: UserId = ""
    """Who asks, for tools and programs that remember longer than one question. Users of another key are others."""


class AnswerRequest(Options):
    """A question, or several that are answered together."""

    question: QuestionText | None = None
    objectives: Annotated[list[QuestionText], Field(min_length=1, max_length=MAX_OBJECTIVES)] | None = None
    """Several questions in place of one."""
    instructions: QuestionText | None = None
    """Instructions for the agent, in addition to the question; they share its budget. Not every prompt set has a place
    for them."""
    text: Text | None = None
    """A text that the agent reads, in place of an uploaded document."""
    model: Id | None = None
    """The served model; null: there is one only."""
    sampling: Sampling = Sampling()
    logprobs: Annotated[bool, Field(strict=True)] = False
    """Give the log-probs of each attempt's answer; refused where the engine has none."""
    metadata: Metadata = {}
    """Kept with the MLflow trace of the question, where there is one."""
    stream: Annotated[bool, Field(strict=True)] = False
    """Server-sent events while the agent works, the answer last."""

    @model_validator(mode="after")
    def _one_of_each(self) -> AnswerRequest:
        if (self.question is None) == (self.objectives is None):
            raise ValueError("give question or objectives, one of them")
        if self.text is not None and self.document is not None:
            raise ValueError("give text or document, not both")
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
    messages: list[str] = []
    """The messages in it: several where the agent searches several times in one context."""
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
    """Tokens of the memory that the turn started from."""
    memory_limit: int | None
    prompt_tokens: int
    """Tokens that the model read before its first token in this turn."""
    full_history_tokens: int
    """Tokens that it would have read with every earlier action and passage instead of a memory."""
    sampled_tokens: int
    context_tokens: int
    generate_seconds: float
    search_seconds: float


class PromptTokensDetails(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    cached_tokens: int
    """Tokens that the engine's prefix cache held."""


class CompletionTokensDetails(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    reasoning_tokens: int
    """Sampled tokens outside the answers: thoughts, searches and memories."""


class Usage(BaseModel):
    """Tokens over all turns and attempts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(BaseModel):
    """A sampled token and the logarithm of its probability."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    token: str
    logprob: float
    bytes: list[int]
    """The token's text in UTF-8; a character of several tokens is the text of the last of them."""
    top_logprobs: list[Any] = []
    """Always empty: the engine says nothing of the tokens that it did not sample."""


class AttemptReply(BaseModel):
    """How one attempt at the question ended."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    answer: str | None
    end_reason: str
    logprobs: list[TokenLogprob] | None = None
    """Log-probs of the answer's tokens, if a chat asks for them."""


class AnswerReply(BaseModel):
    """An answer and how it was found."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())

    id: str
    object: Literal["answer"] = "answer"
    created: int
    model: str
    model_version: str
    """The weights that sampled all of it."""
    index: str | None = None
    """Hash of the index that answered all of its searches; null without any."""
    agent: str
    question: str
    answer: str | None
    """null: the agent ended without one; end_reason says how."""
    answers: list[str]
    """One per objective, where there are several."""
    end_reason: str
    confidence: float | None
    """Share of the attempts that gave this answer; null with one attempt."""
    attempts: list[AttemptReply]
    """All attempts, first the one whose answer and turns are given."""
    turns: list[TurnReply]
    usage: Usage
    full_history_tokens: int
    """Tokens that the turns would have read with their full history instead of a memory."""
    seconds: float
    session: str | None
    memory: str
    """The last memory, and the question with its answer: the next question of a conversation starts from it."""


class ModelReply(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    root: str
    """The same name: `vllm bench serve` needs this field unless its command names a model."""
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["mempipe"] = "mempipe"
    version: str
    agents: list[str]
    budgets: dict[str, dict[str, int]]
    """Limits of each agent in tokens and turns, by their names in `budget` of a request. `memory_tokens` is the most
    that goes from one turn to the next, besides the question."""


class ModelsReply(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelReply]


class ExampleReply(BaseModel):
    """A held-out question of the served run."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    question: str
    golden_answers: list[str]
    partition: str
    """The part of the corpus that the question is about; empty: all of it."""
    text: str = ""
    """The document of the question, for agents that read."""


class CorpusReply(BaseModel):
    """The corpus of the service, and questions about it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    partition: str = ""
    """The part that is searched for a request that names none; empty: all of it."""
    partitions: list[str] = []
    """The parts of the corpus; empty where it has none, and where another server holds it."""
    examples: list[ExampleReply] = []


class SessionReply(BaseModel):
    id: str
    object: Literal["session"] = "session"
    memory: str
    num_questions: int
    created_at: float
    expires_at: float


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
