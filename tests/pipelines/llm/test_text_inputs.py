"""Requests with text inputs, over a real executor whose runner has no model."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.configuration import default_llm_config
from sluice.pipelines.llm.model import LlmModel
from sluice.serving.model import infer_one
from sluice.serving.tensors.tensor import Tensor
from tests.pipelines.llm.calls import Record, ask, echo, request, stream

PROMPT = "hello"
Make = Callable[[ModelConfig], LlmModel]


async def expected(model: LlmModel, prompt: str, count: int) -> str:
    """The text of the runner's tokens, worked out apart from the model."""
    token_ids = echo(await model.text.prepare(prompt), count)
    detokenizer = model.text.tokenizer.detokenizer()
    return detokenizer.feed(token_ids) + detokenizer.flush()


async def test_one_response_has_exactly_what_belongs_to_the_face(model: LlmModel) -> None:
    response = await infer_one(model, request(model, {"text_input": PROMPT, "max_tokens": 3}, id="r1"))
    assert [each.name for each in response.outputs] == ["text_output", "finish_reason"]
    assert [each.shape for each in response.outputs] == [(1,), (1,)]
    assert (response.id, response.is_final) == ("r1", True)


async def test_only_wanted_outputs_come(model: LlmModel) -> None:
    sent = request(model, {"text_input": PROMPT, "max_tokens": 3}, requested_outputs=("text_output",))
    response = await infer_one(model, sent)
    assert [each.name for each in response.outputs] == ["text_output"]


async def test_a_stream_without_its_text_is_its_end(model: LlmModel) -> None:
    fields = {"text_input": PROMPT, "stream": True}
    assert await stream(model, fields, requested_outputs=("finish_reason",)) == [{"finish_reason": "length"}]


@pytest.mark.parametrize("name", ["stream", "streaming"])
@pytest.mark.parametrize(("sent", "by_default"), [(True, False), (False, True), (None, True), (None, False)])
async def test_who_streams(model: LlmModel, name: str, sent: bool | None, by_default: bool) -> None:
    fields: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 4} | ({} if sent is None else {name: sent})
    streams = by_default if sent is None else sent
    assert model.is_decoupled_for(request(model, fields, streams_by_default=by_default)) is streams
    parts = await stream(model, fields, streams_by_default=by_default)
    assert (len(parts) > 1) is streams


async def test_a_model_that_is_not_decoupled_does_not_stream(make: Make) -> None:
    config = default_llm_config("echo")
    config.model_transaction_policy.decoupled = False
    model = make(config)
    assert not model.is_decoupled_for(request(model, {"text_input": PROMPT}, streams_by_default=True))
    assert len(await stream(model, {"text_input": PROMPT}, streams_by_default=True)) == 1
    with pytest.raises(SluiceError, match="Streaming is only supported if model is deployed using decoupled mode"):
        model.submit(request(model, {"text_input": PROMPT, "stream": True}), lambda response: None)


async def test_rows_of_a_batch_are_what_they_are_alone(batched: LlmModel) -> None:
    prompts = ["hello", "a longer prompt than the first", "x"]
    counts = [9, 4, 13]
    fields = {
        "text_input": np.array([[prompt.encode()] for prompt in prompts], np.object_),
        "max_tokens": np.array([[count] for count in counts], np.int32),
    }
    answer = await infer_one(batched, request(batched, fields))
    text, reason = answer.outputs
    assert (text.shape, reason.shape) == ((3, 1), (3, 1))
    singles = [await ask(batched, {"text_input": p, "max_tokens": n}) for p, n in zip(prompts, counts, strict=True)]
    assert [row[0].decode() for row in text.array.tolist()] == [single["text_output"] for single in singles]


async def test_a_batch_does_not_stream_where_no_output_tells_its_rows_apart(batched: LlmModel) -> None:
    prompts = np.array([[b"a"], [b"b"]], np.object_)
    stream_flags = np.array([[True], [True]])
    with pytest.raises(SluiceError, match="takes a model that declares batch_index"):
        batched.submit(request(batched, {"text_input": prompts, "stream": stream_flags}), lambda response: None)


async def test_a_row_that_fails_fails_its_batch_and_ends_the_others(batched: LlmModel, records: list[Record]) -> None:
    prompts = np.array([[b"a"], [b"b " * 600]], np.object_)
    with pytest.raises(SluiceError, match="context is 512 tokens"):
        await infer_one(batched, request(batched, {"text_input": prompts}))
    assert all(record.is_closed for record in records)


async def test_a_top_p_of_0_is_greedy_or_off_beside_a_top_k(model: LlmModel) -> None:
    as_nvidia_s_client_sends = {"temperature": 1.9, "runtime_top_k": 0, "runtime_top_p": 0.0}
    greedy = await ask(model, {"text_input": PROMPT})
    assert await ask(model, {"text_input": PROMPT} | as_nvidia_s_client_sends) == greedy
    sampling = {"text_input": PROMPT, "temperature": 1.9, "top_k": 4000, "seed": 1}
    assert await ask(model, sampling | {"top_p": 0.0}) == await ask(model, sampling) != greedy


async def test_what_is_no_input_may_be_a_parameter(model: LlmModel) -> None:
    whole = await ask(model, {"text_input": PROMPT, "max_tokens": 5, "stop_words": ["never"]})
    settings = {"max_tokens": 5, "stop_words": "never", "unheard_of": "x", "another": 2.5}
    assert await ask(model, {"text_input": PROMPT}, parameters=settings) == whole
    assert await ask(model, {"text_input": PROMPT, "max_tokens": 5}, parameters={"max_tokens": 5}) == whole | {}


@pytest.mark.parametrize("name", ["sampling_config", "sampling_parameters"])
async def test_sampling_may_be_given_as_json(model: LlmModel, name: str) -> None:
    config = '{"max_tokens": [5], "temperature": 0, "beam_width": 1, "stop": ["never"], "seed": null}'
    assert await ask(model, {"text_input": PROMPT, name: config}) == await ask(
        model, {"text_input": PROMPT, "max_tokens": 5}
    )
    assert await ask(model, {"text_input": PROMPT, name: ""}) == await ask(model, {"text_input": PROMPT})


async def test_the_prompt_may_be_part_of_the_text(model: LlmModel) -> None:
    fields = {"text_input": PROMPT, "exclude_input_in_output": False}
    text = await expected(model, PROMPT, 16)
    assert (await ask(model, fields))["text_output"] == PROMPT + text
    parts = await stream(model, fields | {"stream": True})
    assert "".join(part["text_output"] for part in parts) == text


@pytest.mark.parametrize("place", [4, 9])
async def test_end_id_ends_in_place_of_the_models_own(model: LlmModel, place: int) -> None:
    token_ids = echo(await model.text.prepare(PROMPT), 16)
    answer = await ask(model, {"text_input": PROMPT, "end_id": token_ids[place]})
    assert answer["finish_reason"] == "stop"
    assert answer["text_output"] == await expected(model, PROMPT, token_ids.index(token_ids[place]))


async def test_neutral_values_of_what_is_absent_are_taken(model: LlmModel) -> None:
    neutral = {
        "beam_width": 1,
        "num_return_sequences": 1,
        "length_penalty": 1.0,
        "len_penalty": 0.0,
        "return_context_logits": False,
        "embedding_bias_words": [""],
        "embedding_bias_weights": [0.0],
        "stop_words": [""],
        "lora_task_id": 0,
    }
    assert await ask(model, {"text_input": PROMPT} | neutral) == await ask(model, {"text_input": PROMPT})


async def test_biases_of_words_and_of_tokens_add_up(model: LlmModel) -> None:
    (token_id,) = model.text.tokenizer.encode_words("time", "")
    of_tokens = [-60.0 if each == token_id else 0.0 for each in range(model.text.info.vocab_size)]
    fields = {"text_input": PROMPT, "max_tokens": 3, "embedding_bias_words": ["time"], "embedding_bias_weights": [60.0]}
    answer = await ask(model, fields | {"sampling_config": json.dumps({"embedding_bias": of_tokens})})
    assert answer == await ask(model, {"text_input": PROMPT, "max_tokens": 3})


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"max_tokens": 5}, {}, r"\[request id: g3\] expected number of inputs between 1 and \d+ but got 1 inputs for "),
    ({}, {}, r"missing required input\(s\) \['text_input'\]. Please provide all required input\(s\)."),
    ({"text_input": "a", "input_ids": [1]}, {}, "give text_input or input_ids, not both"),
    ({"text_input": "a", "seed": 5, "random_seed": 6}, {}, "input 'seed' is given twice, with different values"),
    ({"text_input": "a", "max_tokens": 5}, {"max_tokens": 6}, "input 'max_tokens' is given twice"),
    ({"text_input": b"\xff\xfe"}, {}, "input 'text_input' must be text in UTF-8"),
    (
        {"text_input": "a"},
        {"beam_width": "2"},
        "'beam_width' is not supported by this model's runtime, TensorRT-LLM has it; leave it out or send 1",
    ),
    (
        {"text_input": "a"},
        {"lora_name": "fr"},
        "'lora_name' is not supported, as this model was started without LoRA adapters; leave it out or send \"\"",
    ),
    ({"text_input": "a"}, {"logprobs": 1}, "input 'logprobs' is not supported; leave it out"),
    ({"text_input": "a"}, {"num_return_sequences": True}, "'num_return_sequences' must be a 32-bit integer, got true"),
    ({"text_input": "a"}, {"max_tokens": True}, "parameter 'max_tokens' must be a 32-bit integer, got true"),
    ({"text_input": "a"}, {"temperature": "1.5"}, "parameter 'temperature' must be a number, got \"1.5\""),
    ({"text_input": "a"}, {"seed": -1}, "parameter 'seed' must be an integer of 64 bits without sign, got -1"),
    ({"text_input": "a"}, {"ignore_eos": 1}, "parameter 'ignore_eos' must be true or false, got 1"),
    ({"text_input": "a"}, {"cache_salt": 5}, "parameter 'cache_salt' must be a string, got 5"),
    ({"text_input": "a"}, {"queue_timeout": -1}, "parameter 'queue_timeout' must be a whole number of microseconds"),
    ({"text_input": "a", "end_id": -2}, {}, "end_id must be a token id or -1 for none, got -2"),
    ({"text_input": "a", "guided_decoding_guide": "a+"}, {}, "input 'guided_decoding_guide_type' is needed with"),
    ({"text_input": "a", "guided_decoding_guide_type": "regex"}, {}, "input 'guided_decoding_guide' is needed where"),
    (
        {"text_input": "a", "guided_decoding_guide_type": "xml", "guided_decoding_guide": "a+"},
        {},
        "must be one of json, json_schema, regex, ebnf_grammar, got 'xml'",
    ),
    (
        {"text_input": "a", "embedding_bias_words": ["b", "c"], "embedding_bias_weights": [1.0]},
        {},
        "input 'embedding_bias_weights' has 1 elements for the 2 of embedding_bias_words",
    ),
    ({"text_input": "a", "beam_width": 2}, {}, "input 'beam_width' must be 1, the most that this model decodes with"),
    ({"text_input": "a", "sampling_config": "[]"}, {}, r"sampling_config must be a JSON object, got \[\]"),
    ({"text_input": "a", "sampling_config": "{"}, {}, "sampling_config is not JSON"),
    ({"text_input": "a", "sampling_config": '{"heat": 1}'}, {}, "'heat', which is no sampling parameter"),
    ({"text_input": "a", "sampling_config": '{"top_k": [1, 2]}'}, {}, r"'top_k' in sampling_config must be one value"),
    ({"text_input": "a", "sampling_config": '{"n": 2}'}, {}, "input 'n' is not supported; leave it out or send 1"),
]


@pytest.mark.parametrize(("fields", "parameters", "words"), REFUSED)
async def test_refuses_before_it_begins(
    model: LlmModel, records: list[Record], fields: dict[str, Any], parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(SluiceError, match=words) as caught:
        model.submit(request(model, fields, parameters=parameters, id="g3"), lambda response: None)
    assert caught.value.code is ErrorCode.INVALID
    assert (model.num_in_flight, records) == (0, [])


ENGINE_REFUSES = [
    ({"temperature": float("nan")}, "temperature must be between 0 and 2, got nan"),
    ({"top_p": float("inf")}, "top_p must be greater than 0 and at most 1, got inf"),
    (
        {"embedding_bias_words": ["time", "time"], "embedding_bias_weights": [60.0, 60.0]},
        "embedding_bias_weights must be between -100 and 100 for each token, all its words together, got 120",
    ),
    (
        {"embedding_bias_words": ["a"] * 257, "embedding_bias_weights": [1.0] * 257},
        "embedding_bias_words has 257 strings",
    ),
]


@pytest.mark.parametrize(("fields", "words"), ENGINE_REFUSES)
async def test_refuses_by_its_first_response(
    model: LlmModel, records: list[Record], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(SluiceError, match=words) as caught:
        await ask(model, {"text_input": "a"} | fields)
    assert caught.value.code is ErrorCode.INVALID
    assert records[0].error is caught.value
    assert records[0].is_closed


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [
        ("BOOL", (1,), b""),
        ("BOOL", (3,), b"\1"),
        ("BOOL", (0,), b""),
        ("NONE", (1,), b"\1"),
        ("BYTES", (1,), b"\x09\0\0\0a"),
    ],
)
async def test_a_stream_flag_that_is_none_is_left_to_the_check(
    model: LlmModel, datatype: str, shape: tuple[int, ...], raw: bytes
) -> None:
    sent = request(model, {"text_input": "a"})
    sent.inputs["stream"] = Tensor("stream", datatype, shape, raw)
    assert not model.is_decoupled_for(sent)
    with pytest.raises(SluiceError) as caught:
        model.submit(sent, lambda response: None)
    assert caught.value.code is ErrorCode.INVALID
