"""Which documents a search may look at: conditions on their metadata, as JSON.

`{"product": "sluice", "year": {"gte": 2025}}`: every key must hold. A value is the same as `{"eq": value}`; the
operators are eq, ne, in, nin, gt, gte, lt, lte and exists. `id` and `title` of the document are keys too, and so is
`prefix` on strings (`{"id": {"prefix": "docs/"}}`). A document without a key fulfils only ne, nin and `exists: false`.
Numbers compare with numbers, strings with strings; a comparison of different kinds does not hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

Scalar = str | int | float | bool | None


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
    raise NotImplementedError
