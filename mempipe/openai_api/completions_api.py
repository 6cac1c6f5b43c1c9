"""Requests and replies of `/v1/completions`: every field of the OpenAI API, as its OpenAPI schema says it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from mempipe.answers.api import AnswerReply, Count, Id, NumSamples, Options, Seed, Temperature, TopK, TopP, Usage
from mempipe.openai_api.chat_api import ChatMessage, ChatRequest, Stops, StreamOptions
from mempipe.openai_api.fields import ExtendedBody
from mempipe.text import replace_surrogates


def _one(prompt: Any) -> Any:
    """Returns the text of a prompt. Raises ValueError."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("prompt should be one question as a text; this service takes neither several nor token ids")
    return replace_surrogates(prompt)


_PROMPT: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1}]
}


class CompletionRequest(ExtendedBody):
    """A bare question.

    What has no meaning here is taken and listed in the response header `x-mempipe-ignored`.
    """

    model: Id
    prompt: Annotated[str, BeforeValidator(_one), WithJsonSchema(_PROMPT)]
    """The question."""
    max_tokens: Count | None = None
    """The most tokens of one message of the policy: of a thought with its search or answer, or of a memory."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop: Stops | None = None
    """The answer ends before the first of these texts."""
    seed: Seed | None = None
    n: NumSamples | None = None
    """Attempts, a choice for each: first one with the most frequent answer."""
    stream: Annotated[bool, Field(strict=True)] | None = None
    stream_options: StreamOptions | None = None
    mempipe: Options | None = None
    """Options for which the OpenAI API has no field."""

    # Refused unless they request nothing (`mempipe.openai_api.fields`).
    best_of: Any = None
    logprobs: Any = None
    suffix: Any = None

    def as_chat(self) -> ChatRequest:
        """Returns the chat that has this question alone."""
        shared = self.model_fields_set & ChatRequest.model_fields.keys() - {"logprobs"}
        question = ChatMessage(role="user", content=self.prompt)
        return ChatRequest(messages=[question], **{name: getattr(self, name) for name in shared})


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class CompletionReply(BaseModel):
    """A completion; `mempipe` is the whole answer with its trace."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    mempipe: AnswerReply
