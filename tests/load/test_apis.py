import json
from typing import Any

import pytest

from load.apis import ChatApi, CompletionsApi, GenerateApi, ParsedEvent, StreamingApi, make_api
from load.config import ApiKind, Workload

TOKEN = ParsedEvent(has_text=True)


def parse(api: StreamingApi, event: object) -> ParsedEvent:
    return api.parse(json.dumps(event).encode())


def choice(**fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "finish_reason": None} | fields]}


@pytest.mark.parametrize(
    ("event", "parsed"),
    [
        (choice(text=" a"), TOKEN),
        (choice(text=" a", finish_reason="stop"), ParsedEvent(has_text=True, finish_reason="stop")),
        (choice(text=""), ParsedEvent()),
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, ParsedEvent(False, None, 3, 4)),
        ({"error": {"message": "engine died", "code": 500}}, ParsedEvent(error="engine died")),
        ({"error": "plain"}, ParsedEvent(error="plain")),
    ],
)
def test_completions_events(event: object, parsed: ParsedEvent) -> None:
    assert parse(CompletionsApi(), event) == parsed


@pytest.mark.parametrize(
    ("delta", "parsed"),
    [
        ({"role": "assistant", "content": ""}, ParsedEvent()),
        ({"content": "a"}, TOKEN),
        ({"reasoning_content": "hm"}, TOKEN),
        ({"reasoning": "hm"}, TOKEN),
        ({"content": None}, ParsedEvent()),
        ({}, ParsedEvent()),
    ],
)
def test_chat_events_count_only_where_text_arrives(delta: dict[str, Any], parsed: ParsedEvent) -> None:
    assert parse(ChatApi(), choice(delta=delta)) == parsed


@pytest.mark.parametrize(
    ("event", "parsed"),
    [
        ({"model_name": "m", "model_version": "1", "text_output": "a"}, TOKEN),
        ({"text_output": "ab", "num_output_tokens": 2}, ParsedEvent(has_text=True, num_tokens=2)),
        ({"text_output": "", "finish_reason": "length"}, ParsedEvent(finish_reason="length")),
        ({"error": "asked to fail"}, ParsedEvent(error="asked to fail")),
    ],
)
def test_generate_stream_events(event: object, parsed: ParsedEvent) -> None:
    assert parse(GenerateApi(), event) == parsed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff", "malformed"),
        (b'{"choices": 4}', "Expected `array`"),
        (b'{"choices": [{"text": "\xff"}]}', "utf-8"),
    ],
)
def test_what_is_not_the_protocol_raises(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompletionsApi().parse(data)


@pytest.mark.parametrize("kind", ApiKind)
def test_bodies_ask_for_exact_lengths_unless_configured_otherwise(kind: ApiKind) -> None:
    api = make_api(kind)
    exact = json.loads(api.body("m", "hello", 5, Workload()))
    assert (exact["max_tokens"], exact["ignore_eos"], exact["stream"]) == (5, True, True)
    free = json.loads(api.body("m", "hello", 5, Workload(ignore_eos=False, extra_body={"temperature": 0.5})))
    assert "ignore_eos" not in free
    assert free["temperature"] == 0.5


def test_each_api_has_its_path_and_its_place_for_the_prompt() -> None:
    chat, completions, generate = (make_api(kind) for kind in ApiKind)
    assert chat.path("m") == "/v1/chat/completions"
    assert completions.path("m") == "/v1/completions"
    assert generate.path("m") == "/v2/models/m/generate_stream"
    assert json.loads(chat.body("m", "hi", 1, Workload()))["messages"] == [{"role": "user", "content": "hi"}]
    assert json.loads(completions.body("m", [1, 2], 1, Workload()))["prompt"] == [1, 2]
    assert json.loads(generate.body("m", "hi", 1, Workload()))["text_input"] == "hi"
