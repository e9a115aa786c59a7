"""Requests of Dynamo's front end, as those of a text model."""

import json
from typing import Any

import pytest

from sluice.engine.types import Grammar, GrammarKind, SamplingParams
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.dynamo.requests import parse_request
from sluice.pipelines.text.types import EncodedPrompt, TextRequest

EMPTY: dict[str, Any] = {
    "model": "rill",
    "token_ids": [1, 2, 3],
    "sampling_options": {"n": None, "temperature": None, "use_beam_search": None, "guided_decoding": None},
    "stop_conditions": {"max_tokens": None, "stop": None, "stop_token_ids_hidden": None, "ignore_eos": None},
    "output_options": {"logprobs": None, "skip_special_tokens": True, "formatted_prompt": None},
    "routing": None,
}


def parsed(**parts: Any) -> TextRequest:
    return parse_request({**EMPTY, **parts}, "r1", ("loud",))


def sampling_of(**parts: Any) -> SamplingParams:
    return SamplingParams(**parsed(**parts).sampling)


def refusal(**parts: Any) -> SluiceError:
    with pytest.raises(SluiceError) as raised:
        parsed(**parts)
    assert raised.value.code is ErrorCode.INVALID
    return raised.value


def test_an_empty_request_leaves_all_to_the_model() -> None:
    assert parsed() == TextRequest(request_id="r1", prompt=EncodedPrompt([1, 2, 3], [1, 2, 3]))


def test_every_field_is_passed_on() -> None:
    penalties = {f"{each}_penalty": 0.2 for each in ("repetition", "presence", "frequency")}
    options = {"temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_p": 0.1, "seed": 3, **penalties}
    stops = {"stop_token_ids": [9], "stop_token_ids_hidden": [8, 9], "min_tokens": 2, "max_tokens": 20, "stop": ["x"]}
    output = {"logprobs": 2, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    sampling = sampling_of(sampling_options=options | {"n": 1}, stop_conditions=stops, output_options=output)
    assert {name: getattr(sampling, name) for name in options} == options
    assert set(sampling.stop_token_ids) >= {8, 9}
    assert (sampling.min_tokens, sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (2, 20, 2, 1)


def test_minus_one_switches_a_filter_off() -> None:
    sampling = sampling_of(sampling_options={"top_k": -1, "seed": -1})
    assert (sampling.top_k, sampling.seed) == (0, None)


def test_fields_that_only_the_engine_has_come_with_the_extra_arguments() -> None:
    extra = {"sampling_options": {"typical_p": 0.5, "logit_bias": {"5": -3.0}, "bad_words_token_ids": [[4, 5]]}}
    sampling = sampling_of(extra_args=extra)
    assert (sampling.typical_p, sampling.logit_bias, sampling.bad_words) == (0.5, {5: -3.0}, ((4, 5),))


@pytest.mark.parametrize(
    ("guide", "grammar"),
    [
        ({"json": {"type": "integer"}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')),
        ({"json": '{"type": "integer"}'}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')),
        ({"regex": "a+", "backend": "outlines"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
        ({"grammar": 'root ::= "a"'}, Grammar(GrammarKind.EBNF, 'root ::= "a"')),
    ],
)
def test_guided_decoding_is_a_grammar(guide: dict[str, Any], grammar: Grammar) -> None:
    assert sampling_of(sampling_options={"guided_decoding": guide}).grammar == grammar


def test_a_structural_tag_is_passed_on_as_json() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "integer"}}}
    asked = parsed(sampling_options={"guided_decoding": {"structural_tag": tag}})
    assert (json.loads(asked.structural_tag), asked.sampling) == (tag, {})


@pytest.mark.parametrize(
    ("parts", "field", "value"),
    [
        ({"model": "loud"}, "adapter", "loud"),
        ({"routing": {"priority": 5}}, "priority", -5),  # what is more urgent has a lower number here
        ({"extra_args": {"nvext": {"cache_salt": "a"}}}, "cache_salt", "a"),
    ],
)
def test_what_is_not_about_tokens_is_passed_on(parts: dict[str, Any], field: str, value: object) -> None:
    assert getattr(parsed(**parts), field) == value


@pytest.mark.parametrize(
    ("parts", "param", "words"),
    [
        ({"sampling_options": {"n": 2}}, "n", "n must be 1, got 2"),
        ({"sampling_options": {"best_of": 3}}, "best_of", "best_of must be 1, got 3"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search", "got true"),
        ({"sampling_options": {"top_k": "x"}}, "top_k", "Expected `int`, got `str`"),
        ({"stop_conditions": {"max_thinking_tokens": 4}}, "max_thinking_tokens", "not supported by a sluice worker"),
        ({"extra_args": {"sampling_options": {"wonder": 4}}}, "wonder", "not supported by a sluice worker"),
        (
            {"sampling_options": {"guided_decoding": {"json": {}, "regex": "a"}}},
            "guided_decoding",
            "guided_decoding.json and guided_decoding.regex",
        ),
        ({"sampling_options": {"guided_decoding": {"lark": "a"}}}, "guided_decoding", "got 'lark'"),
        (
            {"sampling_options": {"guided_decoding": {"json": {}, "whitespace_pattern": " "}}},
            "guided_decoding.whitespace_pattern",
            "leave it out",
        ),
        ({"multi_modal_data": {"image_url": [{}]}}, "multi_modal_data", "images, sound and video"),
        ({"prefill_result": {"disaggregated_params": {}}}, "prefill_result", "prefill on another worker"),
        ({"routing": {"priority": "high"}}, "priority", "got 'high'"),
        ({"sampling_options": [1]}, "sampling_options", "must be an object, got [1]"),
        ({"extra_args": {"nvext": {"cache_salt": 5}}}, "cache_salt", "must be a string, got 5"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(parts: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**parts)
    assert error.param == param and words in error.message


def test_values_that_change_nothing_are_accepted() -> None:
    asked = parsed(sampling_options={"use_beam_search": False, "length_penalty": 1.0, "wonder": False})
    assert asked.sampling == {"length_penalty": 1.0}
