"""Access over HTTP: one API key for everybody, and headers for restricted categories of requests."""

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import error_response, is_anthropic
from gateway.restrictions import ApiCategory, Restrictions, check_api_key
from sluice.errors import ErrorCode, SluiceError

_OPEN_PATHS = frozenset({"/health", "/ping", "/v2/health/live", "/v2/health/ready"})
"""Paths of probes, which need no API key."""

_BY_PATH = {
    "/": ApiCategory.METADATA,
    "/health": ApiCategory.HEALTH,
    "/ping": ApiCategory.HEALTH,
    "/version": ApiCategory.METADATA,
    **dict.fromkeys(
        ("/pooling", "/classify", "/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score"), ApiCategory.INFERENCE
    ),
    "/v1/chat/completions": ApiCategory.INFERENCE,
    "/v1/completions": ApiCategory.INFERENCE,
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), ApiCategory.MODEL_REPOSITORY),
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


class ApiKeyMiddleware:
    """Answers 401, in the protocol's own shape, to requests without the header `Authorization: Bearer KEY`.

    Anthropic's clients send `x-api-key: KEY` instead.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            sent = _find_header(scope, b"authorization")
            if sent is None and is_anthropic(scope["path"]):
                key = _find_header(scope, b"x-api-key")
                sent = None if key is None else b"Bearer " + key
            refusal = check_api_key(sent, self._key, "Authorization", "header")
            if refusal is not None:
                await error_response(scope["path"], refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class RestrictedApiMiddleware:
    """Answers 403, in the protocol's own shape and Triton's words, to restricted requests without their header."""

    def __init__(self, app: ASGIApp, restrictions: Restrictions) -> None:
        self._app = app
        self._restrictions = restrictions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        restriction = self._restrictions.find(find_api_category(scope["path"]))
        if restriction is None or restriction.admits(_find_header(scope, restriction.key.encode("latin-1", "replace"))):
            await self._app(scope, receive, send)
            return
        message = f"This API is restricted, expecting header '{restriction.key}'"
        refusal = SluiceError(ErrorCode.FORBIDDEN, message)
        await error_response(scope["path"], refusal)(scope, receive, send)


def find_api_category(path: str) -> ApiCategory | None:
    """Return the category of requests to `path`; None for what is not of the protocols."""
    if path in _BY_PATH:
        return _BY_PATH[path]
    match path.removesuffix("/").split("/")[1:]:
        case ["v1", "rag", "collections", *_] | ["v1", "rag", _, "documents", *_]:
            return ApiCategory.MODEL_REPOSITORY
        case ["v1", "models", *_] | ["v2"]:
            return ApiCategory.METADATA
        case ["api", "tags" | "show" | "ps" | "version"]:
            return ApiCategory.METADATA
        case ["v1", *_] | ["api", "chat" | "generate" | "embed" | "embeddings"]:
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


def _find_header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
