import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.engine.guidance import matching
from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.matching import FewAllowed, FewForbidden, MaskThreads, Mixed, new_bitmask, to_mask
from sluice.engine.sampling.state import Constraint
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import ErrorCode, SluiceError
from tests.engine.guidance.tiny import TINY_EOS, TOKENS, write_tiny
from tests.engine.guidance.walks import EOS, RILL, TOKENIZER, VOCAB_SIZE, allowed, grammar, walk
from tests.waiting import PATIENCE_S

SCHEMA = grammar(
    GrammarKind.JSON_SCHEMA,
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "number"}},
        "required": ["name", "size"],
    },
)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[GrammarCompiler]:
    write_tiny(tmp_path)
    compiler = GrammarCompiler(tmp_path, len(TOKENS), (TINY_EOS,))
    yield compiler
    compiler.close()


def start(compiler: GrammarCompiler, wanted: Grammar = SCHEMA) -> Constraint:
    return compiler.compile(wanted).result(timeout=PATIENCE_S).constraint()


def feed(constraint: Constraint, text: str) -> None:
    for token in TOKENIZER.encode(text).ids:
        constraint.accept(token)


def reachable(words: list[str], prefix: str) -> set[int]:
    """Return the tokens that may follow `prefix`, found by trying each one."""
    ids = {i for i, token in enumerate(TOKENS) if i != TINY_EOS and any(w.startswith(prefix + token) for w in words)}
    return ids | ({TINY_EOS} if prefix in words else set())


WORDS = ["abc", "ab", "bca", "cab", "cabb", "122", "1", "12{", 'a"b']


def test_masks_equal_brute_force(tiny: GrammarCompiler) -> None:
    """Visit every state that any tokens reach, over a small vocabulary."""
    words = " | ".join(json.dumps(word) for word in WORDS)
    wanted = grammar(GrammarKind.EBNF, f'%llguidance {{"no_forcing": true}}\nstart: W\nW: {words}\n')
    places: list[tuple[int, ...]] = [()]
    num_places = 0
    while places:
        tokens = places.pop()
        constraint = start(tiny, wanted)
        for token in tokens:
            constraint.accept(token)
        found = set(allowed(constraint, len(TOKENS)))
        assert found == reachable(WORDS, "".join(TOKENS[token] for token in tokens))
        places += [(*tokens, token) for token in found - {TINY_EOS}]
        num_places += 1
    assert num_places > 25


def test_what_the_grammar_dictates_comes_in_the_tokenizers_own_tokens(tiny: GrammarCompiler) -> None:
    constraint = start(tiny, grammar(GrammarKind.CHOICE, ["abc"]))
    assert [TOKENS[token] for token in allowed(constraint, len(TOKENS))] == ["ab"]


def test_the_same_place_by_any_path(compiler: GrammarCompiler) -> None:
    """A resumed or preempted sequence replays its tokens and continues unchanged."""
    constraint = start(compiler)
    tokens = walk(start(compiler), np.random.default_rng(3))
    for index, token in enumerate(tokens):
        replayed = start(compiler)
        for earlier in tokens[:index]:
            replayed.accept(earlier)
        assert allowed(constraint) == allowed(replayed)
        constraint.accept(token)


def test_sequences_do_not_share_their_place(compiler: GrammarCompiler) -> None:
    first, second = start(compiler), start(compiler)
    feed(first, '{"name')
    assert allowed(second) == allowed(start(compiler)) != allowed(first)


def test_end_of_sequence_only_where_complete_and_then_for_ever(compiler: GrammarCompiler) -> None:
    constraint = start(compiler, grammar(GrammarKind.REGEX, "ab?"))
    assert EOS not in allowed(constraint)
    feed(constraint, "a")
    assert EOS in allowed(constraint) and len(allowed(constraint)) > 1
    feed(constraint, "b")
    for _ in range(3):
        assert allowed(constraint) == [EOS]
        constraint.accept(EOS)


def test_every_end_of_sequence_token_counts() -> None:
    several = GrammarCompiler(RILL, VOCAB_SIZE, (EOS, 1, 999_999))
    constraint = start(several, grammar(GrammarKind.CHOICE, ["a"]))
    feed(constraint, "a")
    assert allowed(constraint) == [1, EOS]
    constraint.accept(1)
    assert allowed(constraint) == [1, EOS]
    several.close()


def test_padding_is_never_allowed() -> None:
    padded = GrammarCompiler(RILL, VOCAB_SIZE + 100, (EOS,))
    text = start(padded, grammar(GrammarKind.REGEX, "(?s:.*)"))
    named = start(padded, grammar(GrammarKind.EBNF, f'start: <[{VOCAB_SIZE}-{VOCAB_SIZE + 5}]> | "a"'))
    assert max(allowed(text, VOCAB_SIZE + 100)) < VOCAB_SIZE
    assert all(token < VOCAB_SIZE for token in allowed(named, VOCAB_SIZE + 100))
    with pytest.raises(SluiceError, match="nothing can match"):
        start(padded, grammar(GrammarKind.EBNF, f"start: <[{VOCAB_SIZE}]>"))
    padded.close()


def test_a_model_with_fewer_logits_than_tokens() -> None:
    short = GrammarCompiler(RILL, 1000, (EOS,))
    assert max(allowed(start(short, grammar(GrammarKind.REGEX, "(?s:.*)")), 1000)) < 1000
    short.close()


def test_special_tokens_are_not_text(compiler: GrammarCompiler) -> None:
    specials = {token for token in range(6) if token != EOS}
    assert not specials & set(allowed(start(compiler, grammar(GrammarKind.REGEX, "(?s:.*)"))))


def test_a_token_that_may_not_come(compiler: GrammarCompiler) -> None:
    constraint = start(compiler)
    with pytest.raises(SluiceError) as caught:
        feed(constraint, "x")
    assert caught.value.code is ErrorCode.INTERNAL
    with pytest.raises(SluiceError):
        constraint.mask().apply(np.zeros(VOCAB_SIZE, np.float32))
    assert allowed(start(compiler))


class CountedMasks:
    """Wraps `next_mask`: counts calls, records their threads, and can block them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._next_mask = matching.next_mask
        self.threads: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.begun = threading.Event()
        monkeypatch.setattr(matching, "next_mask", self)

    def __call__(self, *args: object) -> object:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.may_go.wait(PATIENCE_S)
        return self._next_mask(*args)  # type: ignore[arg-type]


@pytest.fixture
def masks(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> CountedMasks:
    start(compiler)  # compiling works out the first mask itself
    return CountedMasks(monkeypatch)


def test_prepare_returns_at_once_and_apply_waits_for_its_work(compiler: GrammarCompiler, masks: CountedMasks) -> None:
    constraint = start(compiler)
    feed(constraint, '{"')
    masks.may_go.clear()
    constraint.prepare()  # returns although the work cannot end
    assert masks.begun.wait(PATIENCE_S)
    threading.Timer(0.01, masks.may_go.set).start()
    assert allowed(constraint)
    constraint.mask().apply(np.zeros(VOCAB_SIZE, np.float32))
    assert [name.startswith("mask-") for name in masks.threads] == [True]


def test_apply_does_the_work_itself_without_prepare(compiler: GrammarCompiler, masks: CountedMasks) -> None:
    """Speculation applies a mask for each token of a step."""
    constraint = start(compiler)
    for token in TOKENIZER.encode('{"name": "').ids:
        assert token in allowed(constraint)
        constraint.accept(token)
    assert set(masks.threads) == {threading.current_thread().name}


def test_preparing_twice_works_once(compiler: GrammarCompiler, masks: CountedMasks) -> None:
    constraint = start(compiler)
    feed(constraint, '{"')
    for _ in range(3):
        constraint.prepare()
    allowed(constraint)
    constraint.prepare()
    allowed(constraint)
    assert len(masks.threads) == 1


def test_the_first_mask_is_the_grammars(compiler: GrammarCompiler, masks: CountedMasks) -> None:
    for _ in range(3):
        constraint = start(compiler)
        constraint.prepare()
        allowed(constraint)
    assert masks.threads == []


def test_a_prepared_sequence_may_go_on_without_apply(compiler: GrammarCompiler) -> None:
    """This happens after a failed step, or when a sequence replays its tokens."""
    constraint = start(compiler)
    for token in TOKENIZER.encode('{"name":"abc"').ids:
        constraint.prepare()
        constraint.accept(token)
    assert allowed(constraint) == allowed(start_at(compiler, '{"name":"abc"'))


def start_at(compiler: GrammarCompiler, text: str) -> Constraint:
    constraint = start(compiler)
    feed(constraint, text)
    return constraint


def test_a_crowd_of_sequences_is_prepared_at_once(compiler: GrammarCompiler) -> None:
    crowd = [start(compiler) for _ in range(5)]
    alone = walk(start(compiler), np.random.default_rng(1))
    for token in alone:
        for constraint in crowd:
            constraint.prepare()
        expected = allowed(crowd[0])
        for constraint in crowd:
            assert allowed(constraint) == expected
            constraint.accept(token)


def test_masks_are_computed_after_the_threads_end(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = MaskThreads(1)
    threads.close()
    compiled = compiler.compile(SCHEMA).result(timeout=PATIENCE_S)
    monkeypatch.setattr(compiled, "threads", threads)
    constraint = compiled.constraint()
    feed(constraint, '{"')
    constraint.prepare()
    assert allowed(constraint)


def test_a_panic_fails_the_sequence(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def fail(*args: object) -> None:
        raise Panic("in Rust")

    constraint = start_at(compiler, '{"')
    monkeypatch.setattr(matching, "next_mask", fail)
    constraint.prepare()
    with pytest.raises(SluiceError, match="Panic: in Rust"):
        constraint.mask().apply(np.zeros(VOCAB_SIZE, np.float32))
    monkeypatch.undo()
    assert allowed(start(compiler))


def test_two_tokens_that_spell_the_same_are_both_allowed(tiny: GrammarCompiler) -> None:
    wanted = grammar(GrammarKind.EBNF, '%llguidance {"no_forcing": true}\nstart: /(abc|b)+/\n')
    for first, second in itertools.product((["a", "b", "c"], ["ab", "c"], ["a", "bc"]), repeat=2):
        constraint = start(tiny, wanted)
        for token in (*first, *second):
            assert TOKENS.index(token) in allowed(constraint, len(TOKENS))
            constraint.accept(TOKENS.index(token))
        assert TINY_EOS in allowed(constraint, len(TOKENS))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 4096, 5001])
@pytest.mark.parametrize(("share", "kind"), [(0.01, FewAllowed), (0.5, Mixed), (0.99, FewForbidden)])
def test_all_forms_do_the_same(vocab_size: int, share: float, kind: type) -> None:
    rng = np.random.default_rng(vocab_size)
    bits = rng.random(vocab_size) < share
    bits[0] = True
    bitmask = new_bitmask(vocab_size)
    bitmask.view(np.uint8)[: -(-vocab_size // 8)] = np.packbits(bits, bitorder="little")
    mask = to_mask(bitmask, vocab_size, vocab_size)
    assert mask is not None
    if vocab_size > 1000:
        assert isinstance(mask, kind)
    row = rng.normal(size=vocab_size).astype(np.float32)
    row[rng.random(vocab_size) < 0.1] = -np.inf  # another constraint was here before
    row[0] = 1
    expected = np.where(bits, row, np.float32(-np.inf))
    mask.apply(row)
    np.testing.assert_array_equal(row, expected)
    np.testing.assert_array_equal(mask.pack(vocab_size), bitmask)


def test_bits_beyond_what_is_usable_do_not_count() -> None:
    bitmask = new_bitmask(40)
    bitmask[:] = -1
    mask = to_mask(bitmask, 3, 10)
    assert mask is not None
    row = np.zeros(10, np.float32)
    mask.apply(row)
    assert np.flatnonzero(row == 0).tolist() == [0, 1, 2]
    assert mask.pack(10).tolist() == [0b111]


def test_what_others_forbid_is_not_chosen_in_their_stead() -> None:
    bitmask = new_bitmask(100)
    bitmask[0] = 0b110
    mask = to_mask(bitmask, 100, 100)
    assert mask is not None
    row = np.zeros(100, np.float32)
    row[1] = -np.inf
    mask.apply(row)
    assert np.flatnonzero(row == 0).tolist() == [2]
    row[2] = -np.inf
    mask.apply(row)
    assert np.isneginf(row).all()


def test_the_empty_set() -> None:
    bitmask = new_bitmask(64)
    bitmask[1] = -1
    assert to_mask(bitmask, 32, 64) is None


def accepts(compiler: GrammarCompiler, wanted: Grammar, text: str) -> bool:
    """Whether a sequence that follows the grammar may be `text`."""
    constraint = start(compiler, wanted)
    for token in TOKENIZER.encode(text).ids:
        if token not in allowed(constraint):
            return False
        constraint.accept(token)
    return True


ANY_OBJECT = grammar(GrammarKind.JSON_OBJECT)


@pytest.mark.parametrize(
    ("number", "is_allowed"),
    [
        ("9" * 20, True), ("9" * 21, False), ("-0." + "3" * 20, True), ("0." + "3" * 21, False), ("1e+308", True),
        ("1e1000", False), ("-" + "1" * 20 + "." + "2" * 20 + "E-100", True), ("01", False), ("-", True), ("+1", False),
        (f'"{"9" * 30}"', True), (f'"\\"{"9" * 30}\\\\",1', False),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "wanted",
    [
        ANY_OBJECT,
        grammar(GrammarKind.JSON_SCHEMA, {"type": "object"}),
        grammar(GrammarKind.JSON_SCHEMA, {"additionalProperties": {"type": ["number", "string"]}, "type": "object"}),
    ],
)
def test_numbers_of_json_have_ends(compiler: GrammarCompiler, wanted: Grammar, number: str, is_allowed: bool) -> None:
    assert accepts(compiler, wanted, '{"a":' + number) == is_allowed


def test_tokens_of_several_digits_do_not_go_beyond_the_last_digit(tiny: GrammarCompiler) -> None:
    constraint = start(tiny, grammar(GrammarKind.JSON_SCHEMA, {"type": "integer"}))
    for token in ("12", *["22"] * 8, "1"):
        constraint.accept(TOKENS.index(token))
    assert {TOKENS[token] for token in allowed(constraint, len(TOKENS))} == {"1", "2", "<|end|>"}
    constraint.accept(TOKENS.index("2"))
    assert allowed(constraint, len(TOKENS)) == [TINY_EOS]


@pytest.mark.parametrize(
    ("schema", "number"),
    [
        ({"type": "integer"}, "9" * 20),
        ({"type": "integer", "minimum": 0}, "9" * 20),
        ({"const": 10**24}, "1" + "0" * 24),
        ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 1}, "0." + "9" * 20),
        ({"type": "number"}, "-" + "1" * 20 + "." + "2" * 20 + "e-300"),
    ],
)
def test_a_model_that_always_writes_digits_comes_to_an_end(
    compiler: GrammarCompiler, schema: dict[str, Any], number: str
) -> None:
    """The schema requires more than the bound."""
    constraint = start(compiler, grammar(GrammarKind.JSON_SCHEMA, schema))
    for token in TOKENIZER.encode(number).ids:
        assert token in allowed(constraint), number
        constraint.accept(token)
    assert allowed(constraint) if "const" in schema else EOS in allowed(constraint)
    digits = set(TOKENIZER.encode("0123456789").ids)
    assert not digits & set(allowed(constraint))


def test_numbers_of_a_call_come_to_an_end_and_those_of_the_text_before_do_not(compiler: GrammarCompiler) -> None:
    lark = 'start: t0 r1\nt0[lazy]: /(.|\\n)*/ "<call>"\n// f\nr1: %json {"type": "object"}\n'
    constraint = start(compiler, Grammar(GrammarKind.TOOL_CALLS, lark))
    digits = set(TOKENIZER.encode("0123456789").ids)
    ones = "1" * 40
    for text in (f'say "{ones}', f'<call>{{"a": "{ones}', '", "b": 2'):
        for token in TOKENIZER.encode(text).ids:
            assert token in allowed(constraint), text
            constraint.accept(token)
        assert digits & set(allowed(constraint)), text
    for token in TOKENIZER.encode("3" * 19).ids:
        constraint.accept(token)
    assert not digits & set(allowed(constraint))


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a": [1, {"b": {}}, [], true, null, "x\\n\\u001f\\"é"], "c":0}', True),
        ('{"a":  1}', False), ('{ "a":1}', False), ('{"a":1,}', False), ("[1]", False), ('{"a":"\t"}', False),
    ],
)  # fmt: skip
def test_a_json_object_has_json_s_syntax(compiler: GrammarCompiler, text: str, is_allowed: bool) -> None:
    assert accepts(compiler, grammar(GrammarKind.JSON_OBJECT), text) == is_allowed


@pytest.mark.parametrize("kind", [GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA])
@pytest.mark.parametrize(
    ("whitespace", "text", "is_allowed"),
    [
        ("", '{"a":[1,2]}', True), ("", '{"a": 1}', False), (" ", '{ "a" : [ 1 , 2 ] }', True),
        (" ", '{"a":  1}', False), (" ", ' {"a":1}', False), (r"[ \n]*", '{\n  "a":1\n}', True),
        (r"\n", '{"a":1}', True), (r"\n", '{"a": 1}', False),
    ],
)  # fmt: skip
def test_json_has_the_white_space_that_a_pattern_matches(
    compiler: GrammarCompiler, kind: GrammarKind, whitespace: str, text: str, is_allowed: bool
) -> None:
    schema = "" if kind is GrammarKind.JSON_OBJECT else '{"type": "object"}'
    assert accepts(compiler, Grammar(kind, schema, whitespace=whitespace), text) == is_allowed


def test_overlapping_options_of_one_of_are_those_of_any_of(compiler: GrammarCompiler) -> None:
    wanted = grammar(GrammarKind.JSON_SCHEMA, {"oneOf": [{"enum": ["a", "b"]}, {"type": "string", "maxLength": 3}]})
    assert all(accepts(compiler, wanted, text) for text in ('"a"', '"xyz"'))
    assert not accepts(compiler, wanted, '"wxyz"')
