"""Access over HTTP: who sends a request and what he may, which web pages may, and headers for restricted categories."""

import re
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import CallLog
from sluice.gateway.front.http.errors import error_response, is_anthropic
from sluice.gateway.front.http.sse import PIECE_WRITER
from sluice.gateway.front.http.writing import PieceWriter
from sluice.gateway.front.restrictions import ApiCategory, Restrictions
from sluice.gateway.tenancy.access.control import TENANT_HEADER, Credentials
from sluice.gateway.tenancy.access.identity import RouteGroup
from sluice.gateway.tenancy.access.rights import CATEGORY_GROUPS

_METRICS = "/metrics"
"""Its requests come every few seconds, and are nobody's use."""
_TENANT = TENANT_HEADER.encode()
_MAX_CACHED_PATHS = 4096
_MAX_CACHED_CHARS = 256
"""Longer paths are looked up anew, so that what strangers send fills no memory."""
_SHOWN_CHARS = 60
_OPEN_PATHS = frozenset({"/health", "/ping", "/v2/health/live", "/v2/health/ready"})
"""Paths of probes, which need no API key."""
CONSOLE = "/console"
"""The console's files need none either: they are the same for everybody, and what they show is asked for with a key."""


class RoutePlace(NamedTuple):
    """Where requests belong: their part of the protocols, as Triton restricts it, and the group that keys name."""

    category: ApiCategory | None
    group: RouteGroup | None


_EMBEDDINGS = RoutePlace(ApiCategory.INFERENCE, RouteGroup.EMBEDDINGS)
_RAG = RoutePlace(ApiCategory.INFERENCE, RouteGroup.RAG)
_COLLECTIONS = RoutePlace(ApiCategory.MODEL_REPOSITORY, RouteGroup.RAG)
_ADMIN = RoutePlace(None, RouteGroup.ADMIN)
_BY_PATH: dict[str, ApiCategory | RoutePlace] = {
    "/": ApiCategory.METADATA,
    "/health": ApiCategory.HEALTH,
    "/ping": ApiCategory.HEALTH,
    "/version": ApiCategory.METADATA,
    _METRICS: RoutePlace(None, RouteGroup.METRICS),
    **dict.fromkeys(("/v1/usage", "/v1/usage/requests"), RoutePlace(None, None)),
    **dict.fromkeys(("/tokenize", "/detokenize"), ApiCategory.INFERENCE),
    **dict.fromkeys(("/pooling", "/classify", "/rerank", "/v2/rerank", "/score"), _EMBEDDINGS),
    **dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/v1/score", "/api/embed", "/api/embeddings"), _EMBEDDINGS),
    "/v1/chat/completions": ApiCategory.INFERENCE,
    "/v1/completions": ApiCategory.INFERENCE,
    **dict.fromkeys(
        (
            *("/inference/v1/generate", "/generative_scoring", "/v1/systemone"),
            *("/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/v1/responses/render"),
            *("/v1/chat/completions/derender", "/v1/completions/derender"),
        ),
        ApiCategory.INFERENCE,
    ),
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/is_sleeping"),
        ApiCategory.MODEL_REPOSITORY,
    ),
}
_BY_SECTION = {
    "health": ApiCategory.HEALTH,
    "repository": ApiCategory.MODEL_REPOSITORY,
    "systemsharedmemory": ApiCategory.SHARED_MEMORY,
    "cudasharedmemory": ApiCategory.SHARED_MEMORY,
    "trace": ApiCategory.TRACE,
    "logging": ApiCategory.LOGGING,
}
"""Categories by the word after /v2/."""
_BY_MODEL_ACTION = {
    "ready": ApiCategory.HEALTH,
    "infer": ApiCategory.INFERENCE,
    "generate": ApiCategory.INFERENCE,
    "generate_stream": ApiCategory.INFERENCE,
    "config": ApiCategory.MODEL_CONFIG,
    "stats": ApiCategory.STATISTICS,
    "setting": ApiCategory.TRACE,
}
"""Categories by the last word of a path under /v2/models/NAME."""


def read_credentials(path: str, headers: Iterable[tuple[bytes, bytes]], peer: str) -> Credentials:
    """Return what the headers of a request to `path` say of its sender. `peer` is the client's address."""
    authorization: bytes | None = None
    own_key: bytes | None = None
    forwarded_for = tenant = ""
    for name, value in headers:
        if name == b"authorization":
            authorization = authorization or value
        elif name == _TENANT:
            tenant = value.decode("latin-1")
        elif name == b"x-forwarded-for":
            forwarded_for += "," + value.decode("latin-1")
        elif name == b"x-api-key":
            own_key = value
    if authorization is None and own_key is not None and is_anthropic(path):
        authorization = b"Bearer " + own_key
    return Credentials(authorization, peer, forwarded_for, tenant)


def count_writer(count: Callable[[bytes], None], extensions: dict[str, Any]) -> None:
    """Have the writer of pieces among the extensions of a scope count what it writes."""
    writer: PieceWriter | None = extensions.get(PIECE_WRITER)
    if writer is not None:
        writer.count = count


class PageGuard:
    """Refuses what strangers' web pages ask of a server that asks nobody for a key: its users' browsers reach it.

    A page has its own origin, or comes under a name that DNS led here (rebinding). Names are checked for requests of
    this machine, and where some are listed for all: other machines know a server by names that it does not know.
    """

    def __init__(
        self, calls: CallLog, origins: Collection[str] = (), hosts: Collection[str] = (), host: str = ""
    ) -> None:
        """`origins` are those of pages that may, `hosts` globs of this server's names, `host` is where it listens."""
        self._calls = calls
        self._takes_all = "*" in origins
        self._origins = frozenset(each.encode() for each in origins)
        self._checks_all = bool(hosts)
        self._hosts = (*(each.lower() for each in hosts), *_KNOWN_HOSTS, socket.gethostname().lower(), host.lower())

    def find_refusal(self, method: str, headers: Mapping[bytes, bytes], peer: str) -> SluiceError | None:
        """Return why a request is refused; None where it is not."""
        if self._calls.asks_for_keys:
            return None
        host, origin, site = headers.get(b"host", b""), headers.get(b"origin"), headers.get(b"sec-fetch-site", b"none")
        if (self._checks_all or peer.startswith(_LOOPBACK)) and not self._is_own(host):
            return _refuse_page(f"Host must be a name of this server, got {_show(host)}", "--allowed-hosts")
        if self._takes_all:
            return None
        if origin is not None:
            if origin in self._origins or origin.partition(b"://")[2] == host.lower():
                return None
            return _refuse_page(f"Origin must be this server's own, got {_show(origin)}", "--cors-allow-origins")
        if site in (b"none", b"same-origin") or (method in ("GET", "HEAD") and _is_link(headers)):
            return None
        return _refuse_page(f"Sec-Fetch-Site must be same-origin or none, got {_show(site)}", "--cors-allow-origins")

    def _is_own(self, host: bytes) -> bool:
        is_short = len(host) <= _MAX_CACHED_CHARS
        return (_is_among if is_short else _is_among.__wrapped__)(host, self._hosts)


_LOOPBACK = ("127.", "::1", "::ffff:127.")
_KNOWN_HOSTS = ("localhost", "*.localhost", "*.internal", "*.svc", "*.svc.cluster.local")
"""Names that no public DNS has: the machine's own, those of private networks (host.docker.internal), of Kubernetes."""
_ADDRESS = re.compile(r"\[.*\]|[0-9.]*")


@lru_cache(_MAX_CACHED_PATHS)
def _is_among(host: bytes, globs: tuple[str, ...]) -> bool:
    """Whether a Host is an address, a name of this server, or one without a dot, which is of this network alone."""
    name = re.sub(r":[0-9]*$", "", host.decode("latin-1")).removesuffix(".").lower()
    return "." not in name or bool(_ADDRESS.fullmatch(name)) or any(fnmatchcase(name, each) for each in globs)


def _is_link(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a user followed a link to here: the page that has it does not see the answer."""
    return headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"


def _show(value: bytes) -> str:
    return repr(value[:_SHOWN_CHARS].decode("latin-1"))


def _refuse_page(problem: str, option: str) -> SluiceError:
    message = f"this server asks nobody for a key, so it refuses other web pages: {problem}; {option} names more"
    return SluiceError(ErrorCode.FORBIDDEN, message)


class PageMiddleware:
    """Answers 403, in the protocol's own shape, to what a guard of pages refuses."""

    def __init__(self, app: ASGIApp, pages: PageGuard) -> None:
        self._app = app
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        refusal = self._pages.find_refusal(scope["method"], dict(scope["headers"]), client[0] if client else "")
        app = self._app if refusal is None else error_response(scope["path"], refusal)
        await app(scope, receive, send)


def find_restriction(
    restrictions: Restrictions, path: str, headers: Iterable[tuple[bytes, bytes]]
) -> SluiceError | None:
    """Return why a request is refused that lacks the header of a restriction; None where it is not."""
    restriction = restrictions.find(find_api_category(path))
    if restriction is None:
        return None
    name = restriction.key.encode("latin-1", "replace")
    if restriction.admits(next((value for key, value in headers if key == name), None)):
        return None
    return SluiceError(ErrorCode.FORBIDDEN, f"This API is restricted, expecting header '{restriction.key}'")


def is_open(path: str) -> bool:
    """Whether requests to `path` need no API key, and are nobody's use."""
    return path in _OPEN_PATHS or path == CONSOLE or path.startswith(f"{CONSOLE}/")


def find_api_category(path: str) -> ApiCategory | None:
    """Return the category of requests to `path`; None for what is not of the protocols."""
    return find_place(path).category


def find_place(path: str) -> RoutePlace:
    """Return where requests to `path` belong. What has no group is open to every key."""
    return _find_place(path) if len(path) <= _MAX_CACHED_CHARS else _find_place.__wrapped__(path)


@lru_cache(_MAX_CACHED_PATHS)
def _find_place(path: str) -> RoutePlace:
    found = _BY_PATH[path] if path in _BY_PATH else _find_by_pattern(path)
    if isinstance(found, RoutePlace):
        return found
    return RoutePlace(found, None if found is None else CATEGORY_GROUPS[found])


def _find_by_pattern(path: str) -> ApiCategory | RoutePlace | None:
    match path.removesuffix("/").split("/")[1:]:
        case ["v1", "rag", "collections", *_] | ["v1", "rag", _, "documents", *_]:
            return _COLLECTIONS
        case ["v1", "rag", *_]:
            return _RAG
        case ["v1", "admin", *_]:
            return _ADMIN
        case ["v1", "requests"] | ["v1", "requests", _, "timeline"]:
            return RoutePlace(None, None)
        case ["v1", "models", *_] | ["v2"]:
            return ApiCategory.METADATA
        case ["api", "tags" | "show" | "ps" | "version"]:
            return ApiCategory.METADATA
        case ["v1", *_] | ["api", "chat" | "generate"]:
            return ApiCategory.INFERENCE
        case ["api", *_]:
            return ApiCategory.MODEL_REPOSITORY
        case ["v2", "models", _] | ["v2", "models", _, "versions", _]:
            return ApiCategory.STATISTICS if path == "/v2/models/stats" else ApiCategory.METADATA
        case ["v2", "models", *_, last]:
            return _BY_MODEL_ACTION.get(last)
        case ["v2", first, *_]:
            return _BY_SECTION.get(first)
    return None
