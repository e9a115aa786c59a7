"""The list of open generations, and the end of one, over a runner that stands still."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sluice.gateway.front.http.access import find_place
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.config import ServeConfig
from tests.gateway.front.http.live import MODEL, LiveServer, live_server
from tests.gateway.front.http.sse import events_of
from tests.waiting import wait_for

PATH = "/v1/admin/requests"
LONG = {"model": MODEL, "prompt": "Hello there", "max_tokens": 50, "ignore_eos": True}
CANCELLED = "the request was cancelled by an administrator"


class Clients:
    """Sends requests of which the answers come later."""

    def __init__(self, live: LiveServer, pool: ThreadPoolExecutor) -> None:
        self.live = live
        self._pool = pool

    def post(self, path: str, body: dict[str, Any], **headers: str) -> "Future[httpx.Response]":
        return self._pool.submit(self.live.post, path, body, headers=headers)

    def listed(self, number: int | None = None, **query: Any) -> list[dict[str, Any]]:
        """Return the listed generations, as soon as there are `number` of them."""

        def look() -> list[dict[str, Any]]:
            answer = self.live.get(PATH, params=query)
            assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
            return list(answer.json()["data"])

        return wait_for(look, lambda rows: number in (None, len(rows)))

    def cancel(self, id_: str) -> httpx.Response:
        return self.live.post(f"{PATH}/{id_}/cancel")


@pytest.fixture
def clients(live: LiveServer) -> Iterator[Clients]:
    """Clients of a server whose runner stands still as soon as one sequence has a token."""
    live.wait_idle()
    live.runner.hold_after(1)
    with ThreadPoolExecutor(8) as pool:
        yield Clients(live, pool)
        live.runner.release()
    live.wait_idle()


def test_what_runs_and_what_waits_is_listed(clients: Clients) -> None:
    first = clients.post("/v1/completions", LONG, **{"x-request-id": "first"})
    clients.live.runner.wait_held()
    clients.listed(1)
    second = clients.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
    rows = clients.listed(2)
    assert [(each["model"], each["state"], each["generated_tokens"]) for each in rows] == [
        (MODEL, "running", 1),
        (MODEL, "waiting", 0),
    ]
    own = rows[0]
    assert (own["request_id"], own["max_tokens"], own["replica"], own["worker"]) == ("first", 50, "", 0)
    assert own["prompt_tokens"] > 0 and own["age_s"] >= rows[1]["age_s"] >= 0
    one = clients.live.get(PATH, params={"limit": 1}).json()
    assert (len(one["data"]), one["data"][0]["id"], one["total"]) == (1, own["id"], 2)
    assert clients.listed(model="other") == clients.listed(tenant="other") == []
    assert len(clients.listed(tenant="")) == 2
    clients.live.runner.release()
    assert first.result().json()["usage"]["completion_tokens"] == 50
    assert second.result().status_code == 200
    assert clients.listed() == []


def test_a_cancelled_request_ends_in_an_error_and_others_go_on(clients: Clients) -> None:
    running = clients.post("/v1/completions", LONG | {"stream": True})
    clients.live.runner.wait_held()
    waiting = clients.post("/v1/completions", LONG | {"max_tokens": 2})
    other = clients.post("/v1/completions", LONG | {"max_tokens": 3})
    rows = {each["max_tokens"]: each["id"] for each in clients.listed(3)}
    assert clients.cancel(rows[50]).json() == {"object": "request.cancelled", "id": rows[50], "num_cancelled": 1}
    assert clients.cancel(rows[2]).status_code == 200
    assert [each["id"] for each in clients.listed(1)] == [rows[3]]
    assert clients.cancel(rows[50]).status_code == 404
    assert waiting.result().status_code == 499
    assert waiting.result().json()["error"] == {
        "message": CANCELLED,
        "type": "server_error",
        "param": None,
        "code": "request_cancelled",
    }
    assert events_of(running.result().content)[-1]["error"]["message"] == CANCELLED
    clients.live.runner.release()
    assert other.result().json()["usage"]["completion_tokens"] == 3
    clients.live.wait_idle()
    assert clients.live.blocks_used_after_step() == 0


def test_a_request_id_ends_all_answers_of_the_request(clients: Clients) -> None:
    several = clients.post("/v1/completions", LONG | {"n": 3, "temperature": 1}, **{"x-request-id": "three"})
    assert {each["request_id"] for each in clients.listed(3)} == {"three"}
    assert clients.cancel("three").json()["num_cancelled"] == 3
    assert several.result().status_code == 499


def test_the_v2_protocol_says_it_too(clients: Clients) -> None:
    body = {"text_input": "Hello", "max_tokens": 9, "ignore_eos": True}
    answer = clients.post(f"/v2/models/{MODEL}/generate", body)
    assert clients.cancel(clients.listed(1)[0]["id"]).status_code == 200
    assert answer.result().json() == {"error": CANCELLED}


@pytest.mark.parametrize("path", [f"{PATH}/gen-0/cancel", f"{PATH}/{'x' * 500}/cancel"])
def test_an_unknown_id_is_named(live: LiveServer, path: str) -> None:
    answer = live.post(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "id" and "no open request" in answer.json()["error"]["message"]


def test_a_limit_out_of_range_is_refused(live: LiveServer) -> None:
    answer = live.get(PATH, params={"limit": 0})
    assert answer.status_code == 400 and "limit" in answer.json()["error"]["message"]


def test_administrators_alone_see_and_cancel() -> None:
    assert find_place(PATH).group == find_place(f"{PATH}/x/cancel").group == "admin"
    with live_server(ServeConfig(access=AccessOptions(api_key="sesame"))) as live:
        assert live.get(PATH).status_code == 401
        assert live.post(f"{PATH}/x/cancel").status_code == 401
        assert live.get(PATH, headers={"authorization": "Bearer sesame"}).status_code == 200
