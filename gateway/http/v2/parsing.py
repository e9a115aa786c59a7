"""From the JSON of a generate request to its inputs, refusing what Triton refuses in Triton's words.

Triton answers 500 where JSON cannot be read or has the wrong type, and so do we; what is read and makes
no sense is a 400. Its silent overflow of integers is not copied.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.exceptions import HTTPException

from engine.errors import invalid
from gateway.http.scheduling import LONGEST_S
from gateway.http.v2.llm_model import INPUTS, NOTHING_ASKED, Tensor

_INPUTS = {tensor.name: tensor for tensor in INPUTS}
_REQUIRED = [tensor.name for tensor in INPUTS if not tensor.is_optional]
_INT32_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class GenerateInputs:
    """A parsed request. `values` holds the inputs that were sent, by `Tensor.field`.

    Of the request parameters, `priority` (lower runs earlier) and `cache_salt` are None and "" where not sent;
    `timeout` is in microseconds.
    """

    id: str
    values: dict[str, Any]
    priority: int | None = None
    timeout: int | None = None
    cache_salt: str = ""


def parse_inputs(body: bytes, model: str) -> GenerateInputs:
    """The inputs for `model` in `body`, which stand at top level or in an object called `parameters`.

    Other keys are request parameters, of which this model knows three. Raises HTTPException (500) for
    what cannot be read and SluiceError INVALID for what makes no sense.
    """
    members = _members(body)
    request_id = _id(members.pop("id", ""))
    values: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, value in _flattened(members):
        tensor = _INPUTS.get(name)
        if tensor is None:
            _check_parameter(name, value)
            if name in _PARAMETERS:
                parameters[name] = _parameter(name, value)
            continue
        parsed = _tensor_value(tensor, value, model, request_id)
        if values.setdefault(tensor.field, parsed) != parsed:
            raise invalid(name, f"input '{tensor.field}' is given twice, with different values")
    _check_required(values, model, request_id)
    return GenerateInputs(request_id, values, **parameters)


def _unreadable(message: str) -> HTTPException:
    return HTTPException(500, message)


def _members(body: bytes) -> dict[str, Any]:
    if not body:
        raise _unreadable("failed to parse the request JSON buffer: The document is empty. at 0")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _unreadable(f"failed to parse the request JSON buffer: {error.msg}. at {error.pos}") from None
    if not isinstance(document, dict):
        raise _unreadable("attempt to get members for non-object")
    return document


def _id(value: Any) -> str:
    if not isinstance(value, str):
        raise _unreadable("Unable to parse 'id': attempt to access JSON non-string as string")
    return value


def _flattened(members: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key and value, those of the `parameters` object in its place."""
    for name, value in members.items():
        if name == "parameters" and isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def _check_parameter(name: str, value: Any) -> None:
    """Raise INVALID where a key that is no input cannot be a request parameter or asks for what is not here."""
    neutral = NOTHING_ASKED.get(name)
    if neutral is not None:
        if name == "beam_width" and _is_integer(value):
            _check_beam_width(value)
        elif not all(_is_one_of(neutral, element) for element in _elements(value)):
            raise invalid(name, f"input '{name}' is not supported{_remedy(neutral)}")
        return
    if not isinstance(value, int | float | str):
        message = f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
        raise invalid(name, message)


def _check_beam_width(value: int) -> None:
    if value != 1:
        raise invalid("beam_width", f"input 'beam_width' must be 1, the most that this model decodes with, got {value}")


def _parameter(name: str, value: Any) -> Any:
    """The value of a request parameter that means something here. 0 asks for what holds without it, as in Triton."""
    is_allowed, allowed = _PARAMETERS[name]
    if not is_allowed(value):
        raise invalid(name, f"parameter '{name}' must be {allowed}")
    return None if value == 0 else value


def _is_one_of(neutral: tuple[Any, ...], value: Any) -> bool:
    return any(type(value) is type(one) and value == one for one in neutral)


def _remedy(neutral: tuple[Any, ...]) -> str:
    values = " or ".join(orjson.dumps(value).decode() for value in neutral)
    return f"; leave it out or send {values}" if values else "; leave it out"


def _tensor_value(tensor: Tensor, value: Any, model: str, request_id: str) -> Any:
    """The one value of `tensor`, or the list of them; arrays of any depth count by their elements."""
    elements = _elements(value)
    is_of_type, complaint = _TYPES[tensor.datatype]
    if not all(map(is_of_type, elements)):
        raise _unreadable(complaint)
    if tensor.datatype == "INT32":
        _check_int32(tensor.name, elements)
    if tensor.is_list:
        return elements
    if len(elements) != 1:
        text = f"unexpected shape for input '{tensor.name}' for model '{model}'. Expected [1], got [{len(elements)}]."
        raise invalid(tensor.name, _log_request(request_id) + text)
    return elements[0]


def _elements(value: Any) -> list[Any]:
    """What an array holds, nested ones flattened in order; one value is an array of itself."""
    elements, todo = [], [value]
    while todo:
        top = todo.pop()
        if isinstance(top, list):
            todo.extend(reversed(top))
        else:
            elements.append(top)
    return elements


def _check_int32(name: str, values: list[int]) -> None:
    for value in values:
        if not -_INT32_LIMIT <= value < _INT32_LIMIT:
            raise invalid(name, f"{name} must be a 32-bit integer, got {value}")


def _check_required(values: dict[str, Any], model: str, request_id: str) -> None:
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        text = (
            f"expected number of inputs between {len(_REQUIRED)} and {len(INPUTS)} but got {len(values)} inputs "
            f"for model '{model}'. Got input(s) {_name_list(values)}, but missing required input(s) "
            f"{_name_list(missing)}. Please provide all required input(s)."
        )
        raise invalid(missing[0], _log_request(request_id) + text)


def _name_list(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _log_request(request_id: str) -> str:
    """How Triton begins what it says of a request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def _is_integer(value: Any) -> bool:
    return type(value) is int  # a bool is none


def _wrong(what: str, wanted: str) -> str:
    return f"Unable to parse 'data': attempt to access JSON {what} as {wanted}"


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "BYTES": (
        lambda value: isinstance(value, str),
        "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
    ),
    "BOOL": (lambda value: isinstance(value, bool), _wrong("non-boolean", "boolean")),
    "INT32": (_is_integer, _wrong("non-signed-integer", "signed-integer")),
    "UINT64": (lambda value: _is_integer(value) and value >= 0, _wrong("non-unsigned-integer", "unsigned-integer")),
    "FP32": (lambda value: type(value) in (int, float), _wrong("non-number", "double")),
}
"""For each type, how to tell its JSON values and what Triton says of others."""

_PARAMETERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "priority": (
        lambda value: _is_integer(value) and -_INT32_LIMIT <= value < _INT32_LIMIT,
        "a 32-bit integer (lower runs earlier)",
    ),
    "timeout": (
        lambda value: _is_integer(value) and 0 <= value <= LONGEST_S * 1e6,
        f"a whole number of microseconds from 0 (none) to {LONGEST_S * 1e6:.0f}",
    ),
    "cache_salt": (lambda value: isinstance(value, str) and len(value) <= 256, "a string of at most 256 characters"),
}
"""Request parameters that this model knows: how to tell their values, and what they are."""
