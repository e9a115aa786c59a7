"""Grammars that would hang the compiler, fill the memory or overflow the stack."""

import json
import resource
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.matching import CompiledGrammar
from sluice.engine.types import GrammarKind
from sluice.errors import SluiceError
from tests.engine.guidance.walks import EOS, allowed, grammar, outputs
from tests.waiting import PATIENCE_S

BOUND_MB = 400


def chain(link: str, length: int) -> str:
    """Return a schema of references, each to the next; `@` stands for the next one's name."""
    links = ",".join(f'"{i}":{link.replace("@", f"#/$defs/{i + 1}")}' for i in range(length))
    return f'{{"$ref":"#/$defs/0","$defs":{{{links},"{length}":{{"type":"string"}}}}}}'


def rules(head: str, rule: str, last: str, length: int) -> str:
    lines = (rule.replace("@", str(i)).replace("#", str(i + 1)) for i in range(length))
    return head + "".join(lines) + last.replace("@", str(length))


J, E, R = GrammarKind.JSON_SCHEMA, GrammarKind.EBNF, GrammarKind.REGEX
ADVERSARIES: dict[str, tuple[GrammarKind, Callable[[], str]]] = {
    "long chain of references": (J, lambda: chain('{"$ref":"@"}', 8000)),
    "long chain of members": (J, lambda: chain('{"properties":{"x":{"anyOf":[{"$ref":"@"},{"type":"null"}]}}}', 3000)),
    "long chain of items": (J, lambda: chain('{"items":' * 8 + '{"$ref":"@"}' + "}" * 8, 2000)),
    "exponential references": (
        J,
        lambda: chain('{"type":"array","minItems":9,"prefixItems":[' + '{"$ref":"@"},' * 8 + '{"$ref":"@"}]}', 30),
    ),
    "exponential intersections": (
        J,
        lambda: json.dumps(
            {"allOf": [{"anyOf": [{"type": "object", "required": [f"{i}{j}"]} for j in range(6)]} for i in range(8)]}
        ),
    ),
    "many patterns": (J, lambda: json.dumps({"patternProperties": {f"^[a-z]{{1,20}}{i}$": {} for i in range(300)}})),
    "long pattern": (J, lambda: json.dumps({"type": "string", "pattern": "a?" * 50_000})),
    "many long patterns": (
        J,
        lambda: json.dumps({"items": [{"type": "string", "pattern": "a?" * 2000} for _ in range(20)]}),
    ),
    "many members": (J, lambda: json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(2000)}})),
    "large multiple": (J, lambda: '{"type":"integer","multipleOf":982451653}'),
    "long array": (J, lambda: '{"type":"array","minItems":1000000000}'),
    "doubling terminals": (E, lambda: rules('start: A12\nA0: "a"?\n', "A#: A@ A@\n", "", 12)),
    "doubling terminals, mixed": (E, lambda: rules('start: A15\nA0: "a"? | "b"\n', "A#: A@ A@\n", "", 15)),
    "doubling rules": (E, lambda: rules("start: a0\n", "a@: a# a# a# a#\n", 'a@: "x"\n', 40)),
    "long chain of rules": (E, lambda: rules("start: a0\n", "a@: a#\n", 'a@: "x"\n', 5500)),
    "long chain of GBNF rules": (E, lambda: rules("root ::= a0\n", 'a@ ::= "a" a#? | "b"\n', 'a@ ::= "x"\n', 2600)),
    "deep parentheses": (E, lambda: "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "large repetition": (E, lambda: 'start: "a"{1000000000}\n'),
    "ambiguity": (E, lambda: 'start: a\na: a a | a a a | "x" | ""\n'),
    "schema in a grammar": (E, lambda: "start: %json " + chain('{"items":' * 8 + '{"$ref":"@"}' + "}" * 8, 500)),
    "patterns in a grammar": (
        E,
        lambda: "start: %json " + json.dumps({"patternProperties": {f"^[a-z]{{1,20}}{i}$": {} for i in range(300)}}),
    ),
    "deep expression": (R, lambda: "(" * 4000 + "a" + ")" * 4000),
    "repeated repetition": (R, lambda: "((a{1,1000}){1,1000}){1,1000}"),
    "long optional": (R, lambda: "a?" * 4096),
    "exponential states": (R, lambda: "(a|b)*a(a|b){25}"),
    "letters of all scripts": (R, lambda: r"(\w{1,200}\s\p{L}{1,200}){1,200}"),
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_adversary(compiler: GrammarCompiler, name: str) -> None:
    """It is rejected, fails only its own sequence, or works, always within bounds and without effect on others."""
    kind, make = ADVERSARIES[name]
    before = _peak_mb()
    future = compiler.compile(grammar(kind, make()))
    other = compiler.compile(grammar(GrammarKind.CHOICE, ["yes", name]))
    try:
        _follow(future, 40)
    except SluiceError as error:
        assert error.param == "grammar"
    assert other.result(timeout=PATIENCE_S).constraint() is not None
    assert _peak_mb() - before < BOUND_MB


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _follow(future: "Future[CompiledGrammar]", num_tokens: int) -> None:
    constraint, rng = future.result(timeout=PATIENCE_S).constraint(), np.random.default_rng(0)
    for _ in range(num_tokens):
        token = int(rng.choice(allowed(constraint)))
        constraint.accept(token)
        if token == EOS:
            return


def test_a_sequence_that_became_too_complex_fails_alone(compiler: GrammarCompiler) -> None:
    """The next request for the grammar gets a new automaton."""
    doubling = grammar(GrammarKind.EBNF, ADVERSARIES["doubling rules"][1]())
    compiled = compiler.compile(doubling).result(timeout=PATIENCE_S)
    constraint = compiled.constraint()
    with pytest.raises(SluiceError, match="cannot be followed any further: it is too complex"):
        for _ in range(40):
            constraint.accept(allowed(constraint)[0])
    with pytest.raises(SluiceError):
        constraint.mask().apply(np.zeros(4096, np.float32))
    assert compiler.compile(doubling).result(timeout=PATIENCE_S) is not compiled
    assert outputs(compiler, grammar(GrammarKind.REGEX, "[ab]{3}"))
