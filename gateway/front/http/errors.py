"""From a failure to an HTTP answer: one table of statuses, and one shape of body for each protocol."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.path_masking import client_message
from sluice.gateway.telemetry.logs import NO_REQUEST, current_request_id

log = logging.getLogger(__name__)

HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID: 400,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.ALREADY_EXISTS: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.CANCELLED: 499,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNKNOWN: 500,
    ErrorCode.UNIMPLEMENTED: 501,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE: 504,
}
OPENAI_TYPE: dict[ErrorCode, str] = {
    ErrorCode.INVALID: "invalid_request_error",
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.FORBIDDEN: "permission_error",
    ErrorCode.NOT_FOUND: "invalid_request_error",
    ErrorCode.METHOD_NOT_ALLOWED: "invalid_request_error",
    ErrorCode.ALREADY_EXISTS: "invalid_request_error",
    ErrorCode.TOO_LARGE: "invalid_request_error",
    ErrorCode.OVERLOADED: "rate_limit_error",
    ErrorCode.CANCELLED: "server_error",
    ErrorCode.INTERNAL: "server_error",
    ErrorCode.UNKNOWN: "server_error",
    ErrorCode.UNIMPLEMENTED: "invalid_request_error",
    ErrorCode.UNAVAILABLE: "service_unavailable_error",
    ErrorCode.DEADLINE: "timeout_error",
}
OPENAI_CODE: dict[ErrorCode, str | None] = {
    ErrorCode.INVALID: "invalid_value",
    ErrorCode.UNAUTHENTICATED: "invalid_api_key",
    ErrorCode.FORBIDDEN: "insufficient_permissions",
    ErrorCode.NOT_FOUND: "not_found",
    ErrorCode.METHOD_NOT_ALLOWED: "method_not_supported",
    ErrorCode.ALREADY_EXISTS: "already_exists",
    ErrorCode.TOO_LARGE: "request_too_large",
    ErrorCode.OVERLOADED: "rate_limit_exceeded",
    ErrorCode.CANCELLED: "request_cancelled",
    ErrorCode.INTERNAL: "server_error",
    ErrorCode.UNKNOWN: "server_error",
    ErrorCode.UNIMPLEMENTED: "unsupported_value",
    ErrorCode.UNAVAILABLE: "service_unavailable",
    ErrorCode.DEADLINE: "request_timeout",
}
"""OpenAI's codes, where it has one for the failure. An error may have a more exact one (`SluiceError.openai_code`)."""
INSUFFICIENT_QUOTA = "insufficient_quota"
"""The one of OpenAI's codes that is a type too."""
ANTHROPIC_TYPE: dict[ErrorCode, str] = {
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.FORBIDDEN: "permission_error",
    ErrorCode.NOT_FOUND: "not_found_error",
    ErrorCode.TOO_LARGE: "request_too_large",
    ErrorCode.OVERLOADED: "rate_limit_error",
    ErrorCode.CANCELLED: "api_error",
    ErrorCode.INTERNAL: "api_error",
    ErrorCode.UNKNOWN: "api_error",
    ErrorCode.UNAVAILABLE: "overloaded_error",
    ErrorCode.DEADLINE: "timeout_error",
}
"""Anthropic's types of errors; every other one is an invalid_request_error."""
_CODE_OF_STATUS = {status: code for code, status in HTTP_STATUS.items()}
_SHOWN_CHARS = 60
"""Most characters of a client's value that a message quotes."""
_CONTEXT_CODE = "context_length_exceeded"
"""OpenAI's code of a request that is too long for the model."""
TIMEOUT_HEADER = "x-sluice-timeout-ms"
QUEUE_TIMEOUT_HEADER = "x-sluice-queue-timeout-ms"
_HEADERS_OF_PARAMS = {"timeout_s": TIMEOUT_HEADER, "queue_timeout_s": QUEUE_TIMEOUT_HEADER}
"""The engine's names for deadlines, which clients set by headers."""
COHERE_RERANK = "/v2/rerank"
"""The one path under /v2 that is not Triton's."""
_ENCODINGS = "gzip, deflate"
"""Content-Encodings of requests that are read."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's number for a client that disconnected. Only our own log and metrics ever see it."""


class UnknownEncodingError(SluiceError):
    """The request's Content-Encoding is unknown. The answer says which are known."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.UNIMPLEMENTED, message, param="content-encoding")


def body_too_large(what: str, limit_bytes: int, reason: str = " (--http-max-input-size)") -> SluiceError:
    text = f"request body {what}; at most {limit_bytes} bytes are allowed{reason}"
    return SluiceError(ErrorCode.TOO_LARGE, text)


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Make the errors of a context name their fields as the client does: `names` maps the models' names to its own."""
    try:
        yield
    except SluiceError as error:
        error.rename(names)
        raise


def openai_error_body(error: SluiceError) -> bytes:
    """Return `{"error": {"message", "type", "param", "code"}}`, as OpenAI's clients parse it."""
    code = _openai_code(error)
    kind = code if code == INSUFFICIENT_QUOTA else OPENAI_TYPE[error.code]
    param = error.param and _HEADERS_OF_PARAMS.get(error.param, error.param)
    return orjson.dumps({"error": {"message": client_message(error), "type": kind, "param": param, "code": code}})


def _openai_code(error: SluiceError) -> str | None:
    if error.exceeds_context:
        return _CONTEXT_CODE
    if error.openai_code is not None:
        return error.openai_code
    if error.code is ErrorCode.NOT_FOUND and error.param == "model":
        return "model_not_found"
    # OpenAI has no code for a body that cannot be read as a whole.
    return None if error.code is ErrorCode.INVALID and error.param is None else OPENAI_CODE[error.code]


def anthropic_error_body(error: SluiceError) -> bytes:
    """Return `{"type": "error", "error": {"type", "message"}, "request_id"}`, as Anthropic's clients parse it."""
    kind = ANTHROPIC_TYPE.get(error.code, "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": _anthropic_message(error)}}
    request_id = current_request_id.get()
    return orjson.dumps({**body, "request_id": None if request_id == NO_REQUEST else request_id})


def _anthropic_message(error: SluiceError) -> str:
    """Return the message; of a prompt that is too long in Anthropic's words, by which clients know that they must
    shorten the conversation, and by how much."""
    if not error.exceeds_context:
        return client_message(error)
    if error.prompt_lengths is None:
        return f"prompt is too long: {client_message(error)}"
    num_tokens, most = error.prompt_lengths
    return f"prompt is too long: {num_tokens} tokens > {most} maximum"


def v2_error_body(error: SluiceError) -> bytes:
    """Return `{"error": "message"}`, as Triton's HTTP protocol and Ollama have it."""
    return orjson.dumps({"error": client_message(error)})


def is_v2(path: str) -> bool:
    """Whether `path` belongs to Triton's protocol."""
    return path == "/v2" or (path.startswith("/v2/") and path != COHERE_RERANK)


def is_anthropic(path: str) -> bool:
    """Whether `path` belongs to Anthropic's protocol."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def is_ollama(path: str) -> bool:
    """Whether `path` belongs to Ollama's protocol. What is of none of these protocols has OpenAI's shape."""
    return path.startswith("/api/")


def error_response(path: str, error: SluiceError) -> Response:
    """Return the answer to a failed request of `path`, in the shape of the protocol that owns it."""
    if is_v2(path) or is_ollama(path):
        body = v2_error_body(error)
    else:
        body = anthropic_error_body(error) if is_anthropic(path) else openai_error_body(error)
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE if isinstance(error, UnknownEncodingError) else HTTP_STATUS[error.code]
    return Response(body, status, error_headers(error), "application/json")


def broken_request_body(target: str, status: HTTPStatus, message: str) -> bytes:
    """Return the body for a request that is no HTTP. Only OpenAI's paths, where one was read, have OpenAI's shape."""
    error = SluiceError(_CODE_OF_STATUS.get(status, ErrorCode.INVALID), message)
    if is_anthropic(target):
        return anthropic_error_body(error)
    return openai_error_body(error) if target.startswith("/v1/") else v2_error_body(error)


def error_headers(error: SluiceError) -> dict[str, str]:
    """Return the headers of the answer to `error`, besides those of its body."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        # What the clients of OpenAI and Anthropic prefer: in whole seconds many would come back at once.
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.code is ErrorCode.UNAUTHENTICATED:
        headers["www-authenticate"] = 'Bearer realm="sluice"'
    if error.code is ErrorCode.TOO_LARGE:
        headers["connection"] = "close"  # the rest of the body will not be read
    if isinstance(error, UnknownEncodingError):
        headers["accept-encoding"] = _ENCODINGS
    return headers


def as_sluice_error(error: Exception, request_id: str) -> SluiceError:
    """Return `error` in words for the client. An unexpected one goes to the log with its trace."""
    if isinstance(error, SluiceError):
        return error
    log.error("request %s failed unexpectedly", request_id, exc_info=error)
    message = f"internal server error; the server's log has the details under request id {request_id}"
    return SluiceError(ErrorCode.INTERNAL, message)


def install_error_handlers(app: Starlette) -> None:
    """Make `app` answer each kind of failure in the shape of the protocol that owns the path."""
    app.add_exception_handler(SluiceError, _on_sluice_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


async def _on_sluice_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SluiceError)
    return error_response(request.url.path, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer routing's own refusals: no such route (404), not with this method (405)."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    code = _CODE_OF_STATUS.get(error.status_code, ErrorCode.INVALID)
    message = {
        ErrorCode.NOT_FOUND: f"no route for {request.method} {path}",
        ErrorCode.METHOD_NOT_ALLOWED: f"method {request.method} is not allowed for {path}",
    }.get(code, error.detail or HTTPStatus(error.status_code).phrase)
    openai_code = "unknown_url" if code is ErrorCode.NOT_FOUND else None
    response = error_response(path, SluiceError(code, message, openai_code=openai_code))
    response.headers.update(error.headers or {})
    return response


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """Answer for a path or query parameter that FastAPI refused; the routes validate bodies."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    message = f"{param} {requirement(first)}, got {str(first['input'])[:_SHOWN_CHARS]!r}"
    return error_response(request.url.path, SluiceError(ErrorCode.INVALID, message, param=param))


def requirement(error: Mapping[str, Any]) -> str:
    """Return what one of pydantic's errors asks for, as the predicate of a sentence about the field: "must be ..."."""
    if error["type"] in ("value_error", "assertion_error"):
        return f"must be {error['ctx']['error']}"
    # pydantic writes "Input should be a valid integer", "String should match pattern '...'".
    _, should, expected = error["msg"].partition(" should ")
    return f"must {expected}" if should else f"is refused: {error['msg']}"


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
