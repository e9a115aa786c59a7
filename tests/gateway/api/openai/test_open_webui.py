"""Requests as Open WebUI sends them: of its chats, in both protocols, and of its tasks beside them."""

from typing import Any

import pytest

from tests.gateway.front.http.live import MODEL, LiveServer
from tests.gateway.front.http.sse import events_of

TURNS: Any = [
    {"role": "system", "content": "User Context:\n\nBe brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is a ring?"}]},
    {"role": "assistant", "content": "A band."},
    {"role": "user", "content": "And a ling?"},
]
OF_THE_INTERFACE: dict[str, Any] = {
    "params": {"temperature": None, "function_calling": "native"},
    "files": [],
    "filter_ids": [],
    "tool_ids": [],
    "tool_servers": [],
    "features": {"image_generation": False, "code_interpreter": False, "web_search": False, "memory": False},
    "variables": {"{{USER_NAME}}": "Ada", "{{CURRENT_DATE}}": "2026-11-23"},
    "model_item": {"id": MODEL, "object": "model", "owned_by": "openai", "tags": []},
    "session_id": "s5Yq7N0cVhZrAAAB",
    "chat_id": "0b6f5a3e-6b34-4b4b-8e3c-7c8d2f1f3a11",
    "id": "9a1d2b60-3f2e-4a51-9d0e-1f6f3a8b5c22",
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": True},
}
"""Fields of its own that it leaves in the requests of a direct connection."""
OPENAI: dict[str, Any] = {"model": MODEL, "messages": TURNS, "temperature": 0.0, "max_tokens": 6}


@pytest.mark.parametrize("fields", [{}, OF_THE_INTERFACE])
def test_a_chat(live: LiveServer, fields: dict[str, Any]) -> None:
    whole = live.post("/v1/chat/completions", OPENAI | fields | {"stream": False})
    response = live.post(
        "/v1/chat/completions", OPENAI | fields | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.status_code == 200 and ("chat_id" in response.headers.get("x-sluice-warning", "")) == bool(fields)
    *chunks, used, done = events_of(response.content)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text and text == whole.json()["choices"][0]["message"]["content"] and done == "[DONE]"
    assert (
        used["choices"] == [] and used["usage"]["completion_tokens"] == whole.json()["usage"]["completion_tokens"] == 6
    )


def test_what_it_asks_of_a_connection(live: LiveServer) -> None:
    [model] = live.get("/v1/models", headers={"authorization": "Bearer none"}).json()["data"]
    assert (model["id"], model["object"]) == (MODEL, "model") and "owned_by" in model
    [tag] = live.get("/api/tags").json()["models"]
    assert tag["model"] == tag["name"] == f"{MODEL}:latest" and {"size", "digest", "details"} <= tag.keys()
    [running] = live.get("/api/ps").json()["models"]
    assert running["model"] == tag["model"] and "expires_at" in running
    assert live.get("/api/version").json()["version"].split(".")[0].isdecimal()
    shown = live.post("/api/show", {"model": tag["model"], "name": tag["model"]}).json()
    assert "completion" in shown["capabilities"]
