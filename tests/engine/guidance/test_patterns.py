"""JavaScript's regular expressions in the syntax of the compiler."""

import re

import pytest

from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.patterns import translate_pattern
from sluice.engine.types import GrammarKind
from tests.engine.guidance.walks import grammar
from tests.engine.guidance.written import can_write
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("pattern", "written", "refused"),
    [
        (r"^a\/b$", "a/b", "a"),
        ("^{x}$", "{x}", "x"),
        ("^[[]$", "[", "a"),
        ("^[a&&b]+$", "&ab", "c"),
        ("^[^]$", "\n", ""),
        (r"^[\w-.]+$", "a-.", "+"),
        (r"^\u0041\x42$", "AB", "ab"),
        (r"^\uD83D\uDE00$", "\U0001f600", "x"),
        (r"^\cI$", "\t", "I"),
        (r"^\_\@\'$", "_@'", "_"),
        ("^(a|b$)", "b", "bc"),
        ("^a$|^b$", "b", "xb"),
        (r"^[^\]]$", "[", "]"),
        (r"^(?=.*[A-Z])(?=.*\d).{3,}$", "aB1", "ab1"),
    ],
)
def test_a_pattern_keeps_its_meaning(compiler: GrammarCompiler, pattern: str, written: str, refused: str) -> None:
    translated = translate_pattern(pattern)
    parts = [{"pattern": each} for each in (translated.text, *translated.others)]
    compiled = compiler.compile(grammar(GrammarKind.JSON_SCHEMA, {"type": "string", "allOf": parts})).result(
        timeout=PATIENCE_S
    )
    assert translated.dropped == "" and can_write(compiled, written) and not can_write(compiled, refused)


@pytest.mark.parametrize(
    ("pattern", "expected", "dropped"),
    [
        ("^(?!x)a(?<!b)$", "^a$", "look-around"),
        (r"\bfoo\b", "foo", "word boundary"),
        (r"^(a)\1$", r"^(a)[\s\S]*$", "back reference"),
        ("a$b", "ab", "anchor inside"),
        ("(^a)*b", "(a)*b", "anchor inside"),
        ("(?=a)*b", "b", "look-around"),
        ("^(?=a)b|c$", "^b|c$", "look-around"),
    ],
)
def test_what_the_compiler_lacks_is_left_out(pattern: str, expected: str, dropped: str) -> None:
    assert translate_pattern(pattern) == (expected, (), dropped)


@pytest.mark.parametrize("pattern", ["a(", "a)", "[a", "*a", r"\q", "\\", "(?<"])
def test_what_is_no_pattern_stays_as_it_is(pattern: str) -> None:
    assert translate_pattern(pattern) == (pattern, (), "")


@pytest.mark.parametrize("pattern", [r"^[a-z]+(?:-[a-z0-9]+)*$", r"^\d{3}[.x]$", "^a|b$", r"^[^\s@]+@[^\s@]+$"])
def test_a_plain_pattern_matches_as_before(pattern: str) -> None:
    texts = ["a", "b", "ab", "a-b1", "123.", "12x", "x@y", "@"]
    assert [bool(re.search(translate_pattern(pattern).text, each)) for each in texts] == [
        bool(re.search(pattern, each)) for each in texts
    ]
