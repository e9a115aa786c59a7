"""Turns away requests to restricted parts of the HTTP API that lack their header."""

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.restricted import Api, Restriction, Restrictions
from gateway.http.errors import error_response
from sluice.errors import ErrorCode, SluiceError

_OPENAI = {
    "/v1/chat/completions": Api.INFERENCE,
    "/v1/completions": Api.INFERENCE,
    "/health": Api.HEALTH,
}
_FIRST = {
    "health": Api.HEALTH,
    "repository": Api.MODEL_REPOSITORY,
    "systemsharedmemory": Api.SHARED_MEMORY,
    "cudasharedmemory": Api.SHARED_MEMORY,
    "trace": Api.TRACE,
    "logging": Api.LOGGING,
}
_OF_MODEL = {
    "ready": Api.HEALTH,
    "infer": Api.INFERENCE,
    "generate": Api.INFERENCE,
    "generate_stream": Api.INFERENCE,
    "config": Api.MODEL_CONFIG,
    "stats": Api.STATISTICS,
    "setting": Api.TRACE,
}


def api_of(path: str) -> Api | None:
    """The part of the API that a path belongs to; None for what is not of the protocols."""
    if path in _OPENAI:
        return _OPENAI[path]
    match path.removesuffix("/").split("/")[1:]:
        case ["v1", "rag", "collections", *_] | ["v1", "rag", _, "documents", *_]:
            return Api.MODEL_REPOSITORY
        case ["v1", "models", *_] | ["v2"]:
            return Api.METADATA
        case ["v1", *_]:
            return Api.INFERENCE
        case ["v2", "models", _] | ["v2", "models", _, "versions", _]:
            return Api.STATISTICS if path == "/v2/models/stats" else Api.METADATA
        case ["v2", "models", *_, last]:
            return _OF_MODEL.get(last)
        case ["v2", first, *_]:
            return _FIRST.get(first)
    return None


class RestrictedApiMiddleware:
    """Answers 403, in the protocol's own shape and Triton's words."""

    def __init__(self, app: ASGIApp, restrictions: Restrictions) -> None:
        self._app = app
        self._restrictions = restrictions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        restriction = self._restrictions.of(api_of(scope["path"]))
        if restriction is None or restriction.admits(_header(scope, restriction)):
            await self._app(scope, receive, send)
            return
        message = f"This API is restricted, expecting header '{restriction.key}'"
        refusal = SluiceError(ErrorCode.FORBIDDEN, message)
        await error_response(scope["path"], refusal)(scope, receive, send)


def _header(scope: Scope, restriction: Restriction) -> str | None:
    name = restriction.key.encode("latin-1", "replace")
    return next((value.decode("utf-8", "replace") for key, value in scope["headers"] if key == name), None)
