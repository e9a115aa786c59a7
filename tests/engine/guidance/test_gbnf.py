import pytest

from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.gbnf import is_gbnf, to_lark
from sluice.engine.types import GrammarKind
from sluice.errors import SluiceError
from tests.engine.guidance.walks import EOS, TOKENIZER, allowed, grammar
from tests.waiting import PATIENCE_S


def matches(compiler: GrammarCompiler, gbnf: str, text: str) -> bool:
    constraint = compiler.compile(grammar(GrammarKind.EBNF, gbnf)).result(timeout=PATIENCE_S).constraint()
    try:
        for byte in text:
            constraint.accept(TOKENIZER.encode(byte).ids[0])
    except SluiceError:
        return False
    return EOS in allowed(constraint)


@pytest.mark.parametrize(
    ("gbnf", "yes", "no"),
    [
        ('root ::= "a" | "b" c\nc ::= "c"+', ["a", "bc", "bccc"], ["b", "ac"]),
        ('root ::= [a-z]+ "x"', ["ax", "xx", "abxcx"], ["x", "ab"]),
        ('root ::= "a" |', ["", "a"], ["b"]),
        ('root ::= ("a" | )  "b"', ["b", "ab"], ["a"]),
        ("root ::= [^a-c\\n]{2}", ["de", '"]'], ["ad", "\nd"]),
        ('root ::= [\\x41-\\u0043] "\\u0064" "\\"\\\\"', ['Ad"\\', 'Cd"\\'], ["Dd", 'ad"\\']),
        ("root ::= [-+a-c] [a\\-c] [.]", ["-a.", "+-.", "bc."], ["--x", "-b."]),
        ("root ::= . [/]", ["x/", "\n/"], ["xx"]),
        ('root ::= "a\x7f" [\x7f]', ["a\x7f\x7f"], ["a", "a\x7f"]),
        ('root ::= x{2,3} # twice or more\nx ::=\n  "x"', ["xx", "xxx"], ["x", "xxxx"]),
        ('root ::= list\nlist ::= "[" (list ("," list)*)? "]"', ["[]", "[[],[[]]]"], ["[", "[,]"]),
        ('root-rule ::= "a"\nroot ::= root-rule myRule\nmyRule ::= "b"', ["ab"], ["a"]),
    ],
)
def test_matches(compiler: GrammarCompiler, gbnf: str, yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not matches(compiler, gbnf, text)] == []
    assert [text for text in no if matches(compiler, gbnf, text)] == []


def test_only_rules_that_recurse_stay_rules() -> None:
    lark = to_lark('root ::= list ws\nlist ::= "(" list? ws ")"\nws ::= space*\nspace ::= [ ]')
    assert [line.split(":")[0] for line in lark.text.splitlines()] == ["r0", "r1", "T2", "T3", "start"]
    assert lark.rule_names == ("root", "list", "ws", "space", "root")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("root ::= x", True), ("  my-rule::= x", True), ("start: x", False), ('start: "a ::= b"', False), ("", False)],
)
def test_is_gbnf(text: str, expected: bool) -> None:
    assert is_gbnf(text) is expected


@pytest.mark.parametrize(
    "text", ['root ::= "\\ud800"', 'root ::= "\\U00110000"', "root ::= []", 'root ::= "a"\nroot ::= "b"', '"a" ::= "b"']
)
def test_refuses(text: str) -> None:
    with pytest.raises(SluiceError, match=r"line \d, column \d+"):
        to_lark(text)
