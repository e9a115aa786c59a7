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
    retry makes sense, if known. `openai_code` is OpenAI's word for it where that says more than ours.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        openai_code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.openai_code = openai_code
        self.is_logged = False
        """Whether the log has the message already."""
        self.exceeds_context = False
        """Whether the request is too long for the model, so that one with a larger context may take it."""
        self.is_senders_limit = False
        """Whether a limit of the sender refused the request, so that no other model would take it either."""
        self.predicted_wait_s: float | None = None
        """The predicted wait, where the request was refused for it alone: it would be longer than the client allows."""

    def reworded(self, message: str) -> "SluiceError":
        """Return the same error with another message."""
        error = SluiceError(
            self.code, message, param=self.param, retry_after_s=self.retry_after_s, openai_code=self.openai_code
        )
        error.exceeds_context, error.is_senders_limit = self.exceeds_context, self.is_senders_limit
        error.predicted_wait_s = self.predicted_wait_s
        return error


def invalid(param: str, message: str) -> SluiceError:
    """Make an INVALID error about the request field `param`."""
    return SluiceError(ErrorCode.INVALID, message, param=param)


def too_long(param: str, message: str) -> SluiceError:
    """Make an INVALID error about the request field `param`, with which the request exceeds the model's context."""
    error = invalid(param, message)
    error.exceeds_context = True
    return error


def invalid_argument(message: str) -> SluiceError:
    """Make an INVALID error that is about no one field."""
    return SluiceError(ErrorCode.INVALID, message)
