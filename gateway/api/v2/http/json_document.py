"""Reads JSON as Triton does, with its error messages for missing members and wrong types.

Triton answers 500 to JSON that cannot be parsed or has a wrong type, so these errors are INTERNAL.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import rapidjson

from sluice.errors import ErrorCode, SluiceError

MAX_DEPTH = 100
"""Arrays inside each other from which a tensor's `data` is refused. Elsewhere the parsers' own limits count."""
_MAX_UINT64 = 2**64 - 1
MAX_INT64 = 2**63 - 1
_PARSE_ERROR = re.compile(r"Parse error at offset (\d+): (.*)", re.DOTALL)
_BEYOND_ASCII_AS_QUESTION_MARKS = bytes(range(128)) + b"?" * 128
_WORDS_OF_TRITONS_RELEASE = {"Invalid encoding in string.": "Invalid escape character in string."}


def parse(body: bytes | bytearray | memoryview, offset: int = 0) -> object:
    """Return the document in `body`, whose first byte messages count as `offset`.

    Beyond JSON, NaN and infinities may be bare words, and strings hold any bytes: those that are no UTF-8 become lone
    surrogates (`surrogateescape`). A byte order mark is skipped. Raises INTERNAL.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return _parse_tolerantly(bytes(body).removeprefix(BOM_UTF8), offset)


def _parse_tolerantly(body: bytes, offset: int) -> object:
    try:
        if _is_utf8(body):
            return rapidjson.loads(body)
        return json.loads(body.decode("utf-8", "surrogateescape"))
    except RecursionError:
        raise too_deep() from None
    except ValueError:
        raise unreadable(f"failed to parse the request JSON buffer: {_complaint(body, offset)}") from None


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _complaint(body: bytes, offset: int) -> str:
    """Return the message of RapidJSON, which Triton parses with, for a document that is no JSON."""
    try:
        rapidjson.loads(body.translate(_BEYOND_ASCII_AS_QUESTION_MARKS))
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        match = _PARSE_ERROR.fullmatch(str(error))
        if match is not None:
            return f"{_WORDS_OF_TRITONS_RELEASE.get(match[2], match[2])} at {int(match[1]) + offset}"
    return "Invalid value. at 0"


def too_deep() -> SluiceError:
    """Return the error for arrays or objects inside each other beyond what is read."""
    return SluiceError(ErrorCode.INVALID, f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


@contextmanager
def member_of_request(name: str) -> Iterator[None]:
    """Turn the errors of reading one member into INVALID ones that name it, where no request to a model is read."""
    try:
        yield
    except SluiceError as error:
        raise SluiceError(ErrorCode.INVALID, f"Unable to parse '{name}': {error.message}", param=name) from None


def unreadable(message: str) -> SluiceError:
    """Return an error of Triton's JSON library."""
    return SluiceError(ErrorCode.INTERNAL, message)


def mistyped(expected: str) -> str:
    """Return the message for a wrong type. `expected` is Triton's word for the type: string, boolean, array …"""
    kind = "number" if expected == "double" else expected
    return f"attempt to access JSON non-{kind} as {expected}"


def find(owner: object, name: str) -> object:
    """Return a member; None where it is absent or `owner` is no object. `has` tells null from absent."""
    return owner.get(name) if isinstance(owner, dict) else None


def has(owner: object, name: str) -> bool:
    return isinstance(owner, dict) and name in owner


def members(owner: object, prefix: str = "") -> dict[str, object]:
    """Return `owner` as an object. Raises INTERNAL, with `prefix` before the message."""
    if not isinstance(owner, dict):
        raise unreadable(f"{prefix}attempt to get members for non-object")
    return owner


def string(value: object, prefix: str = "") -> str:
    """Return `value`, which must be a string. Raises INTERNAL, with `prefix` before the message."""
    if not isinstance(value, str):
        raise unreadable(prefix + mistyped("string"))
    return value


def text(value: str, name: str) -> str:
    """Return `value`, which must be Unicode. Raises INVALID, naming it, for a string that was no UTF-8."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise SluiceError(ErrorCode.INVALID, f"'{name}' is not UTF-8", param=name) from None
    return value


def boolean(value: object, prefix: str = "") -> bool:
    """Return `value`, which must be a boolean. Raises like `string`."""
    if not isinstance(value, bool):
        raise unreadable(prefix + mistyped("boolean"))
    return value


def unsigned(value: object, prefix: str = "") -> int:
    """Return `value`, which must be an unsigned integer of 64 bits. Raises like `string`."""
    if type(value) is not int or not 0 <= value <= _MAX_UINT64:
        raise unreadable(prefix + mistyped("unsigned-integer"))
    return value


def is_signed(value: object) -> bool:
    """Whether `value` is an integer of 64 bits."""
    return type(value) is int and -MAX_INT64 - 1 <= value <= MAX_INT64


def string_member(owner: object, name: str, prefix: str = "") -> str:
    """Return a member, which must be a string. Raises like `string`."""
    value = find(owner, name)
    return value if isinstance(value, str) else string(_present(owner, name, prefix), prefix)


def array_member(owner: object, name: str, prefix: str = "") -> list[object]:
    """Return a member, which must be an array. Raises like `string`."""
    value = find(owner, name)
    if isinstance(value, list):
        return value
    _present(owner, name, prefix)
    raise unreadable(prefix + mistyped("array"))


def _present(owner: object, name: str, prefix: str) -> object:
    if not isinstance(owner, dict) or name not in owner:
        raise unreadable(f"{prefix}attempt to access non-existing object member '{name}'")
    value: object = owner[name]
    return value
