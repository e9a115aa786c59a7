"""Streams whose connections are cut: nothing is lost and nothing comes twice, whatever the answer has."""

import asyncio
import json
import random
import time
from secrets import token_hex
from typing import Any

import httpx
import pytest

from benchmarks.streaming.cutting import Cuts, CutStream
from sluice.gateway.answers.streams.store import StreamStore
from tests.gateway.api.openai.test_tools import CALL, TOOLS
from tests.gateway.front.http.live import MODEL, LiveServer
from tests.gateway.front.http.sse import events_of

GREEDY: dict[str, Any] = {"model": MODEL, "stream": True, "temperature": 0}
CHAT = GREEDY | {"messages": [{"role": "user", "content": "Tell me."}]}
SCHEMA = {"type": "object", "properties": {"room": {"enum": ["hall", "loft"]}, "on": {"type": "boolean"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "light", "schema": SCHEMA | {"required": ["room", "on"]}}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", GREEDY | {"prompt": "One two", "max_tokens": 60}),
    "chat": ("/v1/chat/completions", CHAT | {"max_tokens": 60, "stream_options": {"include_usage": True}}),
    "several": ("/v1/chat/completions", CHAT | {"max_tokens": 30, "n": 3, "temperature": 1.0, "seed": 5}),
    "logprobs": ("/v1/chat/completions", CHAT | {"max_tokens": 30, "logprobs": True, "top_logprobs": 3}),
    "messages": ("/v1/messages", CHAT | {"max_tokens": 40}),
    "responses": ("/v1/responses", GREEDY | {"input": "Tell me.", "max_output_tokens": 40}),
}
RESUMABLE = {"x-sluice-resume": "true"}


def address_of(live: LiveServer) -> tuple[str, int]:
    url = httpx.URL(live.url)
    assert url.port is not None
    return url.host, url.port


def cut(live: LiveServer, path: str, body: dict[str, Any], seed: int, num_cuts: int = 20) -> CutStream:
    stream = CutStream([address_of(live)], path, body, Cuts(random.Random(seed), num_cuts, 1200), token_hex())
    asyncio.run(stream.read())
    return stream


def whole(live: LiveServer, stream: CutStream) -> list[bytes]:
    """Return the stream's events without a cut, without their ids."""
    *events, rest = live.get(f"/v1/streams/{stream.stream_id}").content.split(b"\n\n")
    assert rest == b""
    return [event.partition(b"\n")[2] for event in events]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_that_is_cut_again_and_again_is_whole(kept_live: LiveServer, name: str) -> None:
    path, body = REQUESTS[name]
    for seed in range(3):
        stream = cut(kept_live, path, body, seed)
        assert stream.num_connections > 3
        assert stream.events == whole(kept_live, stream)
        assert _texts(stream.events) == texts_of(kept_live.post(path, body).content)


def _texts(events: list[bytes]) -> dict[int, str]:
    """Return the text of each choice."""
    texts: dict[int, str] = {}
    for event in events:
        data = event.rpartition(b"data: ")[2]
        payload = {} if data == b"[DONE]" else json.loads(data)
        for choice in payload.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
        if isinstance(payload.get("delta"), str | dict):
            texts[0] = texts.get(0, "") + (payload["delta"] if isinstance(payload["delta"], str) else str(payload))
    assert texts
    return texts


def texts_of(content: bytes) -> dict[int, str]:
    """Return the text of each choice of a whole answer."""
    return _texts([event for event in content.split(b"\n\n") if event])


def test_an_answer_under_a_grammar_survives_cuts(kept_chat_live: LiveServer) -> None:
    kept_chat_live.runner.script = []
    fields = {
        "n": 3,
        "temperature": 1.0,
        "seed": 3,
        "response_format": FORMAT,
        "logprobs": True,
        "max_tokens": 90,
        "reasoning_effort": "none",
    }
    stream = cut(kept_chat_live, "/v1/chat/completions", CHAT | fields, 2)
    assert stream.events == whole(kept_chat_live, stream)
    for text in _texts(stream.events).values():
        assert json.loads(text).keys() == {"room", "on"}


def test_calls_of_tools_survive_cuts(kept_chat_live: LiveServer) -> None:
    kept_chat_live.say(CALL)
    body = CHAT | {"tools": TOOLS, "max_tokens": 200}
    stream = cut(kept_chat_live, "/v1/chat/completions", body, 1)
    assert stream.events == whole(kept_chat_live, stream)
    chunks = events_of(b"".join(event + b"\n\n" for event in stream.events))[:-1]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"room": "hall", "level": 3}
    assert len({call["id"] for call in calls if "id" in call}) == 1


def test_a_stream_goes_on_while_its_client_is_gone(kept_live: LiveServer) -> None:
    """Two readers at a time get the same; one that is gone holds nobody up."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 8, "stream": True}
    kept_live.runner.hold_after(3)
    with kept_live.client.stream("POST", "/v1/completions", json=body, headers=RESUMABLE) as response:
        kept_live.runner.wait_held()
        stream_id = response.headers["x-sluice-stream"]
        kept_live.runner.release()
    first = kept_live.get(f"/v1/streams/{stream_id}")
    second = kept_live.post("/v1/completions", body, headers={"last-event-id": f"{stream_id}:2"})
    assert first.status_code == second.status_code == 200
    assert first.headers["x-sluice-stream"] == stream_id
    assert first.content.endswith(b"data: [DONE]\n\n")
    assert first.content.endswith(second.content)
    assert second.content.startswith(f"id: {stream_id}:3\n".encode())
    num_events = len(first.content.split(b"\n\n")) - 1
    assert kept_live.get(f"/v1/streams/{stream_id}?starting_after={num_events}").status_code == 204


def test_without_the_header_nothing_is_kept(kept_live: LiveServer) -> None:
    before = dict(_streams(kept_live).num_kept)
    answer = kept_live.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 3, "stream": True})
    assert "x-sluice-stream" not in answer.headers
    assert b"id: " not in answer.content
    assert dict(_streams(kept_live).num_kept) == before


def _streams(live: LiveServer) -> StreamStore:
    return live.streams


def test_a_cancelled_stream_is_gone_and_its_blocks_are_free(kept_live: LiveServer) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 500, "stream": True}
    kept_live.runner.hold_after(3)
    with kept_live.client.stream("POST", "/v1/completions", json=body, headers=RESUMABLE) as response:
        kept_live.runner.wait_held()
        path = f"/v1/streams/{response.headers['x-sluice-stream']}"
        with httpx.Client(base_url=kept_live.url) as other:
            assert other.delete(path).status_code == 204
        kept_live.runner.release()
        last = response.read().split(b"\n\n")[-2]
    assert b"was cancelled" in last
    kept_live.wait_idle()
    assert kept_live.get(path).status_code == 404
    assert kept_live.blocks_used_after_step() <= 1


def test_a_stream_without_a_reader_ends_after_its_time(brief_live: LiveServer) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 900, "stream": True}
    brief_live.runner.hold_after(3)
    with brief_live.client.stream("POST", "/v1/completions", json=body, headers=RESUMABLE) as response:
        brief_live.runner.wait_held()
        path = f"/v1/streams/{response.headers['x-sluice-stream']}"
    for _ in range(200):
        if brief_live.get("/v1/streams/" + "0" * 32).status_code == 404 and not _streams(brief_live).live():
            break
        time.sleep(0.02)
    brief_live.runner.release()
    brief_live.wait_idle()
    assert brief_live.get(path).status_code == 404
    assert brief_live.blocks_used_after_step() <= 1


def test_dropped_events_are_told(kept_live: LiveServer) -> None:
    """A stream of more than its bound keeps its last events, and says which are gone. Log probabilities make it long
    however many tokens an event has."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 900, "ignore_eos": True, "logprobs": 20, "stream": True}
    with kept_live.client.stream("POST", "/v1/completions", json=body, headers=RESUMABLE) as response:
        stream_id = response.headers["x-sluice-stream"]
        num_events = len(response.read().split(b"\n\n")) - 1
    answer = kept_live.get(f"/v1/streams/{stream_id}")
    assert answer.status_code == 404
    assert "are not kept any more" in answer.json()["error"]["message"]
    late = kept_live.get(f"/v1/streams/{stream_id}?starting_after={num_events - 2}")
    assert late.status_code == 200
    assert len(late.content.split(b"\n\n")) == 3


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"x-sluice-resume": "maybe"}, 400, "x-sluice-resume must be true or false, got 'maybe'"),
        ({"last-event-id": "12"}, 400, "last-event-id must be the id of an event of this server"),
        ({"last-event-id": "0" * 32 + ":1"}, 404, "not found"),
        ({"idempotency-key": "x" * 256}, 400, "idempotency-key must be 1 to 255 printable ASCII characters, got 256"),
        ({"idempotency-key": ""}, 400, "idempotency-key must be 1 to 255"),
    ],
)
def test_refusals_name_the_header(kept_live: LiveServer, headers: dict[str, str], status: int, message: str) -> None:
    for path, body in (REQUESTS["completion"], REQUESTS["messages"]):
        answer = kept_live.post(path, body, headers=headers)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]


def test_a_server_that_keeps_no_streams_says_so(live: LiveServer) -> None:
    path, body = REQUESTS["completion"]
    for headers in (RESUMABLE, {"last-event-id": "0" * 32 + ":1"}):
        answer = live.post(path, body, headers=headers)
        assert answer.status_code == 400
        assert "--stream-resume-secs" in answer.json()["error"]["message"]
    assert live.post(path, body, headers={"x-sluice-resume": "false"}).status_code == 200


def test_another_owner_finds_nothing(kept_live: LiveServer) -> None:
    path, body = REQUESTS["completion"]
    answer = kept_live.post(path, body, headers=RESUMABLE | {"authorization": "Bearer mine"})
    stream_id = answer.headers["x-sluice-stream"]
    for key, status in (("mine", 200), ("yours", 404)):
        headers = {"authorization": f"Bearer {key}"}
        assert kept_live.get(f"/v1/streams/{stream_id}", headers=headers).status_code == status
        last = headers | {"last-event-id": f"{stream_id}:1"}
        assert kept_live.post(path, body, headers=last).status_code == status
    assert kept_live.request("DELETE", f"/v1/streams/{stream_id}").status_code == 404
