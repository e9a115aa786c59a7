"""`/console`: the pages of the console, which the browser fills with what the API tells it.

The files are the same for everybody and say nothing of the server, so they need no key; what the pages ask for does.
They are built of the sources in `console/` by `make console`.
"""

import gzip
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request, Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.http.openapi import PAGE_HEADERS

_INDEX = "index.html"
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data: blob:; media-src 'self' data: blob:; "
    "script-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of pages that load nothing from other servers and run nothing that is not in a file."""
_HEADERS = {
    **PAGE_HEADERS,
    "content-security-policy": _POLICY,
    "cache-control": "no-cache",
    "vary": "accept-encoding",
    "cross-origin-opener-policy": "same-origin",
}
"""Headers of all files. Browsers keep them, and ask by ETag whether they are still current."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the console, as it is sent."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


def router() -> APIRouter:
    """Return the routes."""
    api = APIRouter(default_response_class=Response, include_in_schema=False)

    @api.get("/console")
    @api.head("/console")
    async def enter() -> Response:
        """Send browsers to the folder: the addresses in the pages are relative, so that a proxy's prefix stays."""
        return Response(status_code=308, headers={"location": "console/", "cache-control": "no-cache"})

    @api.get("/console/{name:path}")
    @api.head("/console/{name:path}")
    async def show(request: Request, name: str) -> Response:
        """Return a file of the console."""
        found = load_files().get(name or _INDEX)
        if found is None:
            raise SluiceError(ErrorCode.NOT_FOUND, f"the console has no file {name[:80]!r}; its page is /console/")
        return _answer(found, request)

    return api


def _answer(found: StaticFile, request: Request) -> Response:
    headers = {**_HEADERS, "etag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(found.content, headers=headers, media_type=found.media_type)
    headers["content-encoding"] = "gzip"
    return Response(found.compressed, headers=headers, media_type=found.media_type)


@cache
def load_files() -> dict[str, StaticFile]:
    """Return the files by their names. They are read once, and nothing else can be asked for."""
    folder = files("sluice.gateway.watch.console") / "static"
    return {each.name: _load(each.name, each.read_bytes()) for each in folder.iterdir() if each.is_file()}


def _load(name: str, content: bytes) -> StaticFile:
    etag = f'W/"{sha256(content).hexdigest()[:32]}"'
    return StaticFile(content, gzip.compress(content, 9, mtime=0), _MEDIA_TYPES[PurePath(name).suffix], etag)
