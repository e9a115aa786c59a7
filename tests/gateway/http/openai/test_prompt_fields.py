"""Fields that decide which tokens the model gets, and which it may answer with."""

from typing import Any

from tests.gateway.http.live import LiveServer

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
TEXT: dict[str, Any] = {"model": "rill", "prompt": "What is a block table?", "max_tokens": 6, "temperature": 0}


def test_only_allowed_tokens_come(live: LiveServer) -> None:
    fields = {"allowed_token_ids": [7, 9, 11], "temperature": 1.0, "max_tokens": 40, "return_token_ids": True}
    [choice] = live.post(TEXT_PATH, TEXT | fields).json()["choices"]
    assert set(choice["token_ids"]) == {7, 9, 11}
