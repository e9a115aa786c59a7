"""Filters as SQL over the documents of a collection."""

import json
from typing import Any, TypeAlias

from pipelines.rag.filters import Condition, Filter, Operator, Scalar
from pipelines.rag.stores.postgres.rows import storable

Expression: TypeAlias = tuple[str, list[Any]]
"""SQL, and the parameters of its placeholders in order."""

_COMPARISONS = {Operator.GT: ">", Operator.GTE: ">=", Operator.LT: "<", Operator.LTE: "<="}


def where(filter: Filter | None) -> Expression:
    """Whether the document `d` fulfils the filter. Keys and values come as parameters only."""
    conditions = [_condition(condition) for condition in filter.conditions] if filter is not None else []
    text = " AND ".join(text for text, _ in conditions) or "true"
    return text, [parameter for _, parameters in conditions for parameter in parameters]


def _condition(condition: Condition) -> Expression:
    holds, parameters = _holds(condition.operator, condition.value)
    if condition.key in ("id", "title"):
        return f"(SELECT {holds} FROM (VALUES (to_jsonb(d.{condition.key}))) AS given (v))", parameters
    given = "(VALUES (d.metadata -> %s::text)) AS given (v)"
    return f"(SELECT {holds} FROM {given})", [*parameters, storable(condition.key)]


def _holds(operator: Operator, value: Scalar | tuple[Scalar, ...]) -> Expression:
    """Over `v`, the document's value as jsonb: NULL where it has none, which JSON's null is not."""
    if isinstance(value, tuple):
        is_in = "v = ANY (%s::text[]::jsonb[])"
        return is_in if operator is Operator.IN else f"({is_in}) IS NOT TRUE", [[_json(each) for each in value]]
    match operator:
        case Operator.EXISTS:
            return "(v IS NOT NULL) = %s::boolean", [value]
        case Operator.EQ:
            return "v = %s::jsonb", [_json(value)]
        case Operator.NE:
            return "v IS DISTINCT FROM %s::jsonb", [_json(value)]
        case _:
            return _is_ordered(operator, value)


def _is_ordered(operator: Operator, value: Scalar) -> Expression:
    if isinstance(value, str):
        text = """(v #>> '{}') COLLATE "C" """  # by code point, whatever the database's language
        holds = f"starts_with({text}, %s)" if operator is Operator.PREFIX else f"{text} {_COMPARISONS[operator]} %s"
        return f"jsonb_typeof(v) = 'string' AND {holds}", [storable(value)]
    if value is None or isinstance(value, bool) or operator is Operator.PREFIX:
        return "false", []
    return f"jsonb_typeof(v) = 'number' AND v {_COMPARISONS[operator]} %s::jsonb", [_json(value)]


def _json(value: Scalar) -> str:
    return json.dumps(storable(value) if isinstance(value, str) else value, ensure_ascii=False)
