"""Filters: conditions on documents' metadata, as JSON, that restrict a search.

A filter such as `{"product": "sluice", "year": {"gte": 2025}}` holds if all its conditions hold. A bare value means
`{"eq": value}`; the operators are eq, ne, in, nin, gt, gte, lt, lte, exists and, on strings, prefix
(`{"id": {"prefix": "docs/"}}`). The document's `id` and `title` are keys as well. A document without the key fulfils
only ne, nin and `exists: false`. Numbers compare with numbers, strings with strings; a comparison of different kinds
does not hold.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import orjson

from sluice.errors import SluiceError, invalid

Scalar = str | int | float | bool | None

MAX_CONDITIONS = 64
MAX_LISTED_VALUES = 1000
"""Most values of one `in` or `nin`. Both bounds keep filters far below the limits of the stores' databases."""


class Operator(StrEnum):
    EQ = "eq"
    NE = "ne"
    IN = "in"
    NIN = "nin"
    GT = "gt"
    GTE = "gte"
    LT = "lt"
    LTE = "lte"
    EXISTS = "exists"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one metadata key. `value` is a tuple for in and nin, a bool for exists, else one scalar."""

    key: str
    operator: Operator
    value: Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions that must all hold."""

    conditions: Sequence[Condition]


def parse_filter(given: object) -> Filter | None:
    """Parse a filter from a JSON object or its text. Returns None for an empty object and for "".

    Raises SluiceError INVALID (param "filter"), which names the key, the value and what was expected.
    """
    value = _parse_json(given) if isinstance(given, str | bytes) else given
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _fault(f"must be a JSON object of metadata keys and what they must be, got {_shown(value)}")
    conditions = tuple(condition for key, operand in value.items() for condition in _parse_conditions(key, operand))
    if len(conditions) > MAX_CONDITIONS:
        raise _fault(f"has {len(conditions)} conditions; at most {MAX_CONDITIONS} are taken")
    return Filter(conditions) if conditions else None


def _parse_json(text: str | bytes) -> object:
    if not text.strip():
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _fault(f"must be a JSON object, got text that is not JSON: {error}") from None


def _parse_conditions(key: object, value: object) -> Iterator[Condition]:
    if not isinstance(key, str) or not _is_text(key):
        raise _fault(f"has the key {_shown(key)}; keys are strings")
    if not isinstance(value, dict):
        yield Condition(key, Operator.EQ, _check_scalar(key, Operator.EQ, value))
        return
    if not value:
        raise _fault(f"key {key!r}: an object must hold an operator ({', '.join(Operator)}), got {{}}")
    for name, operand in value.items():
        operator = _parse_operator(key, name)
        yield Condition(key, operator, _check_operand(key, operator, operand))


def _parse_operator(key: str, name: object) -> Operator:
    try:
        return Operator(str(name))
    except ValueError:
        raise _fault(f"key {key!r}: there is no operator {_shown(name)}; there are {', '.join(Operator)}") from None


def _check_operand(key: str, operator: Operator, value: object) -> Scalar | tuple[Scalar, ...]:
    match operator:
        case Operator.IN | Operator.NIN:
            return _check_list(key, operator, value)
        case Operator.EXISTS:
            return _check_kind(key, operator, value, isinstance(value, bool), "true or false")
        case Operator.PREFIX:
            return _check_kind(key, operator, value, isinstance(value, str), "a string")
        case Operator.GT | Operator.GTE | Operator.LT | Operator.LTE:
            is_ordered = isinstance(value, str | int | float) and not isinstance(value, bool)
            return _check_kind(key, operator, value, is_ordered, "a number or a string")
        case _:
            return _check_scalar(key, operator, value)


def _check_list(key: str, operator: Operator, value: object) -> tuple[Scalar, ...]:
    if not isinstance(value, list | tuple):
        raise _fault(f"key {key!r}: {operator} takes a list of values, got {_shown(value)}")
    if len(value) > MAX_LISTED_VALUES:
        raise _fault(f"key {key!r}: {operator} takes at most {MAX_LISTED_VALUES} values, got {len(value)}")
    return tuple(_check_scalar(key, operator, each) for each in value)


def _check_kind(key: str, operator: Operator, value: object, is_valid: bool, expected: str) -> Scalar:
    if not is_valid:
        raise _fault(f"key {key!r}: {operator} takes {expected}, got {_shown(value)}")
    return _check_scalar(key, operator, value)


def _check_scalar(key: str, operator: Operator, value: object) -> Scalar:
    expected = "a string, a number of at most 64 bits, true, false or null"
    match value:
        case None | bool():
            return value
        case str() if _is_text(value):
            return value
        case int() if -(2**63) <= value < 2**63:
            return value
        case float() if math.isfinite(value):
            return value
        case list() | tuple() if operator is Operator.EQ:
            raise _fault(f'key {key!r}: a list stands in {{"in": [...]}}, got {_shown(value)} alone')
        case _:
            raise _fault(f"key {key!r}: {operator} takes {expected}, got {_shown(value)}")


def _is_text(value: str) -> bool:
    """Whether the string can be encoded as UTF-8. Python's JSON reader lets lone surrogates through, which cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def _fault(what: str) -> SluiceError:
    return invalid("filter", f"filter {what}")
