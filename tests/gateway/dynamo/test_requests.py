"""Requests of Dynamo's front end, as the engine's."""

from typing import Any

import pytest

from sluice.engine.types import EngineInfo, Grammar, GrammarKind, SamplingParams
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.dynamo.requests import ServedModel, parse_request
from sluice.pipelines.text.sampling import SamplingDefaults
from sluice.pipelines.text.tokenizer import Tokenizer

INFO = EngineInfo(
    runtime="openvino",
    model_type="llama",
    dtype="f32",
    vocab_size=4096,
    eos_token_ids=(0,),
    max_model_len=1024,
    block_size=16,
    num_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    load_seconds=1.0,
    adapters=("loud",),
)
EMPTY: dict[str, Any] = {
    "model": "rill",
    "token_ids": [1, 2, 3],
    "sampling_options": {"n": None, "temperature": None, "use_beam_search": None, "guided_decoding": None},
    "stop_conditions": {"max_tokens": None, "stop": None, "stop_token_ids_hidden": None, "ignore_eos": None},
    "output_options": {"logprobs": None, "skip_special_tokens": True, "formatted_prompt": None},
    "routing": None,
}


@pytest.fixture
def model(rill: Tokenizer) -> ServedModel:
    return ServedModel(SamplingDefaults(top_p=0.9), rill, INFO)


def parsed(model: ServedModel, **parts: Any) -> SamplingParams:
    return parse_request({**EMPTY, **parts}, "r1", model).sampling


def refusal(model: ServedModel, **parts: Any) -> SluiceError:
    with pytest.raises(SluiceError) as raised:
        parse_request({**EMPTY, **parts}, "r1", model)
    assert raised.value.code is ErrorCode.INVALID
    return raised.value


def test_an_empty_request_has_the_models_defaults_and_all_that_the_context_leaves(model: ServedModel) -> None:
    request = parse_request(EMPTY, "r1", model)
    assert (request.request_id, request.prompt_token_ids, request.adapter) == ("r1", [1, 2, 3], "")
    eos = model.tokenizer.eos_token_id
    assert eos is not None and eos not in INFO.eos_token_ids
    assert request.sampling == SamplingParams(max_tokens=1021, top_p=0.9, stop_token_ids=(eos,))


def test_every_field_is_passed_on(model: ServedModel) -> None:
    options = {"temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.1}
    options |= {"presence_penalty": 0.2, "frequency_penalty": 0.3, "n": 1, "best_of": 1}
    stops = {"stop_token_ids": [9], "stop_token_ids_hidden": [8, 9], "min_tokens": 2, "max_tokens": 20, "stop": ["x"]}
    output = {"logprobs": 2, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    sampling = parsed(model, sampling_options=options, stop_conditions=stops, output_options=output)
    options.pop("n")
    options.pop("best_of")
    assert {name: getattr(sampling, name) for name in options} == options
    assert set(sampling.stop_token_ids) >= {8, 9}
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 20)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 1)


def test_minus_one_switches_a_filter_off(model: ServedModel) -> None:
    sampling = parsed(model, sampling_options={"top_k": -1, "seed": -1})
    assert (sampling.top_k, sampling.seed) == (0, None)


def test_fields_that_only_the_engine_has_come_with_the_extra_arguments(model: ServedModel) -> None:
    extra = {"sampling_options": {"typical_p": 0.5, "logit_bias": {"5": -3.0}, "bad_words_token_ids": [[4, 5]]}}
    sampling = parsed(model, extra_args={**extra, "nvext": {"cache_salt": "a"}})
    assert (sampling.typical_p, sampling.logit_bias, sampling.bad_words) == (0.5, {5: -3.0}, ((4, 5),))
    request = parse_request({**EMPTY, "extra_args": {"nvext": {"cache_salt": "a"}}}, "r1", model)
    assert request.cache_salt == "a"


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
def test_guided_decoding_is_a_grammar(model: ServedModel, guide: dict[str, Any], grammar: Grammar) -> None:
    assert parsed(model, sampling_options={"guided_decoding": guide}).grammar == grammar


def test_a_structural_tag_is_a_grammar(model: ServedModel) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "integer"}}}
    grammar = parsed(model, sampling_options={"guided_decoding": {"structural_tag": tag}}).grammar
    assert grammar is not None and grammar.kind is GrammarKind.TOOL_CALLS


def test_an_adapter_is_asked_for_by_its_name(model: ServedModel) -> None:
    assert parse_request({**EMPTY, "model": "loud"}, "r1", model).adapter == "loud"


def test_what_is_more_urgent_for_dynamo_has_a_lower_number_here(model: ServedModel) -> None:
    assert parse_request({**EMPTY, "routing": {"priority": 5}}, "r1", model).priority == -5


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
def test_what_is_not_supported_is_refused_by_name(
    model: ServedModel, parts: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(model, **parts)
    assert error.param == param
    assert words in error.message


def test_values_that_change_nothing_are_accepted(model: ServedModel) -> None:
    sampling = parsed(model, sampling_options={"use_beam_search": False, "length_penalty": 1.0, "wonder": False})
    assert sampling.length_penalty is None
