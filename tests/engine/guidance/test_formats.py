"""Formats of strings end, however long a model would write on."""

import pytest

from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.translate import BOUNDS
from sluice.engine.types import GrammarKind
from tests.engine.guidance.walks import grammar
from tests.engine.guidance.written import can_write
from tests.waiting import PATIENCE_S

ENDLESS = {
    "date-time": "2026-01-02T03:04:05.{}Z",
    "time": "03:04:05.{}Z",
    "duration": "PT{}S",
    "email": "{}@example.com",
    "hostname": "1.{}1",
    "uri": "https://example.com/{}",
}
FITTING = {"date-time": 9, "time": 9, "duration": 9, "email": 64, "hostname": 200, "uri": 1000}


@pytest.mark.parametrize("format", BOUNDS)
@pytest.mark.parametrize("more", [{}, {"pattern": "^.*$"}])
def test_a_format_has_a_longest_text(compiler: GrammarCompiler, format: str, more: dict[str, str]) -> None:
    schema = {"type": "string", "format": format, **more}
    compiled = compiler.compile(grammar(GrammarKind.JSON_SCHEMA, schema)).result(timeout=PATIENCE_S)
    piece = "1." if format == "hostname" else "1"
    most = FITTING[format] // len(piece)
    assert can_write(compiled, ENDLESS[format].format(piece * most))
    assert not can_write(compiled, ENDLESS[format].format(piece * (most * 3)))


def test_a_length_of_the_schema_comes_before_that_of_the_format(compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "format": "uri", "maxLength": 5000}
    compiled = compiler.compile(grammar(GrammarKind.JSON_SCHEMA, schema)).result(timeout=PATIENCE_S)
    assert can_write(compiled, "https://example.com/" + "a" * 4000)
