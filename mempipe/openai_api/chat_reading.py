"""Reads a chat request as a question to the agent: the request, the ignored fields, and the refused fields."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mempipe.answers.api import MAX_QUESTION_CHARS, AnswerRequest, Options
from mempipe.answers.conversation import exchange
from mempipe.answers.errors import TOO_LONG, ApiError
from mempipe.openai_api.chat_api import ChatMessage, ChatRequest
from mempipe.openai_api.fields import USER, of_messages, refuse_unsupported, unread

INSTRUCTIONS = ("system", "developer")
"""Roles whose messages are instructions, at any position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat as the agent takes it."""

    asked: AnswerRequest
    history: str | None
    """Earlier messages as a memory; None without any."""
    num_choices: int
    ignored: list[str]
    """Names of fields that were sent and have no meaning here."""


def read_chat(
    chat: ChatRequest, *, takes_instructions: bool, keeps_metadata: bool, knows_user: bool, is_greedy: bool
) -> Chat:
    """Returns the question of a chat.

    `takes_instructions`: the agent's prompt set has a place for them. `keeps_metadata`: questions are traced.
    `knows_user`: the agent or a tool of it learns who asks. `is_greedy`: the service takes the likeliest
    tokens unless the request has a temperature. Raises ApiError 400 with the field that is wrong or cannot be had.
    """
    refuse_unsupported(chat)
    instructions = [message for message in chat.messages if message.role in INSTRUCTIONS]
    said = [message for message in chat.messages if message.role not in INSTRUCTIONS]
    if not said or said[-1].role != "user" or not said[-1].content.strip():
        raise ApiError(400, "messages: the last one is the question, of role 'user' and not blank", param="messages")
    question = said[-1].content
    options, sampling = chat.mempipe or Options(), chat.sampling
    if options.session is not None and len(said) > 1:
        raise ApiError(400, "give a session or earlier messages, not both", param="mempipe.session")
    num_choices = chat.n or 1
    if num_choices > 1:
        if 0 in (chat.temperature, chat.top_p):
            name = "temperature" if chat.temperature == 0 else "top_p"
            message = f"n is {num_choices} at {name} 0, where all choices are the same; raise {name}"
            raise ApiError(400, message, param="n")
        if options.num_samples not in (1, num_choices):
            raise ApiError(400, f"n is {num_choices} and mempipe.num_samples {options.num_samples}; set one", param="n")
        options = options.model_copy(update={"num_samples": num_choices})
        if chat.temperature is None and is_greedy:  # the default of the OpenAI API
            sampling = sampling.model_copy(update={"temperature": 1.0})
    orders = "\n".join(message.content for message in instructions if message.content.strip())
    for what, text in (("the question", question), ("the instructions", orders if takes_instructions else "")):
        if len(text) > MAX_QUESTION_CHARS:
            message = f"messages: {what} should have at most {MAX_QUESTION_CHARS} characters, not {len(text)}"
            raise ApiError(400, message, param="messages", code=TOO_LONG)
    asked = AnswerRequest(
        question=question,
        instructions=orders if orders and takes_instructions else None,
        model=chat.model,
        sampling=sampling,
        logprobs=bool(chat.logprobs),
        metadata=chat.metadata or {},
        **dict(options) | chat.options_of_user,
    )
    roles = () if takes_instructions else {message.role for message in instructions}
    ignored = _ignored(chat, roles, keeps_metadata=keeps_metadata, knows_user=knows_user)
    return Chat(asked=asked, history=history(said[:-1]), num_choices=num_choices, ignored=ignored)


def history(messages: Sequence[ChatMessage]) -> str | None:
    """Returns the earlier messages of a chat as a memory, None where nothing was said: one line for each message of a
    user, with everything that was said after it.
    """
    exchanges: list[tuple[str, list[str]]] = []
    for message in messages:
        if message.role == "user":
            exchanges.append((message.content, []))
        else:
            if not exchanges:
                exchanges.append(("", []))
            exchanges[-1][1].extend(message.said())
    lines = [exchange(question, " ".join(said)) for question, said in exchanges if question.strip() or said]
    return "\n".join(lines) or None


def in_chat(error: ApiError) -> ApiError:
    """Returns the refusal of a chat's question with the field of the chat that it is about."""
    param = error.param
    if param in ("question", "instructions"):
        param = "messages"
    elif param is not None and param.partition(".")[0] in Options.model_fields:
        param = f"mempipe.{param}"
    return ApiError(error.status, str(error), param=param, code=error.code)


def _ignored(chat: ChatRequest, roles: Collection[str], *, keeps_metadata: bool, knows_user: bool) -> list[str]:
    """Returns the names of fields that were sent and change nothing, each once; `roles` are those that nobody
    reads."""
    meaningless = (set() if keeps_metadata else {"metadata"}) | (set() if knows_user else USER)
    names = sorted(unread(chat) | (chat.model_fields_set & meaningless))
    options = chat.stream_options
    if options is not None and not chat.stream:
        names.append("stream_options")
    elif options is not None:
        names += [f"stream_options.{name}" for name in sorted(unread(options))]
    return [*names, *of_messages("messages", chat.messages, roles)]
