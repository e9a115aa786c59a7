"""Streams that end badly, and streams that curl reads."""

import json
import subprocess
from typing import Any

import pytest

from sluice.errors import ErrorCode, SluiceError
from tests.gateway.http.live import LiveServer, live_server
from tests.gateway.http.sse import events_of
from tests.waiting import PATIENCE_S

BODY: dict[str, Any] = {"model": "rill", "prompt": "a", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
PATH = "/v1/completions"
CHAT: dict[str, Any] = {
    "model": "rill",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 500,
    "ignore_eos": True,
}


def test_curl_reads_events(live: LiveServer) -> None:
    body = json.dumps(BODY | {"max_tokens": 5, "stream": True})
    command = ["curl", "-sS", "-N", "-i", "--max-time", "20", f"{live.url}{PATH}", "-d", body]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True)
    head, _, stream = done.stdout.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: text/event-stream; charset=utf-8" in head
    *chunks, end = events_of(stream)
    assert end == "[DONE]"
    ids = live.run(live.model.prepare("a"))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == live.echo(ids, 5)


@pytest.mark.parametrize(
    ("path", "body", "num_events"),
    [(PATH, BODY, 3), (PATH, BODY | {"prompt": ["a", "b", "c"]}, 3), ("/v1/chat/completions", CHAT, 3)],
    ids=["completion", "three prompts", "chat"],
)
def test_a_client_that_leaves_frees_its_blocks_within_a_step(
    live: LiveServer, path: str, body: dict[str, Any], num_events: int
) -> None:
    live.runner.hold_after(4)
    with live.client.stream("POST", path, json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(2 * num_events):
            next(lines)
        assert live.service.num_open >= 1
    live.wait_idle()
    num_runs = live.runner.num_runs
    live.runner.release()
    assert live.blocks_used_after_step() == 0
    # The step that was held, and the small request's own.
    assert live.runner.num_runs - num_runs <= 2


@pytest.mark.parametrize(("stream", "num_runs"), [(False, 0), (False, 3), (True, 0)])
def test_a_client_that_leaves_before_the_first_byte_frees_its_blocks(
    live: LiveServer, stream: bool, num_runs: int
) -> None:
    live.runner.hold_after(num_runs)
    with live.send(PATH, BODY | {"stream": stream}):
        live.runner.wait_held()
        assert live.service.num_open == 1
    live.wait_idle()
    num_runs = live.runner.num_runs
    live.runner.release()
    assert live.blocks_used_after_step() == 0
    assert live.runner.num_runs - num_runs <= 2


@pytest.mark.parametrize("path_and_body", [(PATH, BODY), ("/v1/chat/completions", CHAT)], ids=["completion", "chat"])
def test_a_stream_that_fails_ends_in_an_error_event_and_not_in_done(path_and_body: tuple[str, dict[str, Any]]) -> None:
    path, body = path_and_body
    with live_server() as live:
        live.runner.hold_after(3)
        with live.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200
            chunks = response.iter_raw()
            content = next(chunks)
            live.runner.error = RuntimeError("the kernel broke")
            live.runner.release()
            content += b"".join(chunks)
    *_, before, last = events_of(content)
    assert before["choices"][0]["finish_reason"] is None
    assert last.keys() == {"error"}
    assert last["error"].keys() == {"message", "type", "param", "code"}
    assert b"[DONE]" not in content
    assert b"Traceback" not in content


def test_aborted_streams_say_why(live: LiveServer) -> None:
    async def abort() -> None:
        await live.service.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down"))

    live.runner.hold_after(3)
    with live.client.stream("POST", PATH, json=BODY | {"stream": True}) as response:
        chunks = response.iter_raw()
        content = next(chunks)
        live.run(abort())
        content += b"".join(chunks)
    live.runner.release()
    last = events_of(content)[-1]
    assert last["error"]["message"] == "the server is shutting down"
    assert last["error"]["type"] == "service_unavailable_error"


def test_a_failure_before_the_first_token_is_an_ordinary_answer() -> None:
    with live_server() as live:
        live.runner.error = RuntimeError("the kernel broke")
        response = live.post(PATH, BODY | {"stream": True})
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["type"] == "server_error"
