"""Lists in the form of the OpenAI API: a page of them, and where the next page begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from mempipe.answers.api import Id
from mempipe.answers.errors import ApiError

MAX_LISTED = 100


T = TypeVar("T")
"""An entry of a list, with an `id`."""
Limit = Annotated[int, Field(ge=1, le=MAX_LISTED)]
Order = Literal["asc", "desc"]


class PageRequest(BaseModel):
    """The part of a list that a client asks for."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    limit: Limit = 20
    after: Id | None = None
    """The id of the last entry of the page before; null: the list begins."""
    order: Order = "desc"
    """`desc`: the newest entry is first."""


class OldestFirst(PageRequest):
    """The part of a list of what a client has stored."""

    limit: Limit = MAX_LISTED
    order: Order = "asc"
    """`asc`: the oldest entry is first."""


class Page(BaseModel, Generic[T]):
    """A part of a list. `last_id` is what the next page begins after, if `has_more` says that there is one."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(entries: Sequence[T], *, limit: int) -> Page[T]:
    """Returns the first `limit` entries; further ones say that there is another page."""
    shown = list(entries[:limit])
    first, last = (_id(shown[0]), _id(shown[-1])) if shown else (None, None)
    return Page(data=shown, first_id=first, last_id=last, has_more=len(entries) > limit)


def asked_page(entries: Sequence[T], asked: PageRequest) -> Page[T]:
    """Returns the page of a whole list, oldest first, whose entries have separate ids. Raises ApiError 400 for an
    `after` that is not in it.
    """
    ordered = list(entries) if asked.order == "asc" else list(reversed(entries))
    if asked.after is not None:
        ids = [_id(each) for each in ordered]
        if asked.after not in ids:
            raise ApiError(400, f"after is {asked.after!r}, which is not in this list", param="after")
        ordered = ordered[ids.index(asked.after) + 1 :]
    return page_of(ordered, limit=asked.limit)


def _id(entry: Any) -> str:
    return entry.id
