"""Filters as SQL over documents and their attributes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from pipelines.rag.filters import Condition, Filter, Operator, Scalar

Stored = str | int | float

_ORDERED = {Operator.GT: ">", Operator.GTE: ">=", Operator.LT: "<", Operator.LTE: "<="}
_COLUMNS = {"id": "name", "title": "title"}
_NEGATIVE = (Operator.NE, Operator.NIN)
_LAST_CHARACTER = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class Sql:
    """A piece of SQL and what its question marks stand for."""

    text: str
    values: tuple[Stored, ...] = ()


def stored(value: Scalar) -> tuple[str, Stored]:
    """Kind and value as `attributes` keeps them: values compare within their kind only."""
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


def documents_where(collection: int, filter: Filter) -> Sql:
    """A query for the row ids of the collection's documents that fulfil the filter."""
    pieces = [_condition_sql(collection, condition) for condition in filter.conditions]
    texts = ["SELECT id FROM documents WHERE collection = ?", *(piece.text for piece in pieces)]
    return Sql(" AND ".join(texts), (collection, *(value for piece in pieces for value in piece.values)))


def _condition_sql(collection: int, condition: Condition) -> Sql:
    holds = "NOT" if _is_negative(condition) else ""
    if condition.key in _COLUMNS:
        wanted = _predicate(condition, "'string'", _COLUMNS[condition.key])
        return Sql(f"{holds} ({wanted.text})", wanted.values)
    wanted = _predicate(condition, "kind", "value")
    found = f"SELECT document FROM attributes WHERE collection = ? AND key = ? AND ({wanted.text})"
    return Sql(f"id {holds} IN ({found})", (collection, condition.key, *wanted.values))


def _is_negative(condition: Condition) -> bool:
    """Whether a document fulfils it that does not fulfil its predicate; then one without the key fulfils it too."""
    return condition.operator in _NEGATIVE or (condition.operator is Operator.EXISTS and condition.value is False)


def _predicate(condition: Condition, kind: str, value: str) -> Sql:
    """What must be true of the columns `kind` and `value`, before any negation."""
    wanted = condition.value
    if condition.operator is Operator.EXISTS:
        return Sql("1")
    if isinstance(wanted, tuple):
        return _any_of(wanted, kind, value)
    wanted_kind, wanted_value = stored(wanted)
    if condition.operator is Operator.PREFIX:
        return _prefix(str(wanted_value), kind, value)
    operator = _ORDERED.get(condition.operator, "=")
    return Sql(f"{kind} = ? AND {value} {operator} ?", (wanted_kind, wanted_value))


def _any_of(wanted: Sequence[Scalar], kind: str, value: str) -> Sql:
    by_kind = groupby(sorted((stored(each) for each in wanted), key=_kind_of), key=_kind_of)
    pieces = [_one_of(name, [each for _, each in members], kind, value) for name, members in by_kind]
    return _joined(pieces, " OR ") if pieces else Sql("0")


def _one_of(wanted_kind: str, values: Sequence[Stored], kind: str, value: str) -> Sql:
    marks = ", ".join("?" * len(values))
    return Sql(f"({kind} = ? AND {value} IN ({marks}))", (wanted_kind, *values))


def _kind_of(pair: tuple[str, Stored]) -> str:
    return pair[0]


def _joined(pieces: Iterable[Sql], by: str) -> Sql:
    pieces = list(pieces)
    return Sql(by.join(piece.text for piece in pieces), tuple(value for piece in pieces for value in piece.values))


def _prefix(prefix: str, kind: str, value: str) -> Sql:
    """As a range, which an index answers: SQLite compares strings by their code points' order."""
    after = _after_all_with(prefix)
    if after is None:
        return Sql(f"{kind} = 'string' AND {value} >= ?", (prefix,))
    return Sql(f"{kind} = 'string' AND {value} >= ? AND {value} < ?", (prefix, after))


def _after_all_with(prefix: str) -> str | None:
    """The least string above all that begin with `prefix`; None where there is none."""
    kept = prefix.rstrip(_LAST_CHARACTER)
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    is_surrogate = 0xD800 <= following <= 0xDFFF
    return kept[:-1] + chr(0xE000 if is_surrogate else following)
