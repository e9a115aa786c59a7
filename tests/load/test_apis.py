import json
from typing import Any

import numpy as np
import pytest

from sluice.load.apis import Api, ParsedEvent, make_api
from sluice.load.apis.messages import MessagesApi
from sluice.load.apis.ollama import OllamaChatApi
from sluice.load.apis.openai import ChatApi, CompletionsApi, EmbeddingsApi, RerankApi
from sluice.load.apis.responses import ResponsesApi
from sluice.load.apis.triton import GenerateStreamApi, InferApi, InferBinaryApi
from sluice.load.config import ApiKind, LoadConfigError, Workload

TOKEN = ParsedEvent(has_text=True)


def parse(api: Api, event: object) -> ParsedEvent:
    return api.parse(json.dumps(event).encode())


def choice(**fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "finish_reason": None} | fields]}


PARSED: dict[Api, list[tuple[object, ParsedEvent]]] = {
    CompletionsApi(): [
        (choice(text=" a"), TOKEN),
        (choice(text=" a", finish_reason="stop"), ParsedEvent(has_text=True, finish_reason="stop")),
        (choice(text=""), ParsedEvent()),
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, ParsedEvent(False, None, 3, 4)),
        ({"error": {"message": "engine died", "code": 500}}, ParsedEvent(error="engine died")),
        ({"error": "plain"}, ParsedEvent(error="plain")),
    ],
    ChatApi(): [
        (choice(delta={"role": "assistant", "content": ""}), ParsedEvent()),
        (choice(delta={"content": "a"}), TOKEN),
        (choice(delta={"reasoning_content": "hm"}), TOKEN),
        (choice(delta={"reasoning": "hm"}), TOKEN),
        (choice(delta={"content": None}), ParsedEvent()),
        (choice(delta={}), ParsedEvent()),
    ],
    GenerateStreamApi(): [
        ({"model_name": "m", "model_version": "1", "text_output": "a"}, TOKEN),
        ({"text_output": "ab", "num_output_tokens": 2}, ParsedEvent(has_text=True, num_tokens=2)),
        ({"text_output": "", "finish_reason": "length"}, ParsedEvent(finish_reason="length")),
        ({"error": "asked to fail"}, ParsedEvent(error="asked to fail")),
    ],
    ResponsesApi(): [
        ({"type": "response.created", "response": {"usage": None}}, ParsedEvent()),
        ({"type": "response.output_text.delta", "delta": "a"}, TOKEN),
        ({"type": "response.reasoning_text.delta", "delta": "hm"}, TOKEN),
        ({"type": "response.function_call_arguments.delta", "delta": "{"}, TOKEN),
        (
            {"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 4}}},
            ParsedEvent(prompt_tokens=3, completion_tokens=4, finish_reason="stop", is_last=True),
        ),
        ({"type": "response.incomplete", "response": {}}, ParsedEvent(finish_reason="length", is_last=True)),
        (
            {"type": "response.failed", "response": {"error": {"message": "engine died"}}},
            ParsedEvent(error="engine died", finish_reason="stop", is_last=True),
        ),
        ({"type": "error", "message": "gone"}, ParsedEvent(error="gone", is_last=True)),
    ],
    MessagesApi(): [
        (
            {"type": "message_start", "message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 16}}},
            ParsedEvent(prompt_tokens=19),
        ),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}, TOKEN),
        ({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}}, TOKEN),
        ({"type": "ping"}, ParsedEvent()),
        (
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 4}},
            ParsedEvent(completion_tokens=4, finish_reason="max_tokens"),
        ),
        ({"type": "message_stop"}, ParsedEvent(is_last=True)),
        ({"type": "error", "error": {"message": "overloaded"}}, ParsedEvent(error="overloaded", is_last=True)),
    ],
    OllamaChatApi(): [
        ({"message": {"content": "a"}, "done": False}, TOKEN),
        ({"message": {"content": "", "thinking": "hm"}, "done": False}, TOKEN),
        (
            {
                "message": {"content": ""},
                "done": True,
                "done_reason": "length",
                "prompt_eval_count": 3,
                "eval_count": 4,
            },
            ParsedEvent(prompt_tokens=3, completion_tokens=4, finish_reason="length", is_last=True),
        ),
        ({"error": "no such model"}, ParsedEvent(error="no such model")),
    ],
    EmbeddingsApi(): [({"data": [{}], "usage": {"prompt_tokens": 3}}, ParsedEvent(prompt_tokens=3))],
    RerankApi(): [({"results": [{"index": 0}]}, ParsedEvent())],
    InferApi(): [
        ({"outputs": [{"name": "y"}]}, ParsedEvent()),
        ({"error": "bad shape"}, ParsedEvent(error="bad shape")),
    ],
}


@pytest.mark.parametrize("api", PARSED, ids=lambda api: type(api).__name__)
def test_what_events_and_answers_mean(api: Api) -> None:
    for event, parsed in PARSED[api]:
        assert parse(api, event) == parsed, event


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff", "malformed"),
        (b'{"choices": 4}', "Expected `array`"),
        (b'{"choices": [{"text": "\xff"}]}', "(?i)utf-8"),
    ],
)
def test_what_is_not_the_protocol_raises(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompletionsApi().parse(data)


def test_whole_answers_without_results_have_failed() -> None:
    assert parse(EmbeddingsApi(), {}).error is not None
    assert parse(InferApi(), {"outputs": []}).error is not None


async def prepared(api: InferApi, *inputs: tuple[str, str, list[int]], **shapes: tuple[int, ...]) -> InferApi:
    async def fetch(path: str) -> bytes:
        assert path == "/v2/models/m"
        rows = [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in inputs]
        return json.dumps({"name": "m", "inputs": rows, "outputs": []}).encode()

    await api.prepare(fetch, "m", Workload(shapes=shapes))
    return api


async def test_infer_draws_tensors_of_the_models_shapes() -> None:
    api = await prepared(
        InferApi(), ("ids", "INT64", [1, -1]), ("x", "FP32", [2]), ("t", "BYTES", [1]), ("b", "BOOL", [1]), ids=(1, 5)
    )
    ids, x, t, b = json.loads(api.body("m", "some prompt", 1, Workload()))["inputs"]
    assert (ids["shape"], len(ids["data"])) == ([1, 5], 5)
    assert all(0.0 <= value < 1.0 for value in x["data"])
    assert isinstance(t["data"][0], str)
    assert isinstance(b["data"][0], bool)
    assert api.body("m", "some prompt", 1, Workload()) == api.body("m", "some prompt", 1, Workload())
    assert api.body("m", "some prompt", 1, Workload()) != api.body("m", "another", 1, Workload())


async def test_binary_infer_has_the_values_behind_the_json() -> None:
    inputs = (("x", "FP32", [3]), ("t", "BYTES", [2]))
    as_json, binary = await prepared(InferApi(), *inputs), await prepared(InferBinaryApi(), *inputs)
    values = {each["name"]: each["data"] for each in json.loads(as_json.body("m", "p", 1, Workload()))["inputs"]}
    body = binary.body("m", "p", 1, Workload())
    ((_, length),) = binary.headers()
    header, raw = json.loads(body[: int(length)]), body[int(length) :]
    assert [each["parameters"]["binary_data_size"] for each in header["inputs"]] == [12, len(raw) - 12]
    assert np.frombuffer(raw[:12], "<f4").tolist() == pytest.approx(values["x"])
    assert raw[12:] == b"".join(len(text).to_bytes(4, "little") + text.encode() for text in values["t"])


def test_binary_answers_are_read_as_far_as_their_json() -> None:
    answer = json.dumps({"outputs": [{"name": "y", "parameters": {"binary_data_size": 3}}]}).encode()
    assert InferBinaryApi().parse(answer + b"}]\xff") == ParsedEvent()


@pytest.mark.parametrize(
    ("shape", "message"),
    [({"other": (1,)}, "has no such input; it has x"), ({"x": (1, 2, 3)}, "expects"), ({"x": (7, 1)}, "expects")],
)
async def test_shapes_that_do_not_fit_are_refused(shape: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(LoadConfigError, match=message):
        await prepared(InferApi(), ("x", "FP32", [1, -1]), **shape)


LANGUAGE_MODELS = {
    ApiKind.COMPLETIONS: "/v1/completions",
    ApiKind.CHAT: "/v1/chat/completions",
    ApiKind.RESPONSES: "/v1/responses",
    ApiKind.MESSAGES: "/v1/messages",
    ApiKind.OLLAMA_CHAT: "/api/chat",
    ApiKind.GENERATE_STREAM: "/v2/models/m/generate_stream",
    ApiKind.GENERATE: "/v2/models/m/generate",
}
"""The APIs whose answers have a length, with their paths."""


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_bodies_ask_for_exact_lengths_unless_configured_otherwise(kind: ApiKind) -> None:
    api = make_api(kind)
    assert api.path("m") == LANGUAGE_MODELS[kind]
    exact = json.loads(api.body("m", "hello", 5, Workload()))
    fields = exact | exact.get("options", {})
    assert [value for name, value in fields.items() if name.startswith(("max_", "num_predict"))] == [5]
    assert (fields["ignore_eos"], exact["stream"]) == (True, kind is not ApiKind.GENERATE)
    free = json.loads(api.body("m", "hello", 5, Workload(ignore_eos=False, extra_body={"top_p": 0.5})))
    assert "ignore_eos" not in free | free.get("options", {})
    assert free["top_p"] == 0.5


def test_each_api_has_its_place_for_the_prompt() -> None:
    def body(kind: ApiKind, prompt: str | list[int]) -> dict[str, Any]:
        return dict(json.loads(make_api(kind).body("m", prompt, 1, Workload())))

    said = [{"role": "user", "content": "hi"}]
    assert all(body(kind, "hi")["messages"] == said for kind in (ApiKind.CHAT, ApiKind.MESSAGES, ApiKind.OLLAMA_CHAT))
    assert body(ApiKind.COMPLETIONS, [1, 2])["prompt"] == [1, 2]
    assert (body(ApiKind.RESPONSES, "hi")["input"], body(ApiKind.EMBEDDINGS, [1])["input"]) == ("hi", [1])
    assert body(ApiKind.GENERATE, "hi")["text_input"] == "hi"
    assert body(ApiKind.RERANK, "a b c d e f g h")["documents"] == ["a b", "c d", "e f", "g h"]
