"""What can go wrong, in words that belong to no protocol."""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request failed. Each protocol has one table from these to its own codes."""

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
"""Nothing is wrong with the request: who asks again later may be answered."""


class SluiceError(Exception):
    """A failure that the client may read: `message` is written for them.

    `param` names the field of the request that is at fault, where one is. `retry_after_s`
    says when trying again makes sense (seconds), where that is known.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def invalid(param: str, message: str) -> SluiceError:
    """The commonest error: field `param` holds what it must not."""
    return SluiceError(ErrorCode.INVALID, message, param=param)
