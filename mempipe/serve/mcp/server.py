"""The agent as tools for other agents: a server of the Model Context Protocol (MCP)."""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mempipe import __version__
from mempipe.answers.api import AnswerReply, AnswerRequest, PassageReply
from mempipe.answers.errors import ApiError, sentence
from mempipe.answers.replies import passage_reply
from mempipe.serve.http.errors import FAILED
from mempipe.serve.requests.event_stream import events
from mempipe.serve.requests.idempotency import failed
from mempipe.serve.routes.parts import Parts
from mempipe.text import replace_surrogates

NEW_SESSION = "new"
MAX_PASSAGES = 50
MAX_PIECE_CHARS = 100_000
_INSTRUCTIONS = (
    "ask gives a question to an agent that searches a corpus, or reads a document, and keeps a short memory of what it "
    "found; a session keeps that memory from one question to the next. search gives passages of the same corpus. "
    "upload_document stores a long text, and read_document gives it back in pieces."
)
Partition = Annotated[
    str | None,
    Field(description="The part of the corpus; null: the one that the service searches by default; empty: all of it."),
]


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
    """The session that the question belongs to; give it with the next question of the conversation."""


class Passages(BaseModel):
    passages: list[PassageReply]


class UploadedDocument(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    document: str
    """The id of the document."""
    num_bytes: int
    """Bytes of the whole document as UTF-8."""


class DocumentPiece(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    text: str
    next_start: int | None
    """Start of the next piece; null: this is the last one."""
    num_chars: int
    """Characters of the whole document."""


class AgentServer(MCPServer):
    """The SDK's server. The error of a call is a sentence alone, and an unknown argument is an error too."""

    def add_tool(self, fn: Any, *arguments: Any, **more: Any) -> None:
        """Adds a tool that is described by the docstring, without its line breaks: clients show them."""
        super().add_tool(fn, *arguments, **more | {"description": " ".join((fn.__doc__ or "").split())})

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None) -> Any:
        known = {tool.name: tool.input_schema["properties"] for tool in await self.list_tools()}.get(name, arguments)
        if unknown := sorted(arguments.keys() - known.keys()):
            raise ToolError(f"{unknown[0]} is not an argument of {name}, which takes {', '.join(known)}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, ValidationError):
                first = cause.errors()[0]
                raise ToolError(sentence(first["loc"], first)) from cause
            if isinstance(cause, ApiError):
                failed(cause.status)
            if isinstance(cause, ApiError | ToolError):
                raise ToolError(str(cause)) from cause
            if isinstance(error, UnexpectedToolError):
                failed(500)
                raise UnexpectedToolError(FAILED) from cause
            raise


def make_server(parts: Parts) -> MCPServer:
    """Returns the server of a service's tools. A caller over HTTP has what belongs to its key."""
    server = AgentServer("mempipe", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING")
    _add_ask(server, parts)
    if parts.answering.searches:
        _add_search(server, parts)
    _add_documents(server, parts)
    return server


def _add_ask(server: MCPServer, parts: Parts) -> None:
    @server.tool()
    async def ask(
        question: Annotated[str, Field(description="One question in plain words.")],
        ctx: Context,
        session: Annotated[
            str | None,
            Field(
                description="The session of an earlier answer, whose memory the agent starts from; "
                f"{NEW_SESSION!r} begins a session; null: the question has nothing to do with earlier ones."
            ),
        ] = None,
        document: Annotated[
            str | None,
            Field(description="The id of an uploaded document that the agent reads; agents that search take none."),
        ] = None,
        partition: Partition = None,
    ) -> Answer:
        """Answers a question with an agent that searches or reads, and remembers. Each of its turns is reported as
        progress."""
        asked = AnswerRequest(question=question, session=session, document=document, partition=partition)
        if session != NEW_SESSION:
            return await _answered(parts, asked, ctx)
        begun = (await parts.store.sessions.create(_owner(ctx))).id
        try:
            return await _answered(parts, asked.model_copy(update={"session": begun}), ctx)
        except BaseException:  # the caller does not learn of the session
            await asyncio.shield(parts.store.sessions.delete(begun, _owner(ctx)))
            raise


def _add_search(server: MCPServer, parts: Parts) -> None:
    @server.tool()
    async def search(
        query: str,
        num_passages: Annotated[int, Field(ge=1, le=MAX_PASSAGES)] = 5,
        partition: Partition = None,
    ) -> Passages:
        """Returns the passages of the corpus that fit a query best."""
        if not query.strip():
            raise ToolError("query is empty; it should be a text")
        result = await parts.answering.search(query, num_passages=num_passages, partition=partition)
        return Passages(passages=[passage_reply(passage) for passage in result.passages])


def _add_documents(server: MCPServer, parts: Parts) -> None:
    @server.tool()
    async def upload_document(
        text: Annotated[str, Field(min_length=1)],
        ctx: Context,
        document: Annotated[
            str | None, Field(description="An uploaded document that the text is added to; null: the text begins one.")
        ] = None,
    ) -> UploadedDocument:
        """Stores a text as a document. A long one is sent in several calls: the first returns the document's id, and
        the others add to it."""
        owner, begun = _owner(ctx), None
        if document is None:
            document = begun = (await parts.store.documents.create(owner)).id
        try:
            stored = await parts.store.documents.append(document, owner, replace_surrogates(text).encode(), start=None)
        except BaseException:
            if begun is not None:
                await asyncio.shield(parts.store.documents.delete(begun, owner))
            raise
        return UploadedDocument(document=stored.id, num_bytes=stored.num_bytes)

    @server.tool()
    async def read_document(
        document: Annotated[str, Field(description="The id of an uploaded document.")],
        ctx: Context,
        start: Annotated[int, Field(ge=0, description="The character that the piece begins at.")] = 0,
        num_chars: Annotated[int, Field(ge=1, le=MAX_PIECE_CHARS)] = 10_000,
    ) -> DocumentPiece:
        """Returns a piece of an uploaded document."""
        text = await parts.store.documents.text(document, _owner(ctx))
        end = start + num_chars
        return DocumentPiece(text=text[start:end], next_start=end if end < len(text) else None, num_chars=len(text))


async def _answered(parts: Parts, asked: AnswerRequest, ctx: Context[Any, Any]) -> Answer:
    """Plays a question and reports its turns. Raises ApiError, and ToolError for a fault meanwhile."""
    job = await parts.jobs.plan(asked, owner=_owner(ctx), request_id=uuid.uuid4().hex)
    async for event in events(lambda emit: parts.jobs.run(job, emit)):
        name, data = event or ("ping", {})
        if name == "turn":
            await ctx.report_progress(data["index"] + 1, message=data["thought"] or None)
        elif name == "error":
            raise ToolError(data["error"]["message"])
        elif name == "answer":
            return _answer(AnswerReply.model_validate(data))
    raise ToolError("there was no answer")


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
