"""/v1/documents takes long texts in pieces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from mempipe.answers.api import DeletedReply, DocumentReply
from mempipe.answers.errors import ApiError
from mempipe.openai_api.listing import OldestFirst, Page, page_of
from mempipe.serve.routes.documented import ALWAYS, BEARER, OF_A_BODY, refusals
from mempipe.serve.routes.parts import Owner, PartsOfApp, no_body

router = APIRouter(prefix="/v1/documents", tags=["documents"], dependencies=BEARER, responses=ALWAYS)
Start = Annotated[int | None, Query(ge=0, le=2**40, description="The byte that the piece begins at.")]
_BYTES: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {}}}}}
_SEND_PIECES = "a document is empty at first; send its text to /v1/documents/ID/pieces"


@router.post("", responses=OF_A_BODY, dependencies=[Depends(no_body(_SEND_PIECES))])
async def create_document(parts: PartsOfApp, owner: Owner) -> DocumentReply:
    """Begins a document, empty at first."""
    return DocumentReply(**asdict(await parts.store.documents.create(owner)))


@router.post("/{document}/pieces", responses=refusals(404, 409) | OF_A_BODY, openapi_extra=_BYTES)
async def append(
    document: str, request: Request, parts: PartsOfApp, owner: Owner, start: Start = None
) -> DocumentReply:
    """Adds a piece of UTF-8 text, cut anywhere. With `start` a piece that is sent again is not added again."""
    if (kind := request.headers.get("content-type", "").partition(";")[0].strip().lower()).startswith("multipart/"):
        raise ApiError(400, f"content-type is {kind[:40]!r}, which wraps the text; send the text alone as the body")
    return DocumentReply(
        **asdict(await parts.store.documents.append(document, owner, await request.body(), start=start))
    )


@router.get("")
async def documents(parts: PartsOfApp, owner: Owner, asked: Annotated[OldestFirst, Query()]) -> Page[DocumentReply]:
    """Lists the caller's documents, a hundred at once unless told otherwise."""
    found = await parts.store.documents.of_owner(
        owner, limit=asked.limit + 1, after=asked.after, newest_first=asked.order == "desc"
    )
    return page_of([DocumentReply(**asdict(each)) for each in found], limit=asked.limit)


@router.get("/{document}", responses=refusals(404))
async def document(document: str, parts: PartsOfApp, owner: Owner) -> DocumentReply:
    """Says how much of a document is there."""
    return DocumentReply(**asdict(await parts.store.documents.get(document, owner)))


@router.delete("/{document}", responses=refusals(404))
async def delete_document(document: str, parts: PartsOfApp, owner: Owner) -> DeletedReply:
    """Deletes a document."""
    await parts.store.documents.delete(document, owner)
    return DeletedReply(id=document)
