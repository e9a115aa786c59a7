"""What models raise, and the errors they answer with."""

from enum import IntEnum


class TritonModelException(Exception):
    """A failure of the model, or of its use of `pb_utils`."""


class TritonErrorCode(IntEnum):
    """Values are the server's."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """The error of one response."""

    UNKNOWN = TritonErrorCode.UNKNOWN
    INTERNAL = TritonErrorCode.INTERNAL
    NOT_FOUND = TritonErrorCode.NOT_FOUND
    INVALID_ARG = TritonErrorCode.INVALID_ARG
    UNAVAILABLE = TritonErrorCode.UNAVAILABLE
    UNSUPPORTED = TritonErrorCode.UNSUPPORTED
    ALREADY_EXISTS = TritonErrorCode.ALREADY_EXISTS
    CANCELLED = TritonErrorCode.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: str | bytes, code: TritonErrorCode = TritonErrorCode.INTERNAL) -> None:
        if not isinstance(message, (str, bytes)):
            raise TypeError(f"TritonError takes its message as str, not {type(message).__name__}")
        if not isinstance(code, TritonErrorCode):
            raise TypeError(f"TritonError takes one of its own codes, TritonError.NOT_FOUND and so on, not {code!r}")
        self._message = message.decode() if isinstance(message, bytes) else message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> TritonErrorCode:
        return self._code

    def __str__(self) -> str:
        return self._message
