"""Errors that clients may see, independent of any protocol."""

from collections.abc import Mapping
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


_MARK = "\x1f"
"""Stands around the name of a request field in `SluiceError.template`."""
CANNOT_SERVE = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED, ErrorCode.DEADLINE})
"""Codes of failures that are not the request's fault: the same request may succeed later."""


class SluiceError(Exception):
    """A failure whose `message` is written for the client.

    `param` names the request field at fault, if there is one. `template` is the message with marks around the fields
    that it names (see `named`): there and in `param` a protocol puts its own names. `retry_after_s` is the number of
    seconds after which a retry makes sense, if known. `openai_code` is OpenAI's word for it, where that says more.
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
        super().__init__(message.replace(_MARK, ""))
        self.code = code
        self.template = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.openai_code = openai_code
        self.is_logged = False
        """Whether the log has the message already."""
        self.exceeds_context = False
        """Whether the request is too long for the model, so that one with a larger context may take it."""
        self.prompt_lengths: tuple[int, int] | None = None
        """The tokens of such a request's prompt, and the most that the model takes, where both are known."""
        self.is_senders_limit = False
        """Whether a limit of the sender refused the request, so that no other model would take it either."""
        self.predicted_wait_s: float | None = None
        """The predicted wait, where the request was refused for it alone: it would be longer than the client allows."""

    @property
    def message(self) -> str:
        return self.template.replace(_MARK, "")

    def rename(self, names: Mapping[str, str]) -> None:
        """Name fields as the client does: `names` maps their names to its own."""
        if self.param is not None:
            self.param = names.get(self.param, self.param)
        for name, own in names.items():
            self.template = self.template.replace(named(name), named(own))

    def describe(self, field: str, words: str) -> None:
        """Put `words` where the message names `field`."""
        self.template = self.template.replace(named(field), words)

    def reworded(self, message: str) -> "SluiceError":
        """Return the same error with another message."""
        error = SluiceError(self.code, message)
        error.__dict__.update(self.__dict__, template=message, is_logged=False)
        return error


def named(field: str) -> str:
    """Return the name of a request field for an error's message, marked so that a protocol can put its own there."""
    return f"{_MARK}{field}{_MARK}"


def invalid(param: str, message: str) -> SluiceError:
    """Make an INVALID error about the request field `param`."""
    return SluiceError(ErrorCode.INVALID, message, param=param)


def too_long(param: str, message: str, prompt_lengths: tuple[int, int] | None = None) -> SluiceError:
    """Make an INVALID error about the request field `param`, with which the request exceeds the model's context."""
    error = invalid(param, message)
    error.exceeds_context, error.prompt_lengths = True, prompt_lengths
    return error


def invalid_argument(message: str) -> SluiceError:
    """Make an INVALID error that is about no one field."""
    return SluiceError(ErrorCode.INVALID, message)
