"""Parts of a JSON schema that answers are not held to."""

from typing import Any

import pytest

from sluice.engine.guidance.closing import rewrite


def member(value: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": value}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "format": "date"}, []),
        ({"type": "string", "format": "telephone"}, ["format 'telephone' is not enforced at #"]),
        ({"properties": {"format": {"format": "x"}}}, ["format 'x' is not enforced at #/properties/format"]),
        ({"type": ["integer", "null"], "format": "int32"}, []),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, []),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf is taken as anyOf at #"]),
        ({"items": {"oneOf": [{"type": "string"}, {}]}}, ["oneOf is taken as anyOf at #/items"]),
        ({"oneOf": [{"enum": [1, 2]}, {"const": 3}]}, []),
        ({"oneOf": [{"enum": [1, 2]}, {"const": 2}]}, ["oneOf is taken as anyOf at #"]),
        ({"oneOf": [member("a"), member("b")]}, []),
        ({"oneOf": [member("a"), member("a")]}, ["oneOf is taken as anyOf at #"]),
        ({"oneOf": [member("a"), {**member("b"), "required": []}]}, ["oneOf is taken as anyOf at #"]),
        ({"oneOf": [member("a")]}, []),
        ({"oneOf": [True, {"type": "null"}]}, ["oneOf is taken as anyOf at #"]),
        ({"oneOf": 3, "format": 4, "type": 5}, []),
    ],
)
def test_relaxations_are_named_with_their_places(schema: dict[str, Any], expected: list[str]) -> None:
    assert list(map(str, rewrite(schema).notes)) == expected
