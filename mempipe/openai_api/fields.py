"""Fields that have no meaning here, of the OpenAI API and of servers that extend it: they are refused by name, or
listed."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from mempipe.answers.api import RequestBody, UserId
from mempipe.answers.errors import ApiError

MAX_LISTED = 50
_VALUES = reprlib.Repr()
"""How a refusal shows a value: chat programs show it to their users, and a list of tools has many kilobytes."""
_VALUES.maxlevel, _VALUES.maxlist, _VALUES.maxstring = 3, 1, 40
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")

IDLE: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "logprobs": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": ([], ["text"]),
    "moderation": (),
    "presence_penalty": (0,),
    "prompt": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields for what the agent cannot do, and their values, besides null, that request nothing."""


USER = {"user", "safety_identifier"}
"""Fields that say who asks."""


class ExtendedBody(RequestBody):
    """Fields that the APIs of chats, completions and responses share, most of them those of vLLM.

    A request's fields of the type Any have no meaning here: those in IDLE are refused unless they request nothing, and
    the others change nothing whatever they hold.
    """

    # Refused unless they request nothing.
    add_generation_prompt: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    echo: Any = None
    frequency_penalty: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    length_penalty: Any = None
    logit_bias: Any = None
    logprob_token_ids: Any = None
    min_p: Any = None
    min_tokens: Any = None
    presence_penalty: Any = None
    prompt_logprobs: Any = None
    repetition_penalty: Any = None
    response_format: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    skip_special_tokens: Any = None
    stop_token_ids: Any = None
    structured_outputs: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None

    # Taken and not looked at: they change nothing of an answer.
    add_special_tokens: Any = None
    priority: Any = None
    request_id: Any = None
    session_id: Any = None
    spaces_between_special_tokens: Any = None

    user: UserId | None = None
    """Who asks, for tools and programs that remember longer than one question."""
    safety_identifier: UserId | None = None
    """The newer name of `user`, which holds if both are given."""

    @property
    def options_of_user(self) -> dict[str, Any]:
        """Returns the option `user` where the request names one."""
        user = self.user or self.safety_identifier
        return {"user": user} if user else {}


def refuse_unsupported(request: BaseModel) -> None:
    """Raises ApiError 400 for a field without a meaning here that asks for what the service cannot do."""
    # A tool_choice comes last: without tools there is none to choose, so the message should be about the tools.
    for name in sorted(unread(request) & IDLE.keys(), key=lambda name: (name == "tool_choice", name)):
        value, values = getattr(request, name), IDLE[name]
        if value is None or value in values:
            continue
        expected = f"leave it out or send {values[-1]!r}" if values else "leave it out"
        message = f"{name} is {_VALUES.repr(value)}, which this service cannot do; {expected}"
        raise ApiError(400, message, param=name, code="unsupported_value" if values else "unsupported_parameter")


def unread(request: BaseModel) -> set[str]:
    """Returns the names of fields that were sent and have no meaning here, whatever they hold."""
    fields = type(request).model_fields
    return {name for name in request.model_fields_set if fields[name].annotation is Any}


def of_messages(field: str, messages: Sequence[BaseModel], unread: Collection[str]) -> list[str]:
    """Returns the names of keys that are sent with the messages in `field` and not read; `unread` are roles or
    types."""
    names = {name for message in messages for name in message.model_extra or {}} | set(unread)
    return [f"{field}.{name}" for name in sorted(names)]


def listed(names: Iterable[str]) -> list[str]:
    """Returns the names that a response header can hold, at most MAX_LISTED."""
    return [name for name in names if _HEADER_NAME.fullmatch(name)][:MAX_LISTED]
