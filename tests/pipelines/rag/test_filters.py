"""Filters as clients write them."""

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.filters import MAX_CONDITIONS, MAX_LISTED_VALUES, Condition, Filter, Operator, parse_filter


@pytest.mark.parametrize("given", [None, "", "  ", b"", {}, "{}", "null"])
def test_no_condition_is_no_filter(given: object) -> None:
    assert parse_filter(given) is None


def test_as_many_conditions_and_values_are_taken_as_are_allowed() -> None:
    parsed = parse_filter({f"k{index}": {"in": [0] * MAX_LISTED_VALUES} for index in range(MAX_CONDITIONS)})
    assert parsed is not None and len(parsed.conditions) == MAX_CONDITIONS


@pytest.mark.parametrize("value", ["sluice", "", 1, -2.5, True, False, None, 2**63 - 1, -(2**63)])
def test_a_value_alone_means_eq(value: object) -> None:
    parsed = parse_filter({"key": value})
    assert parsed == parse_filter({"key": {"eq": value}})
    assert parsed is not None
    assert parsed.conditions == (Condition("key", Operator.EQ, value),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ['{"year": {"gte": 2025, "lt": 2027}, "é": "a"}', '{"year":{"gte":2025,"lt":2027},"é":"a"}'.encode()]
)
def test_text_is_read_as_json(text: str | bytes) -> None:
    expected = (
        Condition("year", Operator.GTE, 2025),
        Condition("year", Operator.LT, 2027),
        Condition("é", Operator.EQ, "a"),
    )
    assert parse_filter(text) == Filter(expected)


@pytest.mark.parametrize(
    ("operator", "value"),
    [
        ("ne", None),
        ("gt", 1),
        ("lte", "b"),
        ("exists", False),
        ("prefix", ""),
    ],
)
def test_every_operator_takes_its_kind(operator: str, value: object) -> None:
    parsed = parse_filter({"a": {operator: value}})
    assert parsed is not None
    assert parsed.conditions == (Condition("a", Operator(operator), value),)  # type: ignore[arg-type]


@pytest.mark.parametrize("operator", ["in", "nin"])
@pytest.mark.parametrize("values", [[], ["a", 1, 2.5, True, None]])
def test_lists_become_tuples(operator: str, values: list[object]) -> None:
    parsed = parse_filter({"a": {operator: values}})
    assert parsed is not None
    assert parsed.conditions[0].value == tuple(values)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "not JSON"),
        ("[1]", r"JSON object.*\[1\]"),
        (b"\xff", "not JSON"),
        (7, "JSON object.*7"),
        ({1: "a"}, "key 1; keys are strings"),
        ({"\ud800": "a"}, "keys are strings"),
        ({"product": ["a", "b"]}, r"'product'.*\"in\".*\['a', 'b'\]"),
        ({"year": {}}, "'year'.*eq, ne, in"),
        ({"year": {"between": [1, 2]}}, "'year'.*'between'.*eq, ne, in"),
        ({"year": {"gte": True}}, "'year': gte takes a number or a string, got True"),
        ({"year": {"lt": None}}, "lt takes a number or a string, got None"),
        ({"year": {"in": 2025}}, "in takes a list of values, got 2025"),
        ({"year": {"in": [[1]]}}, r"'year': in takes a string, .* got \[1\]"),
        ({"year": {"exists": 1}}, "exists takes true or false, got 1"),
        ({"id": {"prefix": 1}}, "prefix takes a string, got 1"),
        ({"year": {"eq": {"a": 1}}}, "eq takes a string"),
        ({"year": {"eq": 2**63}}, "64 bits"),
        ({"year": float("nan")}, "'year'.*got nan"),
        ({"year": {"gt": float("inf")}}, "got inf"),
        ({"name": "\ud800"}, "'name'"),
        ({"year": {"nin": [0] * (MAX_LISTED_VALUES + 1)}}, "at most 1000 values, got 1001"),
        ({f"k{index}": 1 for index in range(MAX_CONDITIONS + 1)}, "65 conditions; at most 64"),
    ],
)
def test_a_wrong_filter_is_named_and_explained(given: object, says: str) -> None:
    with pytest.raises(SluiceError, match=says) as caught:
        parse_filter(given)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "filter")
    assert len(caught.value.message) < 300
    caught.value.message.encode()
