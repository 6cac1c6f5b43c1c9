"""The agent as tools for other agents: a server of the Model Context Protocol (MCP)."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mempipe.answers.api import AnswerReply, AnswerRequest, PassageReply
from mempipe.answers.errors import ApiError, sentence
from mempipe.answers.replies import passage_reply
from mempipe.serve.requests.event_stream import events
from mempipe.serve.routes.parts import Parts

MAX_PASSAGES = 50
MAX_PIECE_CHARS = 100_000
_INSTRUCTIONS = (
    "ask gives a question to an agent that searches a corpus and keeps a short memory of what it found; search gives "
    "passages of the same corpus; read_document gives the text of a document that was uploaded to the service."
)


class Answer(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    answer: str | None
    """null: the agent ended without one; end_reason says how."""
    end_reason: str
    memory: str
    """The agent's memory at the end."""
    num_turns: int
    model_version: str
    session: str | None


class Passages(BaseModel):
    passages: list[PassageReply]


class DocumentPiece(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    text: str
    next_start: int | None
    """Start of the next piece; null: this is the last one."""
    num_chars: int
    """Characters of the whole document."""


def make_server(parts: Parts) -> MCPServer:
    """Returns the server of a service's tools. A caller over HTTP has what belongs to its key."""
    server = MCPServer("mempipe", instructions=_INSTRUCTIONS, log_level="WARNING")

    @server.tool()
    async def ask(
        question: Annotated[str, Field(description="One question in plain words.")],
        ctx: Context,
        session: Annotated[str | None, Field(description="A session, whose memory the agent starts from.")] = None,
    ) -> Answer:
        """Answers a question with an agent that searches and remembers. Each of its turns is reported as progress."""
        try:
            asked = AnswerRequest(question=question, session=session)
            job = await parts.jobs.plan(asked, owner=_owner(ctx), request_id=uuid.uuid4().hex)
        except ValidationError as error:
            first = error.errors()[0]
            raise ToolError(sentence(first["loc"], first)) from error
        except ApiError as error:
            raise ToolError(str(error)) from error
        async for event in events(lambda emit: parts.jobs.run(job, emit)):
            name, data = event or ("ping", {})
            if name == "turn":
                await ctx.report_progress(data["index"] + 1, message=data["thought"] or None)
            elif name == "error":
                raise ToolError(data["error"]["message"])
            elif name == "answer":
                return _answer(AnswerReply.model_validate(data))
        raise ToolError("there was no answer")

    if parts.answering.searches:

        @server.tool()
        async def search(
            query: str,
            num_passages: Annotated[int, Field(ge=1, le=MAX_PASSAGES)] = 5,
            partition: Annotated[str, Field(description="The part of the corpus; empty: all of it.")] = "",
        ) -> Passages:
            """Returns the passages of the corpus that fit a query best."""
            if not query.strip():
                raise ToolError("query is empty; it should be a text")
            try:
                result = await parts.answering.search(query, num_passages=num_passages, partition=partition)
            except ApiError as error:
                raise ToolError(str(error)) from error
            return Passages(passages=[passage_reply(passage) for passage in result.passages])

    @server.tool()
    async def read_document(
        document: Annotated[str, Field(description="The id of an uploaded document.")],
        ctx: Context,
        start: Annotated[int, Field(ge=0, description="The character that the piece begins at.")] = 0,
        num_chars: Annotated[int, Field(ge=1, le=MAX_PIECE_CHARS)] = 10_000,
    ) -> DocumentPiece:
        """Returns a piece of a document that was uploaded to the service."""
        try:
            text = await parts.store.text(document, _owner(ctx))
        except ApiError as error:
            raise ToolError(str(error)) from error
        end = start + num_chars
        return DocumentPiece(text=text[start:end], next_start=end if end < len(text) else None, num_chars=len(text))

    return server


def _owner(ctx: Context[Any, Any]) -> str:
    """Returns the name of the caller's key, which Access noted (`mempipe.serve.http.keys`)."""
    request = ctx.request_context.request
    assert request is not None, "the tools are called over HTTP"
    return request.scope["state"]["owner"]


def _answer(reply: AnswerReply) -> Answer:
    return Answer(
        answer=reply.answer.strip() if reply.answer is not None else None,
        end_reason=reply.end_reason,
        memory=reply.memory,
        num_turns=len(reply.turns),
        model_version=reply.model_version,
        session=reply.session,
    )
