"""/ is a page to try the service, /docs one that describes its API: plain files, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from mempipe.answers.errors import ApiError

router = APIRouter(include_in_schema=False)
FOLDER = Path(__file__).parents[1] / "page"
FILES = {"page.css": "text/css", "page.js": "text/javascript", "api.js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@router.get("/")
async def page() -> FileResponse:
    return FileResponse(FOLDER / "index.html", headers=_HEADERS)


@router.get("/docs")
async def api_page() -> FileResponse:
    return FileResponse(FOLDER / "api.html", headers=_HEADERS)


@router.get("/page/{name}")
async def page_file(name: str) -> FileResponse:
    if name not in FILES:
        raise ApiError(404, f"there is no {name[:80]!r} here")
    return FileResponse(FOLDER / name, media_type=FILES[name], headers=_HEADERS)
