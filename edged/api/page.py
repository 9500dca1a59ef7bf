"""The web page at `/`: fixed files, read once, with a policy that lets them load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

PAGE_FOLDER = Path(__file__).parent / "page"

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # ask each time, and get 304 while nothing has changed
}


def page_routes() -> APIRouter:
    """The routes of the page's files. Open to anybody who can connect: they hold no data."""
    router = APIRouter(include_in_schema=False)
    for file in sorted(PAGE_FOLDER.iterdir()):
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        router.add_api_route(path, _file_route(file.read_bytes(), _MEDIA_TYPES[file.suffix]), methods=["GET", "HEAD"])
    return router


def _file_route(content: bytes, media_type: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'

    async def file(request: Request) -> Response:
        headers = {**_HEADERS, "etag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return file
