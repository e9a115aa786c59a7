"""From a request's bytes to a checked value, or to one sentence that says what is wrong with them."""

import json
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.http.json_fields import is_tag
from gateway.http.unsupported import NOTHING_ASKED, asks_for_nothing
from sluice.errors import ErrorCode, SluiceError, invalid

RequestT = TypeVar("RequestT", bound=BaseModel)

_SHOWN_CHARS = 60
_WARNED_FIELDS = 10


def parse(schema: type[RequestT], body: bytes, is_strict: bool) -> tuple[RequestT, list[str]]:
    """The request in `body`, and the paths of its unknown fields.

    Raises INVALID for the first thing that is wrong: bad JSON, a wrong type, a field that is not
    supported or, when `is_strict`, a field that nobody knows.
    """
    try:
        request = schema.model_validate_json(body)
    except ValidationError as error:
        raise _as_invalid(error.errors(include_url=False)[0]) from None
    ignored = []
    for name, path, value in _undeclared(request):
        if name not in NOTHING_ASKED:
            ignored.append(path)
        elif not asks_for_nothing(name, value):
            raise _unsupported(name, path, value)
    if ignored and is_strict:
        raise invalid(ignored[0], f"unknown field {printable(ignored[0])}; this server refuses what it does not know")
    return request, ignored


def warning_header(ignored: list[str]) -> dict[str, str]:
    """The response header that tells a client which of its fields had no effect."""
    if not ignored:
        return {}
    names = ", ".join(map(printable, ignored[:_WARNED_FIELDS]))
    more = f" and {len(ignored) - _WARNED_FIELDS} more" if len(ignored) > _WARNED_FIELDS else ""
    return {"x-sluice-warning": f"ignored unknown fields: {names}{more}"}


def printable(name: str) -> str:
    """A name that the client made up, cut and in ASCII without control characters, as a header needs it."""
    return _cut(name).encode("unicode_escape").decode("ascii")


def shown(value: Any) -> str:
    """`value` as an error message quotes it: as JSON, cut; of a container only what it is."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = _cut(value) if isinstance(value, str) else value
    return _cut(json.dumps(text, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _undeclared(value: BaseModel, name_prefix: str = "", path_prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every field below `value` that its schema does not declare and that is not null.

    As (`messages.audio`, `messages[0].audio`, its value).
    """
    for name, extra in (value.model_extra or {}).items():
        if extra is not None:
            yield name_prefix + name, path_prefix + name, extra
    for name, field in value:
        if isinstance(field, BaseModel):
            yield from _undeclared(field, f"{name_prefix}{name}.", f"{path_prefix}{name}.")
        elif isinstance(field, list) and field and isinstance(field[0], BaseModel):
            for index, item in enumerate(field):
                yield from _undeclared(item, f"{name_prefix}{name}.", f"{path_prefix}{name}[{index}].")


def _unsupported(name: str, path: str, value: Any) -> SluiceError:
    neutral = NOTHING_ASKED[name]
    remedy = f"leave it out or send {' or '.join(json.dumps(one) for one in neutral)}" if neutral else "leave it out"
    return invalid(path, f"{path} is not supported, got {shown(value)}; {remedy}")


def _as_invalid(error: ErrorDetails) -> SluiceError:
    """One of pydantic's errors as ours: the field, what is allowed, what came."""
    kind, value = error["type"], error["input"]
    if kind == "json_invalid":
        return SluiceError(ErrorCode.INVALID, f"the request body is not valid JSON: {error['ctx']['error']}")
    path = _path(error["loc"])
    if not path:
        return SluiceError(ErrorCode.INVALID, f"the request body must be a JSON object, got {shown(value)}")
    if kind == "missing":
        return invalid(path, f"{path} is required")
    if kind in ("too_short", "string_too_short"):
        return invalid(path, f"{path} must not be empty")
    if kind == "too_long":
        return invalid(path, f"{path} must have at most {error['ctx']['max_length']} elements, got {len(value)}")
    allowed = error["msg"].removeprefix("Input should be ")
    return invalid(path, f"{path} must be {allowed}, got {shown(value)}")


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`, from pydantic's ("messages", 0, "content", "<list>")."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not is_tag(part):
            path += f".{part}" if path else part
    return path
