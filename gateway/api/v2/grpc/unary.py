"""How calls are served: bytes in, bytes out, and one table from failures to gRPC statuses."""

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc.messages import WireMessage, join_message, parse_settings
from sluice.gateway.front.path_masking import client_message

log = logging.getLogger(__name__)
GRPC_CODE: dict[ErrorCode, grpc.StatusCode] = {
    ErrorCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.METHOD_NOT_ALLOWED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
}
RawCall = Callable[[bytes | memoryview, Any], Awaitable[WireMessage]]
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]
"""How a call ends: code, text and trailing metadata."""


def raw_handler(name: str, call: RawCall) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Make a handler of raw messages, which no layer of gRPC copies or decodes."""

    async def serve(raw: bytes | memoryview, context: Any) -> WireMessage:
        try:
            return await call(raw, context)
        except Exception as error:
            refusal = as_sluice_error(error, name)
            # The traceback holds frames that hold the job, which holds the error: work for the garbage collector.
            error.__traceback__ = None
            await abort(context, refusal)

    return grpc.unary_unary_rpc_method_handler(serve, response_serializer=join_message)


def sync_handler(name: str, request_type: Any, answer: Callable[[Any], Any]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Make a handler of a function from message to message."""

    async def call(raw: bytes | memoryview, context: Any) -> bytes:
        serialized: bytes = answer(parse_settings(request_type, raw)).SerializeToString()
        return serialized

    return raw_handler(name, call)


def async_handler(
    name: str, request_type: Any, answer: Callable[[Any], Awaitable[Any]]
) -> "grpc.RpcMethodHandler[bytes, bytes]":

    async def call(raw: bytes | memoryview, context: Any) -> bytes:
        serialized: bytes = (await answer(parse_settings(request_type, raw))).SerializeToString()
        return serialized

    return raw_handler(name, call)


def as_sluice_error(error: Exception, method: str) -> SluiceError:
    """Return `error` in words for the client. An unexpected one goes to the log with its trace."""
    if isinstance(error, SluiceError):
        return error
    reference = secrets.token_hex(6)
    log.error("%s failed unexpectedly (%s)", method, reference, exc_info=error)
    return SluiceError(ErrorCode.INTERNAL, f"internal server error; the server's log has the details under {reference}")


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: SluiceError) -> NoReturn:
    """End the call with `error`."""
    await context.abort(*status_of(error))
    raise AssertionError("abort raises")


def status_of(error: SluiceError) -> Status:
    """Return how a call ends that failed with `error`. Its retry time reaches clients that have a retry policy."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    if error.retry_after_s is not None:
        metadata = (("grpc-retry-pushback-ms", str(max(1, round(error.retry_after_s * 1000)))),)
    return GRPC_CODE[error.code], client_message(error), metadata
