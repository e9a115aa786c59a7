"""Which documents a search may look at: conditions on their metadata, as JSON.

`{"product": "sluice", "year": {"gte": 2025}}`: every key must hold. A value is the same as `{"eq": value}`; the
operators are eq, ne, in, nin, gt, gte, lt, lte and exists. `id` and `title` of the document are keys too, and so is
`prefix` on strings (`{"id": {"prefix": "docs/"}}`). A document without a key fulfils only ne, nin and `exists: false`.
Numbers compare with numbers, strings with strings; a comparison of different kinds does not hold.
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
"""Of one `in` or `nin`. Both bounds keep what a client sends far under what the stores' databases take at once."""


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
    """`value` is a tuple for in and nin, a bool for exists, else one scalar."""

    key: str
    operator: Operator
    value: Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """All of them hold."""

    conditions: Sequence[Condition]


def parse_filter(given: object) -> Filter | None:
    """The filter of a JSON object, or of its text; None for an empty one and for "".

    Raises SluiceError INVALID (param "filter"), naming key, what came and what is expected.
    """
    value = _from_text(given) if isinstance(given, str | bytes) else given
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _fault(f"must be a JSON object of metadata keys and what they must be, got {_shown(value)}")
    conditions = tuple(condition for key, wanted in value.items() for condition in _conditions(key, wanted))
    if len(conditions) > MAX_CONDITIONS:
        raise _fault(f"has {len(conditions)} conditions; at most {MAX_CONDITIONS} are taken")
    return Filter(conditions) if conditions else None


def _from_text(text: str | bytes) -> object:
    if not text.strip():
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _fault(f"must be a JSON object, got text that is not JSON: {error}") from None


def _conditions(key: object, wanted: object) -> Iterator[Condition]:
    if not isinstance(key, str) or not _is_text(key):
        raise _fault(f"has the key {_shown(key)}; keys are strings")
    if not isinstance(wanted, dict):
        yield Condition(key, Operator.EQ, _scalar(key, Operator.EQ, wanted))
        return
    if not wanted:
        raise _fault(f"key {key!r}: an object must hold an operator ({', '.join(Operator)}), got {{}}")
    for name, operand in wanted.items():
        operator = _operator(key, name)
        yield Condition(key, operator, _operand(key, operator, operand))


def _operator(key: str, name: object) -> Operator:
    try:
        return Operator(str(name))
    except ValueError:
        raise _fault(f"key {key!r}: there is no operator {_shown(name)}; there are {', '.join(Operator)}") from None


def _operand(key: str, operator: Operator, value: object) -> Scalar | tuple[Scalar, ...]:
    match operator:
        case Operator.IN | Operator.NIN:
            return _listed(key, operator, value)
        case Operator.EXISTS:
            return _checked(key, operator, value, isinstance(value, bool), "true or false")
        case Operator.PREFIX:
            return _checked(key, operator, value, isinstance(value, str), "a string")
        case Operator.GT | Operator.GTE | Operator.LT | Operator.LTE:
            is_ordered = isinstance(value, str | int | float) and not isinstance(value, bool)
            return _checked(key, operator, value, is_ordered, "a number or a string")
        case _:
            return _scalar(key, operator, value)


def _listed(key: str, operator: Operator, value: object) -> tuple[Scalar, ...]:
    if not isinstance(value, list | tuple):
        raise _fault(f"key {key!r}: {operator} takes a list of values, got {_shown(value)}")
    if len(value) > MAX_LISTED_VALUES:
        raise _fault(f"key {key!r}: {operator} takes at most {MAX_LISTED_VALUES} values, got {len(value)}")
    return tuple(_scalar(key, operator, each) for each in value)


def _checked(key: str, operator: Operator, value: object, is_right: bool, expected: str) -> Scalar:
    if not is_right:
        raise _fault(f"key {key!r}: {operator} takes {expected}, got {_shown(value)}")
    return _scalar(key, operator, value)


def _scalar(key: str, operator: Operator, value: object) -> Scalar:
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
    """Whether it has a form in UTF-8: half a surrogate pair, which Python's JSON reader lets through, has none."""
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
