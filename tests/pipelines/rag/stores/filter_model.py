"""A second, plain implementation of filters, with which the stores' results are compared."""

from collections.abc import Mapping
from typing import TypeVar

from sluice.pipelines.rag.filters import Condition, Filter, Operator, Scalar
from sluice.pipelines.rag.types import DocumentInfo

T = TypeVar("T", str, float)


def fulfils(filter: Filter | None, info: DocumentInfo) -> bool:
    values: Mapping[str, Scalar] = {**info.metadata, "id": info.id, "title": info.title}
    return filter is None or all(_holds(condition, values) for condition in filter.conditions)


def _holds(condition: Condition, values: Mapping[str, Scalar]) -> bool:
    wanted = condition.value
    if condition.operator is Operator.EXISTS:
        return (condition.key in values) is wanted
    if condition.key not in values:
        return condition.operator in (Operator.NE, Operator.NIN)
    value = values[condition.key]
    if isinstance(wanted, tuple):
        is_in = any(_is_same(value, each) for each in wanted)
        return is_in is (condition.operator is Operator.IN)
    if condition.operator in (Operator.EQ, Operator.NE):
        return _is_same(value, wanted) is (condition.operator is Operator.EQ)
    return _is_ordered(condition.operator, value, wanted)


def _is_ordered(operator: Operator, value: Scalar, wanted: Scalar) -> bool:
    if _kind(value) != _kind(wanted) or isinstance(value, bool) or isinstance(wanted, bool):
        return False
    if isinstance(value, str) and isinstance(wanted, str):
        return value.startswith(wanted) if operator is Operator.PREFIX else _compares(operator, value, wanted)
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return operator is not Operator.PREFIX and _compares(operator, value, wanted)
    return False


def _compares(operator: Operator, value: T, wanted: T) -> bool:
    match operator:
        case Operator.GT:
            return value > wanted
        case Operator.GTE:
            return value >= wanted
        case Operator.LT:
            return value < wanted
        case _:
            return value <= wanted


def _is_same(one: Scalar, other: Scalar) -> bool:
    return _kind(one) == _kind(other) and one == other


def _kind(value: Scalar) -> str:
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, int | float) else type(value).__name__
