"""Errors that clients may see, independent of any protocol."""

from enum import StrEnum


class ErrorCode(StrEnum):
    """The reasons why a request fails. Each protocol maps them to its own codes in one table."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "too_large"
    UNIMPLEMENTED = "unimplemented"
    ALREADY_EXISTS = "already_exists"
    CANCELLED = "cancelled"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    INTERNAL = "internal"
    UNKNOWN = "unknown"


CANNOT_SERVE = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED, ErrorCode.DEADLINE})
"""Codes of failures that are not the request's fault: the same request may succeed later."""


class SluiceError(Exception):
    """A failure whose `message` is written for the client.

    `param` names the request field at fault, if there is one. `retry_after_s` is the number of seconds after which a
    retry makes sense, if known.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_logged = False
        """Whether the log has the message already."""


def invalid(param: str, message: str) -> SluiceError:
    """Make an INVALID error about the request field `param`."""
    return SluiceError(ErrorCode.INVALID, message, param=param)


def invalid_argument(message: str) -> SluiceError:
    """Make an INVALID error that is about no one field."""
    return SluiceError(ErrorCode.INVALID, message)
