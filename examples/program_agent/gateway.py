"""The gateway: an OpenAI API for the requests of one program at one question. It keeps their tokens as contexts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APIStatusError, AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mempipe.agents.turn import Memory, Message, Turn, without_stop
from mempipe.types import EndReason, Search
from program_agent.rendering import ProgramRenderer

MESSAGE_BREAK = "\n---\n"
"""Between the messages of a context in transcripts."""
READ = {"model", "messages", "max_tokens", "max_completion_tokens"}
IGNORED = {"temperature", "top_p", "seed", "user", "store", "metadata"}
"""The run decides how the policy is sampled: training needs samples of its own distribution."""
HARMLESS = {"n": 1, "stream": False, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0}
"""Values that ask for nothing, as frameworks send them."""
Sample = Callable[..., Awaitable[Message]]
"""(turn, *, max_tokens) -> the message, which is then part of the turn."""
RunSearches = Callable[[Turn, Sequence[tuple[str, int]]], Awaitable[list[Search]]]


AT_LIMIT = "attempt_over"
"""The code of an error that ends the attempt, not the run."""


class Refused(ValueError):
    """A request that the gateway does not take; the program reads the message."""


class AttemptOver(Exception):
    """A request after which the policy writes nothing more: `reason` is how the attempt ends, unless the program has an
    answer.
    """

    def __init__(self, reason: EndReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Open:
    """A context that a request can continue: its system text and the texts of its messages, replies included."""

    turn: Turn
    system: str
    texts: list[str]


@dataclass(slots=True)
class Gateway:
    """The contexts of one trajectory, in the order of their first messages.

    A request that adds one message of the user to an earlier request and its reply is appended to that context. Every
    other request opens a context.
    """

    renderer: ProgramRenderer
    question_ids: list[int]
    sample: Sample
    run_searches: RunSearches
    turns: list[Turn] = field(default_factory=list)
    """Those in which the policy has written something."""
    fault: Exception | None = None
    """The error of engine or search that the program has met, also if it has caught it."""
    over: EndReason | None = None
    """How the attempt ends, unless the program has an answer."""
    _open: list[Open] = field(default_factory=list)
    _replies: dict[str, list[int]] = field(default_factory=dict)
    _num_messages: int = 0
    _early_searches: list[Search] = field(default_factory=list)

    async def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a chat completion. Raises Refused and AttemptOver."""
        system, texts = _read(request)
        budget = self.renderer.budget
        if self._num_messages == budget.max_turns:
            raise AttemptOver(
                EndReason.MAX_TURNS,
                f"budget.max_turns is {budget.max_turns}, and the policy has written as many messages",
            )
        self._num_messages += 1
        turn, added = self._continued(system, texts) or self._opened(system, texts)
        num_prompt_tokens = len(turn.token_ids) + len(added)
        room = budget.context_tokens - num_prompt_tokens
        if room < 1:
            raise AttemptOver(
                EndReason.CONTEXT_LIMIT,
                f"the messages have {num_prompt_tokens} tokens, and budget.context_tokens is {budget.context_tokens}",
            )
        is_new = not turn.token_ids
        turn.inject(added)
        message = await self._met(self.sample(turn, max_tokens=min(_max_tokens(request, budget.action_tokens), room)))
        if is_new:
            self.turns.append(turn)
        turn.action += MESSAGE_BREAK * bool(turn.action) + message.text
        if message.breaks_roles:
            raise AttemptOver(EndReason.NO_ACTION, "the policy wrote a mark of its chat template")
        self._replies[message.text] = without_stop(turn.token_ids[num_prompt_tokens:], self.renderer)
        self._open.append(Open(turn, system, [*texts, message.text]))
        num_sampled = len(turn.token_ids) - num_prompt_tokens
        return {
            "id": f"chatcmpl-{self._num_messages}",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": message.text},
                    "finish_reason": "length" if message.cut_off else "stop",
                }
            ],
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_sampled,
                "total_tokens": num_prompt_tokens + num_sampled,
            },
        }

    async def search(self, query: str) -> list[str]:
        """Returns the texts of the passages, best first. The search belongs to the newest context."""
        turn = self.turns[-1] if self.turns else Turn(index=0, question_ids=[], memory=Memory())
        found = await self._met(self.run_searches(turn, [(query, self.renderer.search.num_passages)]))
        if not self.turns:
            self._early_searches += found
        return [passage.text for search in found for passage in search.passages]

    async def _met(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except Exception as error:
            self.fault = self.fault or error
            raise

    def _continued(self, system: str, texts: list[str]) -> tuple[Turn, list[int]] | None:
        """Returns the context that these messages continue by one, and what that one adds; None if there is none."""
        for context in self._open:
            if context.system == system and context.texts == texts[:-1]:
                self._open.remove(context)  # until it has its reply
                return context.turn, self.renderer.answer_to(texts[-1], last_id=context.turn.token_ids[-1])
        return None

    def _opened(self, system: str, texts: list[str]) -> tuple[Turn, list[int]]:
        """Returns a new context, and its prompt."""
        searches, self._early_searches = self._early_searches, []
        turn = Turn(index=0, question_ids=self.question_ids, memory=Memory(), searches=searches)
        return turn, self.renderer.prompt(system, texts, self._replies)


@asynccontextmanager
async def client_of(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    """Yields a client of the gateway. Nothing listens on a port: requests and replies stay in this process."""

    async def chat_completions(request: Request) -> JSONResponse:
        try:
            return JSONResponse(await gateway.complete(await request.json()))
        except Refused as refused:
            return _error(400, str(refused))
        except AttemptOver as over:
            gateway.over = over.reason
            return _error(400, str(over), code=AT_LIMIT)
        except Exception:
            if gateway.fault is None:
                raise
            return _error(503, "the policy cannot be asked now")

    async def elsewhere(request: Request) -> JSONResponse:
        return _error(404, f"the gateway has no {request.url.path}; it takes chat.completions.create")

    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/{path:path}", elsewhere, methods=["GET", "POST", "DELETE"]),
    ]
    app = Starlette(routes=routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), trust_env=False) as http:
        connection: Any = http  # the client takes httpx in all of its versions; the newest are annotated with httpx2
        yield AsyncOpenAI(api_key="none", base_url="http://policy/v1", http_client=connection, max_retries=0)


def is_of_limit(error: BaseException | None) -> bool:
    """Returns whether the error, or one that led to it, is the gateway's reply that the attempt is over."""
    while error is not None:
        if isinstance(error, APIStatusError) and error.code == AT_LIMIT:
            return True
        error = error.__cause__ or error.__context__
    return False


def _error(status: int, message: str, *, code: str | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return JSONResponse({"error": error}, status_code=status)


def _read(request: dict[str, Any]) -> tuple[str, list[str]]:
    """Returns the system text and the texts of the other messages, user and assistant in turn. Raises Refused."""
    asked = {name for name, value in request.items() if value is not None and HARMLESS.get(name) != value}
    if unknown := sorted(asked - READ - IGNORED):
        raise Refused(f"{', '.join(unknown)}: not taken; the gateway takes {', '.join(sorted(READ | IGNORED))}")
    messages = [(message.get("role"), _text(message.get("content"))) for message in request["messages"]]
    systems = [text for role, text in messages if role in ("system", "developer")]
    rest = [(role, text) for role, text in messages if role not in ("system", "developer")]
    roles = [role for role, _ in rest]
    if not roles or roles != [("user", "assistant")[place % 2] for place in range(len(roles))] or len(roles) % 2 == 0:
        raise Refused(f"the roles are {roles}; user and assistant must take turns, and user has the last word")
    return "\n\n".join(systems), [text for _, text in rest]


def _max_tokens(request: dict[str, Any], limit: int) -> int:
    """Returns how many tokens a reply may have: `limit`, or fewer if the request says so. Raises Refused."""
    for name in ("max_completion_tokens", "max_tokens"):
        if request.get(name) is not None:
            if type(request[name]) is not int or request[name] < 1:
                raise Refused(f"{name} is {request[name]!r}; expected a whole number above 0")
            return min(request[name], limit)
    return limit


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise Refused("the content of a message is neither a text nor parts of type text")
