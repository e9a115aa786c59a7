"""Errors of `pb_utils`, and checks of its arguments, so that a mistake fails where the model makes it."""

from collections.abc import Mapping
from enum import IntEnum
from operator import index
from typing import Any

Parameters = dict[str, bool | int | float | str]
UINT32 = 2**32 - 1
UINT64 = 2**64 - 1
INT64 = 2**63 - 1


class TritonModelException(Exception):
    """A failure of the model, or of its use of `pb_utils`."""


class TritonErrorCode(IntEnum):
    """Triton's error codes."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """Error of one response."""

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
        self._message = check_text(message, "message")
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> TritonErrorCode:
        return self._code

    def __str__(self) -> str:
        return self._message


def check_text(value: Any, what: str) -> str:
    """Return text for people, which may have any characters: the channel escapes them. Raises TypeError."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str, not {type(value).__name__}")
    return str(value)


def check_str(value: Any, what: str) -> str:
    """Return a string. As in Triton, `bytes` are decoded: the elements of BYTES tensors are such.

    Raises TypeError, and ValueError for one that UTF-8 cannot encode.
    """
    if isinstance(value, bytes):
        return value.decode()
    text = check_text(value, what)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be text that UTF-8 can encode, not {text!r}") from None
    return text


def check_int(value: Any, what: str, highest: int = UINT64, lowest: int = 0) -> int:
    """Return an integer. Raises TypeError for other types, ValueError for one that is out of range."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{what} is an int, not {type(value).__name__}") from None
    if not lowest <= number <= highest:
        raise ValueError(f"{what} is from {lowest} to {highest}, not {number}")
    return number


def check_parameters(given: Any) -> Parameters:
    """Return a copy of a request's or response's parameters. Raises TritonModelException in Triton's words.

    Unlike Triton's, values may also be floats, which the protocol allows.
    """
    if not isinstance(given, Mapping):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(given)}")
    for key, value in given.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        check_str(key, "a parameter's key")
        if not isinstance(value, (bool, int, float, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if isinstance(value, int):
            check_int(value, key, UINT64, -INT64)
        elif isinstance(value, str):
            check_str(value, f"the parameter '{key}'")
    return dict(given)
