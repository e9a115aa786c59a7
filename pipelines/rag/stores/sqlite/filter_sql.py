"""Translates filters to SQL over documents and their attributes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.pipelines.rag.filters import Condition, Filter, Operator, Scalar

EncodedScalar = str | int | float

_ORDERED = {Operator.GT: ">", Operator.GTE: ">=", Operator.LT: "<", Operator.LTE: "<="}
_COLUMNS = {"id": "name", "title": "title"}
_NEGATIVE = (Operator.NE, Operator.NIN)
_LAST_CHARACTER = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class SqlFragment:
    """A piece of SQL with the values of its question marks."""

    text: str
    values: tuple[EncodedScalar, ...] = ()


def encode_scalar(value: Scalar) -> tuple[str, EncodedScalar]:
    """Return kind and value as `attributes` stores them: values compare within their kind only."""
    match value:
        case None:
            return "null", 0
        case bool():
            return "bool", int(value)
        case str():
            return "string", value
        case int() if not -(2**63) <= value < 2**63:
            return "number", float(value)
        case _:
            return "number", value


def select_documents(collection: int, filter: Filter) -> SqlFragment:
    """Build the query for the row ids of the collection's documents that fulfil the filter."""
    collection_is = SqlFragment("SELECT id FROM documents WHERE collection = ?", (collection,))
    return _join([collection_is, *(_condition_sql(collection, each) for each in filter.conditions)], " AND ")


def _condition_sql(collection: int, condition: Condition) -> SqlFragment:
    negation = "NOT" if _is_negative(condition) else ""
    if condition.key in _COLUMNS:
        predicate = _predicate(condition, "'string'", _COLUMNS[condition.key])
        return SqlFragment(f"{negation} ({predicate.text})", predicate.values)
    predicate = _predicate(condition, "kind", "value")
    documents = f"SELECT document FROM attributes WHERE collection = ? AND key = ? AND ({predicate.text})"
    return SqlFragment(f"id {negation} IN ({documents})", (collection, condition.key, *predicate.values))


def _is_negative(condition: Condition) -> bool:
    """Whether the condition negates its predicate, so that a document without the key fulfils it too."""
    return condition.operator in _NEGATIVE or (condition.operator is Operator.EXISTS and condition.value is False)


def _predicate(condition: Condition, kind_sql: str, value_sql: str) -> SqlFragment:
    """Build the predicate over expressions for kind and value, before any negation."""
    if condition.operator is Operator.EXISTS:
        return SqlFragment("1")
    if isinstance(condition.value, tuple):
        return _any_of(condition.value, kind_sql, value_sql)
    kind, value = encode_scalar(condition.value)
    if condition.operator is Operator.PREFIX:
        return _prefix(str(value), kind_sql, value_sql)
    operator = _ORDERED.get(condition.operator, "=")
    return SqlFragment(f"{kind_sql} = ? AND {value_sql} {operator} ?", (kind, value))


def _any_of(scalars: Sequence[Scalar], kind_sql: str, value_sql: str) -> SqlFragment:
    by_kind: defaultdict[str, list[EncodedScalar]] = defaultdict(list)
    for kind, value in map(encode_scalar, scalars):
        by_kind[kind].append(value)
    pieces = [
        SqlFragment(f"({kind_sql} = ? AND {value_sql} IN ({', '.join('?' * len(values))}))", (kind, *values))
        for kind, values in by_kind.items()
    ]
    return _join(pieces, " OR ") if pieces else SqlFragment("0")


def _join(pieces: Sequence[SqlFragment], separator: str) -> SqlFragment:
    values = tuple(value for piece in pieces for value in piece.values)
    return SqlFragment(separator.join(piece.text for piece in pieces), values)


def _prefix(prefix: str, kind_sql: str, value_sql: str) -> SqlFragment:
    """Express a prefix as a range, which uses an index: SQLite compares strings by code point."""
    after = _least_above(prefix)
    if after is None:
        return SqlFragment(f"{kind_sql} = 'string' AND {value_sql} >= ?", (prefix,))
    return SqlFragment(f"{kind_sql} = 'string' AND {value_sql} >= ? AND {value_sql} < ?", (prefix, after))


def _least_above(prefix: str) -> str | None:
    """Return the least string above all strings that begin with `prefix`, None if there is none."""
    kept = prefix.rstrip(_LAST_CHARACTER)
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    is_surrogate = 0xD800 <= following <= 0xDFFF
    return kept[:-1] + chr(0xE000 if is_surrogate else following)
