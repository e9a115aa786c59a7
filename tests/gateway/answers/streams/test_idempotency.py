"""Requests with an idempotency key are answered once, however often they come."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any

import httpx
import pytest

from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.streams import ResumeOptions
from tests.gateway.front.http.live import MODEL, LiveServer, live_server
from tests.waiting import PATIENCE_S

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "One two", "max_tokens": 6}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
BODIES: dict[str, dict[str, Any]] = {
    PATH: BODY,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 20},
    "/api/chat": {"model": MODEL, "messages": CHAT["messages"], "options": {"num_predict": 6}},
}


@pytest.fixture
def key() -> dict[str, str]:
    return {"idempotency-key": token_hex(8)}


def num_answers(live: LiveServer) -> int:
    return int(sum(live.model.activity.prompt_lengths.counts))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_retry_gets_the_first_answer(live: LiveServer, key: dict[str, str], path: str, is_streamed: bool) -> None:
    before = num_answers(live)
    first, second = (live.post(path, BODIES[path] | {"stream": is_streamed}, headers=key) for _ in range(2))
    assert first.status_code == second.status_code == 200
    assert first.content == second.content
    assert first.headers["content-type"] == second.headers["content-type"]
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert b"id: " not in first.content
    assert num_answers(live) == before + 1


def test_requests_at_the_same_time_share_one_answer(live: LiveServer, key: dict[str, str]) -> None:
    before = num_answers(live)
    live.runner.hold_after(2)
    with ThreadPoolExecutor(4) as pool:
        posts = [pool.submit(httpx.post, live.url + PATH, json=BODY, headers=key, timeout=30) for _ in range(4)]
        live.runner.wait_held()
        live.runner.release()
        answers = [each.result(PATIENCE_S) for each in posts]
    assert len({each.content for each in answers}) == 1
    assert sorted(each.headers.get("idempotent-replayed", "") for each in answers) == ["", "true", "true", "true"]
    assert num_answers(live) == before + 1


def test_the_answer_is_there_for_a_client_that_was_cut_off(live: LiveServer, key: dict[str, str]) -> None:
    live.runner.hold_after(2)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.url + PATH, json=BODY, headers=key, timeout=0.3)
    live.runner.release()
    answer = live.post(PATH, BODY, headers=key)
    assert answer.headers["idempotent-replayed"] == "true"
    assert answer.json()["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(("path", "place"), [(PATH, "error"), ("/v1/messages", "error"), ("/api/chat", None)])
def test_a_key_belongs_to_one_request(live: LiveServer, key: dict[str, str], path: str, place: str | None) -> None:
    """Another body under the key is refused in the shape of the protocol; another owner's key is another key."""
    assert live.post(PATH, BODY, headers=key).status_code == 200
    answer = live.post(path, BODIES[path] | {"seed": 3}, headers=key)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert "came with another request before" in (error["message"] if place else error)
    other = live.post(PATH, BODY | {"seed": 3}, headers=key | {"authorization": "Bearer other"})
    assert other.status_code == 200
    assert "idempotent-replayed" not in other.headers


def test_a_refusal_and_a_failure_are_not_kept(live: LiveServer, key: dict[str, str]) -> None:
    assert live.post(PATH, BODY | {"max_tokens": 0}, headers=key).status_code == 400
    live.runner.error = RuntimeError("a broken step")
    try:
        assert live.post(PATH, BODY, headers=key).status_code == 500
        failed = live.post(PATH, BODY | {"stream": True}, headers={"idempotency-key": key["idempotency-key"] + "s"})
        assert failed.status_code == 500
    finally:
        live.runner.error = None
    answer = live.post(PATH, BODY, headers=key)
    assert answer.status_code == 200
    assert "idempotent-replayed" not in answer.headers


@pytest.fixture(scope="module")
def unkeyed_live() -> Iterator[LiveServer]:
    """A server without idempotency keys."""
    with live_server(ServeConfig(streams=ResumeOptions(idempotency_s=0.0))) as running:
        yield running


def test_without_a_time_the_header_does_nothing(unkeyed_live: LiveServer, key: dict[str, str]) -> None:
    answers = [unkeyed_live.post(PATH, BODY, headers=key) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 200]
    assert all("idempotent-replayed" not in each.headers for each in answers)
