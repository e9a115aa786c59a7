"""Streams that end badly, and streams that curl reads."""

import json
import subprocess
from typing import Any

from sluice.errors import ErrorCode, SluiceError
from tests.gateway.front.http.live import LiveServer
from tests.gateway.front.http.sse import events_of
from tests.waiting import PATIENCE_S

BODY: dict[str, Any] = {"model": "rill", "prompt": "a", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
PATH = "/v1/completions"


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


def test_a_client_that_leaves_frees_the_blocks_of_several_prompts_within_a_step(live: LiveServer) -> None:
    live.runner.hold_after(4)
    with live.client.stream("POST", PATH, json=BODY | {"prompt": ["a", "b", "c"], "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert live.server.plane.num_open >= 1
    live.wait_idle()
    num_runs = live.runner.num_runs
    live.runner.release()
    assert live.blocks_used_after_step() == 0
    # The step that was held, and the small request's own.
    assert live.runner.num_runs - num_runs <= 2


def test_aborted_streams_say_why(live: LiveServer) -> None:
    async def abort() -> None:
        await live.server.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down"))

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
