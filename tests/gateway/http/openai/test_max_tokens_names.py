"""Errors about the longest output name the field that the client sent, or say that it is a default."""

from typing import Any

import pytest

from tests.gateway.http.live import LiveServer

CHAT: dict[str, Any] = {"model": "rill", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "rill", "prompt": "hi"}
V2: dict[str, Any] = {"text_input": "hi"}
CHAT_PATH, TEXT_PATH, V2_PATH = "/v1/chat/completions", "/v1/completions", "/v2/models/rill/generate"


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT_PATH, CHAT | {"max_completion_tokens": 5000}, "max_completion_tokens", "max_completion_tokens is 5000"),
        (CHAT_PATH, CHAT | {"max_tokens": 5000}, "max_tokens", "max_tokens is 5000"),
        (CHAT_PATH, CHAT | {"max_completion_tokens": 3, "min_tokens": 5}, "min_tokens", "max_completion_tokens (3)"),
        (CHAT_PATH, CHAT | {"min_tokens": 5000}, "min_tokens", "and the default max_tokens ("),
        (TEXT_PATH, TEXT | {"min_tokens": 17}, "min_tokens", "and the default max_tokens (16)"),
        (TEXT_PATH, TEXT | {"max_tokens": 5000}, "max_tokens", "max_tokens is 5000"),
        (V2_PATH, V2 | {"request_output_len": 5000}, None, "request_output_len is 5000"),
        (V2_PATH, V2 | {"request_output_len": 0}, None, "request_output_len must be 1 or more, got 0"),
        (V2_PATH, V2 | {"max_tokens": 5000}, None, "max_tokens is 5000"),
        (V2_PATH, V2 | {"min_length": 17}, None, "and the default max_tokens (16)"),
    ],
)
def test_the_error_names_what_was_sent(
    live: LiveServer, path: str, body: dict[str, Any], param: str | None, said: str
) -> None:
    refused = live.post(path, body)
    error = refused.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert refused.status_code == 400 and said in message, message
    assert isinstance(error, str) or error["param"] == param
    if param == "max_completion_tokens" or "request_output_len" in body:
        assert "max_tokens" not in message.replace("max_completion_tokens", "")
