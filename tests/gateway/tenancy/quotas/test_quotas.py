"""Limits as clients of every protocol meet them, on a real server."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import generate_latest
from websockets.sync.client import connect

from sluice.gateway.tenancy.access.identity import QuotaLimits, RouteGroup
from sluice.gateway.tenancy.accounts import limit_use
from sluice.gateway.tenancy.quotas.store import MemoryQuotas
from tests.clock import ManualClock
from tests.gateway.front.http.live import MODEL, live_server
from tests.gateway.tenancy.access.test_access import Keys
from tests.gateway.tenancy.quotas.test_account import START
from tests.waiting import PATIENCE_S, wait_for

DEFAULTS = QuotaLimits(requests_per_minute=1000)
BODY = {"model": MODEL, "prompt": [5, 6], "max_tokens": 8, "temperature": 0}
"""Ten tokens at most."""
Header = dict[str, str]


@dataclass(frozen=True)
class Limited:
    """A server with limits whose clock the tests set."""

    keys: Keys
    clock: ManualClock[int]

    def make(self, **limits: Any) -> Header:
        """Return the header of a new key with these limits."""
        return self.keys.make(limits=QuotaLimits(**limits))

    def post(self, header: Header, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        answer = self.keys.live.post(path, {**BODY, **body}, headers=header)
        self.keys.live.wait_idle()
        return answer

    def set_tenant(self, name: str, **limits: Any) -> None:
        access = self.keys.access
        self.keys.live.run(self.keys.store.set_tenant(name, QuotaLimits(**limits)))
        self.keys.live.run(access.ring.refresh())


@pytest.fixture(scope="module")
def limited() -> Iterator[Limited]:
    with live_server() as live:
        clock = ManualClock(START)

        async def start() -> None:
            limit_use(live.server.rooms, live.server.accounts.calls, MemoryQuotas(clock), DEFAULTS)

        live.run(start())
        yield Limited(Keys(live), clock)


def test_a_stock_client_is_refused_and_admitted_after_retry_after(limited: Limited) -> None:
    header = limited.make(requests_per_minute=2)
    key = header["authorization"].removeprefix("Bearer ")
    with openai.OpenAI(base_url=f"{limited.keys.live.url}/v1", api_key=key, max_retries=0) as client:
        for left in (1, 0):
            answer = client.completions.with_raw_response.create(**BODY)  # type: ignore[call-overload]
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"] == "1m0s"
        with pytest.raises(
            openai.RateLimitError, match=r"limited to 2 requests per minute; 1 asked, 0 left"
        ) as refused:
            client.completions.create(**BODY)  # type: ignore[call-overload]
        wait_s = int(refused.value.response.headers["retry-after"])
        assert wait_s == 30
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        limited.clock.now += wait_s * 1000
        client.completions.create(**BODY)  # type: ignore[call-overload]


def test_each_message_of_a_websocket_is_a_request(limited: Limited) -> None:
    header = limited.make(requests_per_minute=2)
    event = {"type": "response.create", "model": MODEL, "input": "a", "max_output_tokens": 1, "store": False}
    url = f"ws{limited.keys.live.url.removeprefix('http')}/v1/responses"
    with connect(url, additional_headers=header) as connection:
        for expected in ("response.incomplete", "response.incomplete", "error"):
            connection.send(json.dumps(event))
            while (last := json.loads(connection.recv(PATIENCE_S)))["type"] not in ("error", "response.incomplete"):
                pass
            assert last["type"] == expected, last
        assert (last["status"], last["error"]["headers"]["retry-after"]) == (429, "30")
        limited.keys.revoke(f"key-{limited.keys._num_made}")
        connection.send(json.dumps(event))
        assert json.loads(connection.recv(PATIENCE_S))["status"] == 401


def test_a_request_of_more_than_a_limit_is_never_tried_again(limited: Limited) -> None:
    header = limited.make(tokens_per_day=9, requests_per_minute=5)
    refused = limited.post(header)
    assert refused.status_code == 429
    assert "retry-after" not in refused.headers
    assert refused.headers["x-should-retry"] == "false"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    message = error["message"]
    assert "limited to 9 tokens a day; 10 asked: 2 of the prompt and up to 8 of the answer, 9 left" in message
    assert limited.post(header, n=2, max_tokens=1).status_code == 200
    assert "x-should-retry" not in limited.post(header, n=2, max_tokens=2).headers


def test_keys_without_limits_have_the_default_and_reading_costs_nothing(limited: Limited) -> None:
    header = limited.keys.make()
    assert limited.post(header).headers["x-ratelimit-remaining-requests"] == "999"
    assert not [name for name in limited.keys.live.get("/v1/models", headers=header).headers if "ratelimit" in name]
    assert limited.post(header).headers["x-ratelimit-remaining-requests"] == "998"


@pytest.mark.parametrize(
    ("limit", "num_steps", "message"),
    [("concurrent_requests", 1, "1 requests at a time"), ("queued_requests", 0, "1 waiting requests")],
)
def test_open_and_waiting_requests_are_limited(limited: Limited, limit: str, num_steps: int, message: str) -> None:
    live, header = limited.keys.live, limited.make(**{limit: 1})
    live.runner.hold_after(num_steps)
    try:
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(httpx.post, f"{live.url}/v1/completions", json=BODY, headers=header)
            live.runner.wait_held()
            refused = live.post("/v1/completions", BODY, headers=header)
            live.runner.release()
            assert first.result(PATIENCE_S).status_code == 200
    finally:
        live.runner.release()
    assert (refused.status_code, "retry-after" in refused.headers) == (429, False)
    assert refused.json()["error"]["message"].endswith(f"may have {message}, and has them")
    assert limited.post(header).status_code == 200


def test_a_stream_that_is_cut_gives_back_what_it_did_not_use(limited: Limited) -> None:
    live, header = limited.keys.live, limited.make(tokens_per_day=1000, concurrent_requests=1)
    live.runner.hold_after(2)
    try:
        with httpx.stream(
            "POST", f"{live.url}/v1/completions", json={**BODY, "max_tokens": 900, "stream": True}, headers=header
        ) as stream:
            assert stream.headers["x-ratelimit-remaining-tokens"] == "98"
            live.runner.wait_held()
    finally:
        live.runner.release()
    live.wait_idle()
    assert 900 < int(limited.post(header).headers["x-ratelimit-remaining-tokens"]) < 988


def test_refusals_and_levels_are_metrics(limited: Limited) -> None:
    limited.set_tenant("measured", tokens_per_day=40)
    header = limited.keys.make(tenant="measured")
    assert limited.post(header).status_code == 200
    assert limited.post(header, max_tokens=39).status_code == 429
    page = generate_latest(limited.keys.live.server.metrics.registry).decode()
    assert 'sluice_quota_refusals_total{limit="tokens_per_day",scope="tenant",tenant="measured"} 1.0' in page
    assert 'sluice_quota_used_ratio{limit="tokens_per_day",name="measured",scope="tenant"} 0.25' in page
    assert "sluice_quota_store_up 1.0" in page


def test_tenants_are_set_over_the_admin_api(limited: Limited) -> None:
    live = limited.keys.live
    admin = limited.keys.make(groups=frozenset({RouteGroup.ADMIN}))
    body = {"limits": {"tokens_per_day": 10}}
    for header, status in ((limited.keys.make(groups=frozenset({RouteGroup.INFERENCE})), 403), (admin, 200)):
        assert live.request("PUT", "/v1/admin/tenants/lab", json=body, headers=header).status_code == status
    assert {"object": "tenant", "name": "lab", **body} in live.get("/v1/admin/tenants", headers=admin).json()["data"]
    member = limited.keys.make(tenant="lab")
    answers = [limited.post(member) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 429]
    wrong: dict[str, Any]
    for wrong, param in (
        ({"limits": {"tokens": 1}}, "limits"),
        ({"limits": {"tokens_per_day": -1}}, "limits.tokens_per_day"),
        ({"limits": {}, "limit": {}}, "body"),
    ):
        answer = live.request("PUT", "/v1/admin/tenants/lab", json=wrong, headers=admin)
        assert (answer.status_code, answer.json()["error"]["param"][: len(param)]) == (400, param), wrong
    live.request("PUT", "/v1/admin/tenants/lab", json={"limits": {}}, headers=admin)
    assert limited.post(member).status_code == 200


def test_a_line_of_a_batch_that_never_fits_ends(limited: Limited) -> None:
    key = limited.make(tokens_per_minute=100)["authorization"].removeprefix("Bearer ")
    lines = [{"custom_id": str(most), "method": "POST", "url": "/v1/completions"} for most in (5, 500)]
    for line in lines:
        line["body"] = {**BODY, "max_tokens": int(line["custom_id"])}  # type: ignore[assignment]
    content = b"\n".join(json.dumps(line).encode() for line in lines)
    with openai.OpenAI(base_url=f"{limited.keys.live.url}/v1", api_key=key, max_retries=0) as client:
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        batch = wait_for(lambda: client.batches.retrieve(batch.id), lambda each: each.status == "completed")
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        assert batch.error_file_id is not None
        assert "One request may not ask for more than the whole limit" in client.files.content(batch.error_file_id).text
