"""From a failure to a gRPC status."""

import logging
import secrets
from typing import Any, NoReturn

import grpc

from sluice.errors import ErrorCode, SluiceError

logger = logging.getLogger(__name__)

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


def as_sluice_error(error: Exception, method: str) -> SluiceError:
    """`error` in words for the client. One that we did not expect goes to the log with its trace."""
    if isinstance(error, SluiceError):
        return error
    reference = secrets.token_hex(6)
    logger.error("%s failed unexpectedly (%s)", method, reference, exc_info=error)
    return SluiceError(ErrorCode.INTERNAL, f"internal server error; the server's log has the details under {reference}")


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: SluiceError) -> NoReturn:
    """End the call with `error`. Where it says when to try again, clients with a retry policy are told so."""
    metadata: tuple[tuple[str, str], ...] = ()
    if error.retry_after_s is not None:
        metadata = (("grpc-retry-pushback-ms", str(max(1, round(error.retry_after_s * 1000)))),)
    await context.abort(GRPC_CODE[error.code], error.message, metadata)
    raise AssertionError("abort raises")
