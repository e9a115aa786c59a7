"""Schemas as libraries write them, and the values that the official test suite says match them."""

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.types import GrammarKind
from tests.engine.guidance.walks import grammar
from tests.engine.guidance.written import can_write
from tests.waiting import PATIENCE_S

FOLDER = Path("tests/data/schemas")
SUITE: list[dict[str, Any]] = json.loads((FOLDER / "suite.json").read_text())
ZOD: dict[str, dict[str, Any]] = json.loads((FOLDER / "zod.json").read_text())
NEVER = {"zod 4, 2020-12: never", "zod 3, jsonSchema7: never"}


def has_whole_float(value: Any) -> bool:
    """Whether a value has an integer written with a fraction, which a grammar of integers does not have."""
    if isinstance(value, dict | list):
        return any(map(has_whole_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case["name"])
def test_what_the_suite_calls_valid_can_be_written(compiler: GrammarCompiler, case: dict[str, Any]) -> None:
    compiled = compiler.compile(grammar(GrammarKind.JSON_SCHEMA, case["schema"])).result(timeout=PATIENCE_S)
    values = [value for value in case["valid"] if not has_whole_float(value)]
    assert [value for value in values if not can_write(compiled, value)] == []


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("name", sorted(ZOD.keys() - NEVER))
def test_what_zod_writes_is_taken(compiler: GrammarCompiler, name: str, is_closed: bool) -> None:
    schema = rewrite(ZOD[name], is_closed=is_closed).schema
    compiler.compile(grammar(GrammarKind.JSON_SCHEMA, schema)).result(timeout=PATIENCE_S)
