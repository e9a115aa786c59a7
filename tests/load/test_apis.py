import json
from typing import Any

import pytest

from load.apis import ChatDialect, CompletionsDialect, Dialect, GenerateDialect, Piece, dialect_of
from load.config import Api, Workload

TOKEN = Piece(has_text=True)


def read(dialect: Dialect, event: object) -> Piece:
    return dialect.read(json.dumps(event).encode())


def choice(**fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "finish_reason": None} | fields]}


@pytest.mark.parametrize(
    ("event", "piece"),
    [
        (choice(text=" a"), TOKEN),
        (choice(text=" a", finish_reason="stop"), Piece(has_text=True, finish_reason="stop")),
        (choice(text=""), Piece()),
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, Piece(False, None, 3, 4)),
        ({"error": {"message": "engine died", "code": 500}}, Piece(error="engine died")),
        ({"error": "plain"}, Piece(error="plain")),
    ],
)
def test_completions_events(event: object, piece: Piece) -> None:
    assert read(CompletionsDialect(), event) == piece


@pytest.mark.parametrize(
    ("delta", "piece"),
    [
        ({"role": "assistant", "content": ""}, Piece()),
        ({"content": "a"}, TOKEN),
        ({"reasoning_content": "hm"}, TOKEN),
        ({"reasoning": "hm"}, TOKEN),
        ({"content": None}, Piece()),
        ({}, Piece()),
    ],
)
def test_chat_events_count_only_where_text_arrives(delta: dict[str, Any], piece: Piece) -> None:
    assert read(ChatDialect(), choice(delta=delta)) == piece


@pytest.mark.parametrize(
    ("event", "piece"),
    [
        ({"model_name": "m", "model_version": "1", "text_output": "a"}, TOKEN),
        ({"text_output": "ab", "num_output_tokens": 2}, Piece(has_text=True, num_tokens=2)),
        ({"text_output": "", "finish_reason": "length"}, Piece(finish_reason="length")),
        ({"error": "asked to fail"}, Piece(error="asked to fail")),
    ],
)
def test_generate_stream_events(event: object, piece: Piece) -> None:
    assert read(GenerateDialect(), event) == piece


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
        CompletionsDialect().read(data)


@pytest.mark.parametrize("api", Api)
def test_bodies_ask_for_exact_lengths_unless_told_otherwise(api: Api) -> None:
    dialect = dialect_of(api)
    exact = json.loads(dialect.body("m", "hello", 5, Workload()))
    assert (exact["max_tokens"], exact["ignore_eos"], exact["stream"]) == (5, True, True)
    free = json.loads(dialect.body("m", "hello", 5, Workload(ignore_eos=False, extra_body={"temperature": 0.5})))
    assert "ignore_eos" not in free
    assert free["temperature"] == 0.5


def test_each_api_has_its_path_and_its_place_for_the_prompt() -> None:
    chat, completions, generate = (dialect_of(api) for api in Api)
    assert chat.path("m") == "/v1/chat/completions"
    assert completions.path("m") == "/v1/completions"
    assert generate.path("m") == "/v2/models/m/generate_stream"
    assert json.loads(chat.body("m", "hi", 1, Workload()))["messages"] == [{"role": "user", "content": "hi"}]
    assert json.loads(completions.body("m", [1, 2], 1, Workload()))["prompt"] == [1, 2]
    assert json.loads(generate.body("m", "hi", 1, Workload()))["text_input"] == "hi"
