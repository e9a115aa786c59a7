"""Timelines: where the time of the last requests went, and who may see them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.tracing import TracingOptions
from sluice.gateway.telemetry.tracer import Tracer
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.access.keys import make_key
from sluice.record.spans import TimelineRing, current_span
from sluice.record.timelines import TimelineOwner, Timelines
from tests.gateway.front.http.live import MODEL, LiveServer, live_server

BODY = {"model": MODEL, "prompt": "Hello there", "max_tokens": 5, "ignore_eos": True}


def timeline(live: LiveServer, request_id: str) -> dict[str, Any]:
    answer = live.get(f"/v1/requests/{request_id}/timeline")
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    return dict(answer.json())


def test_the_bars_of_a_request_add_up_to_its_time(live: LiveServer) -> None:
    answer = live.post("/v1/completions", BODY, headers={"x-request-id": "timed"})
    assert answer.status_code == 200
    found = timeline(live, "timed")
    assert (found["object"], found["id"], found["model"], found["is_complete"]) == (
        "request.timeline",
        "timed",
        MODEL,
        True,
    )
    spans = found["spans"]
    names = [each["name"] for each in spans]
    assert names[:3] == ["POST /v1/completions", "receive", "validate"]
    assert names[3:] == [f"text_completion {MODEL}", "tokenize", "queue", "prefill", "decode"]
    assert [each["index"] for each in spans] == list(range(8))
    assert [each["parent"] for each in spans] == [None, 0, 0, 0, 3, 3, 3, 3]
    assert [each["depth"] for each in spans] == [0, 1, 1, 1, 2, 2, 2, 2]
    root = spans[0]
    assert root["start_ms"] == 0 and root["end_ms"] == found["duration_ms"]
    assert all(0 <= each["start_ms"] <= each["end_ms"] <= root["end_ms"] for each in spans)
    assert spans[6]["end_ms"] == spans[7]["start_ms"] == found["time_to_first_token_ms"]
    parts = ("receive", "validate", "tokenize", "queue", "prefill", "decode")
    assert sum(found["totals_ms"][each] for each in parts) <= found["duration_ms"]
    generation = spans[3]["attributes"]
    assert generation["gen_ai.usage.output_tokens"] == 5
    assert generation["sluice.detokenize_ms"] >= 0


def test_an_open_request_has_a_timeline_so_far(live: LiveServer) -> None:
    live.wait_idle()
    live.runner.hold_after(1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.post, "/v1/completions", BODY, headers={"x-request-id": "open"})
        live.runner.wait_held()
        found = timeline(live, "open")
        live.runner.release()
        assert asked.result().status_code == 200
    assert (found["is_complete"], found["duration_ms"], found["spans"][0]["end_ms"]) == (False, None, None)
    assert timeline(live, "open")["is_complete"]


def test_the_last_requests_are_listed_the_newest_first(live: LiveServer) -> None:
    for number in range(3):
        live.post("/v1/completions", BODY, headers={"x-request-id": f"listed-{number}"})
    answer = live.get("/v1/requests", params={"limit": 2}).json()
    assert [each["id"] for each in answer["data"]] == ["listed-2", "listed-1"]
    assert answer["total"] >= 3 and answer["data"][0]["duration_ms"] > 0
    assert live.get("/v1/requests", params={"model": "other"}).json()["data"] == []


def test_an_unknown_request_is_named(live: LiveServer) -> None:
    answer = live.get("/v1/requests/nobody/timeline")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "id" and "--timeline-requests" in answer.json()["error"]["message"]


def test_a_server_may_keep_none() -> None:
    with live_server(ServeConfig(tracing=TracingOptions(num_timelines=0))) as live:
        assert live.post("/v1/completions", BODY).status_code == 200
        answer = live.get("/v1/requests/x/timeline")
    assert answer.status_code == 501 and "--timeline-requests 0" in answer.json()["error"]["message"]


async def test_a_key_sees_its_own_requests_alone_and_the_ring_is_bounded() -> None:
    ring = TimelineRing(2)
    tracer, mine, other = Tracer(ring), TimelineOwner("1", "mine"), TimelineOwner("2", "other")
    for name, owner in (("a", mine), ("b", mine), ("c", other)):
        root = tracer.open("r", name, {})
        assert root is not None
        root.recording.owner = tuple(owner)
        ring.keep(root.recording)
    current_span.set(None)
    timelines = Timelines(ring)
    assert [each.id for each in await timelines.find("", None)] == ["b", "c"]
    assert [each.id for each in await timelines.find("", mine)] == ["b"]
    assert await timelines.find("c", mine) == await timelines.find("a", mine) == []
    assert [each.id for each in await timelines.find("c", other)] == ["c"]


def test_who_may_see_a_timeline_over_http() -> None:
    group = frozenset({RouteGroup.INFERENCE})
    keys = {name: make_key(Identity(name=name, groups=group)) for name in ("mine", "other")}
    keys["admin"] = make_key(Identity(name="admin", groups=frozenset({RouteGroup.ADMIN})))
    headers = {name: {"authorization": f"Bearer {key.text}"} for name, key in keys.items()}
    with live_server() as live:
        live.server.accounts.calls.access.ring.keep(each.stored for each in keys.values())
        live.post("/v1/completions", BODY, headers={**headers["mine"], "x-request-id": "mine"})
        path = "/v1/requests/mine/timeline"
        statuses = {name: live.get(path, headers=sent).status_code for name, sent in headers.items()}
        assert statuses == {"mine": 200, "other": 404, "admin": 200}
        assert live.get(path).status_code == 401
