"""From our sampling parameters to vLLM's."""

from typing import Any

import pytest

from sluice.engine.delegated.vllm.sampling import lark_of, needs_replay, sampling_params
from sluice.engine.types import GenerateRequest, Grammar, GrammarKind, SamplingParams
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.vllm.fake_library import FakeLibrary

LIBRARY = FakeLibrary()
NONE = {"detokenize": False, "output_kind": "delta", "_bad_words_token_ids": None}


def request(resumed: list[int] | None = None, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**sampling)
    return GenerateRequest(request_id="1", prompt_token_ids=[1, 2], sampling=params, resume_token_ids=resumed or [])


def given(resumed: list[int] | None = None, **sampling: Any) -> dict[str, Any]:
    made: dict[str, Any] = vars(sampling_params(LIBRARY, request(resumed, **sampling), has_tokenizer=True))
    return made


def test_what_is_off_is_left_out() -> None:
    assert given(temperature=0.0, max_tokens=7) == {**NONE, "temperature": 0.0, "max_tokens": 7}


def test_every_field() -> None:
    same = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "ignore_eos": True, "min_tokens": 2, "logprobs": 3, "prompt_logprobs": 1,
        "logit_bias": {3: 1.0},
    }  # fmt: skip
    ours = {"stop_token_ids": (4,), "allowed_token_ids": (5, 6), "bad_words": ((7, 8), (9,)), "seed": (1 << 63) + 5}
    theirs = {"stop_token_ids": [4], "allowed_token_ids": [5, 6], "_bad_words_token_ids": [[7, 8], [9]], "seed": 5}
    assert given(max_tokens=9, **same, **ours) == {**NONE, "max_tokens": 9, **same, **theirs}  # type: ignore[arg-type]


def test_a_resumed_output_counts() -> None:
    resumed = given([3, 4, 5], temperature=0.0, max_tokens=9, min_tokens=4, prompt_logprobs=1)
    assert resumed == {**NONE, "temperature": 0.0, "max_tokens": 6, "min_tokens": 1}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, False),
        ({"temperature": 0.0, "seed": 1}, False),
        ({"seed": 1}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 1.0}, True),
        ({"grammar": Grammar(GrammarKind.JSON_OBJECT)}, True),
    ],
)
def test_what_is_generated_anew_after_a_crash(sampling: dict[str, Any], expected: bool) -> None:
    assert needs_replay(request([3], **sampling)) is expected


def test_what_vllm_cannot_do_is_refused() -> None:
    with pytest.raises(SluiceError, match="typical_p must be 1") as caught:
        given(typical_p=0.5)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "typical_p")
    with pytest.raises(SluiceError, match=r"tokenizer\.json"):
        sampling_params(LIBRARY, request(grammar=Grammar(GrammarKind.JSON_OBJECT)), has_tokenizer=False)


@pytest.mark.parametrize(
    ("grammar", "fits", "fails"),
    [
        (Grammar(GrammarKind.REGEX, r"a\d+b"), b"a12b", b"ab"),
        (Grammar(GrammarKind.CHOICE, '["yes", "no"]'), b"no", b"na"),
        (Grammar(GrammarKind.EBNF, 'root ::= "x" ("y" | "z")'), b"xz", b"xx"),
        (Grammar(GrammarKind.EBNF, 'start: "x" | "y"'), b"y", b"z"),
        (Grammar(GrammarKind.JSON_OBJECT), b'{"a": 1}', b"[1]"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}'), b"12", b'"a"'),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}', 'start: "so " @answer\n'), b"so 12", b"12"),
        (Grammar(GrammarKind.REGEX, "b+", 'start: "a" @answer\n'), b"abb", b"bb"),
    ],
)
def test_grammars_are_one_text_in_lark(grammar: Grammar, fits: bytes, fails: bytes) -> None:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    for text, is_whole in ((fits, True), (fails, False)):
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark_of(grammar)))
        assert not matcher.get_error()
        assert (matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()) is is_whole


def test_a_wrong_grammar_is_refused() -> None:
    with pytest.raises(SluiceError, match="choice must be a JSON array"):
        lark_of(Grammar(GrammarKind.CHOICE, "yes"))
