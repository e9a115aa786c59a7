"""Fields that leave the tokens alone: what is accepted, what the answer says of itself, and how its text is shown."""

from typing import Any

import openai
import pytest

from engine.types import GenerateRequest
from pipelines.text.model import TextModel
from tests.gateway.http.live import LiveServer
from tests.gateway.http.sse import events_of

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "What is a block table?"}]
CHAT: dict[str, Any] = {"model": "rill", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
TEXT: dict[str, Any] = {"model": "rill", "prompt": "What is a block table?", "max_tokens": 6, "temperature": 0}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def submitted(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """Requests that reach the engine."""
    requests: list[GenerateRequest] = []
    submit = live.engine.submit

    def record(request: GenerateRequest) -> Any:
        requests.append(request)
        return submit(request)

    monkeypatch.setattr(live.engine, "submit", record)
    return requests


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**CHAT)
    answer = client.chat.completions.create(
        **CHAT,
        metadata={"run": "7"},
        safety_identifier="someone",
        store=False,
        prompt_cache_key="docs",
        prompt_cache_retention="24h",
        user="someone",
    )
    assert answer.choices == plain.choices
    assert plain.system_fingerprint is not None and plain.system_fingerprint.startswith("fp_")
    assert answer.system_fingerprint == plain.system_fingerprint


def test_what_has_no_effect_is_named(live: LiveServer, strict_live: LiveServer) -> None:
    fields = CHAT | {"store": True, "verbosity": "low"}
    assert live.post(CHAT_PATH, fields).headers["x-sluice-warning"] == ("fields without effect here: store, verbosity")
    refused = strict_live.post(CHAT_PATH, fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")


@pytest.mark.parametrize(
    ("fields", "tier", "priority"),
    [
        ({}, None, 0),
        ({"service_tier": "auto"}, "default", 0),
        ({"service_tier": "priority"}, "priority", -1),
        ({"service_tier": "flex"}, "flex", 1),
        ({"service_tier": "flex", "priority": 0}, "flex", 0),
    ],
)
def test_a_service_tier_is_a_priority(
    live: LiveServer, submitted: list[GenerateRequest], fields: dict[str, Any], tier: str | None, priority: int
) -> None:
    assert live.post(CHAT_PATH, CHAT | fields).json().get("service_tier") == tier
    chunks = events_of(live.post(CHAT_PATH, CHAT | fields | STREAM).content)[:-1]
    assert {chunk.get("service_tier") for chunk in chunks} == {tier}
    assert {request.priority for request in submitted} == {priority}


def test_a_cache_key_chooses_the_version(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    find = live.service.llm

    def record(name: str, key: str = "") -> TextModel:
        keys.append(key)
        return find(name, key)

    monkeypatch.setattr(live.service, "llm", record)
    live.post(CHAT_PATH, CHAT | {"prompt_cache_key": "docs"})
    live.post(CHAT_PATH, CHAT | {"prompt_cache_key": "docs"}, headers={"x-sluice-sticky": "Ada"})
    assert keys == ["docs", "Ada"]


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
def test_usage_in_every_chunk(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last, _ = events_of(live.post(path, body | options).content)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) > 3
    for chunk in (*chunks, last):
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_details_of_usage_are_whole(client: openai.OpenAI) -> None:
    usage = client.completions.create(**TEXT).usage
    assert usage is not None and usage.completion_tokens_details is not None and usage.prompt_tokens_details is not None
    details = usage.completion_tokens_details
    assert details.reasoning_tokens == details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0
    assert details.audio_tokens == usage.prompt_tokens_details.audio_tokens == 0
