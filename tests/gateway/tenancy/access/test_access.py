"""What keys may do, on real servers of both protocols."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from sluice.engine.config import EngineConfig
from sluice.gateway.answers.batches.line_run import RouteAnswers
from sluice.gateway.api.app import make_guard
from sluice.gateway.calls import CallLog, current_identity
from sluice.gateway.front.http.guard import RequestTracing
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.tracer import Tracer
from sluice.gateway.tenancy.access.control import AccessControl
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.access.keys import make_key, revoke_key
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.record.spans import TimelineRing, current_span
from tests.engine.capable import CapableEngine
from tests.gateway.front.http.live import MODEL, LiveServer, live_server


class Keys:
    """Makes keys of a running server, and sends requests with them."""

    def __init__(self, live: LiveServer) -> None:
        self.live = live
        self.access = live.server.accounts.calls.access
        store = self.access.ring.store
        assert store is not None
        self.store = store
        self._num_made = 0

    def make(self, **fields: Any) -> dict[str, str]:
        """Return the header with a new key."""
        self._num_made += 1
        new = make_key(Identity(**{"name": f"key-{self._num_made}", **fields}))
        self.live.run(self.store.add(new.stored))
        self.live.run(self.access.ring.refresh())
        return {"authorization": f"Bearer {new.text}"}

    def revoke(self, name: str) -> None:
        self.live.run(self.store.change(name, revoke_key))
        self.live.run(self.access.ring.refresh())


@pytest.fixture(scope="module")
def keys() -> Iterator[Keys]:
    engine = EngineConfig(model_path="none", lora_modules={"polite": "/adapters/polite"})
    with live_server(engine_config=engine, engine_class=CapableEngine, on_port=True) as live:
        assert live.get("/v1/models").status_code == 200, "without a key nobody is asked for one"
        assert live.post("/v1/admin/keys", {"name": "mine"}).status_code == 403
        found = Keys(live)
        found.make(name="first")
        yield found


ALL = frozenset([*RouteGroup])
COMPLETION = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2}


def test_models_are_globs_and_lists_show_only_them(keys: Keys) -> None:
    header = keys.make(name="other", models=("gpt-*",), groups=ALL)
    refused = keys.live.post("/v1/completions", COMPLETION, headers=header)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
    assert refused.json()["error"]["message"] == "key 'other' may not use model 'rill'"
    assert keys.live.get("/v1/models", headers=header).json()["data"] == []
    assert keys.live.get("/", headers=header).json()["models"] == []
    assert keys.live.post("/v2/repository/index", {}, headers=header).json() == []
    assert keys.live.get("/api/tags", headers=header).json()["models"] == []
    refused = keys.live.post(f"/v2/models/{MODEL}/generate", {"text_input": "a"}, headers=header)
    assert (refused.status_code, list(refused.json())) == (403, ["error"])
    mine = keys.make(models=("ri*",), groups=ALL)
    assert keys.live.get("/v1/models", headers=mine).json()["data"][0]["id"] == MODEL
    assert len(keys.live.post("/v2/repository/index", {}, headers=mine).json()) == 3


@pytest.mark.parametrize(("priority", "status"), [(5, 200), (10, 200), (4, 400), (11, 400), (None, 200)])
def test_priorities_outside_a_key_s_range_are_refused(keys: Keys, priority: int | None, status: int) -> None:
    header = keys.make(priorities=(5, 10))
    sent = {} if priority is None else {"x-sluice-priority": str(priority)}
    answers = [
        keys.live.post("/v1/completions", COMPLETION, headers=header | sent),
        keys.live.post(f"/v2/models/{MODEL}/generate", {"text_input": "a", "max_tokens": 1}, headers=header | sent),
    ]
    assert [each.status_code for each in answers] == [status, status]
    if status == 400:
        assert all("priority must be from 5 to 10" in each.text for each in answers)


def test_adapters_are_globs_whichever_way_they_are_named(keys: Keys) -> None:
    header = keys.make(adapters=("fr*",), groups=ALL)
    listed = keys.live.get("/v1/models", headers=header).json()["data"]
    assert [each["id"] for each in listed] == ["rill", "rill:french"]
    rows = keys.live.post("/v2/repository/index", {}, headers=header).json()
    assert [each["name"] for each in rows] == ["rill", "rill:french"]
    for name, status in (("rill:french", 200), ("french", 200), ("rill:polite", 403), ("polite", 403)):
        answer = keys.live.post("/v1/completions", COMPLETION | {"model": name}, headers=header)
        assert answer.status_code == status, answer.text
    body = {"text_input": "a", "max_tokens": 1, "lora_name": "polite"}
    refused = keys.live.post(f"/v2/models/{MODEL}/generate", body, headers=header)
    assert (refused.status_code, "may not use adapter 'polite'" in refused.text) == (403, True)
    allowed = keys.live.post(f"/v2/models/{MODEL}/generate", body | {"lora_name": "french"}, headers=header)
    assert allowed.status_code == 200
    only = keys.make(models=("rill:*",))
    assert keys.live.get("/v1/models", headers=only).json()["data"] == []


def test_the_engine_gets_tenant_and_weight(keys: Keys) -> None:
    for fields, expected in (({"tenant": "t", "weight": 2.5}, ("t", 2.5)), ({"name": "plain"}, ("plain", None))):
        header = keys.make(**fields)
        for path, body in (
            ("/v1/completions", COMPLETION),
            (f"/v2/models/{MODEL}/generate", {"text_input": "a", "max_tokens": 1}),
        ):
            assert keys.live.post(path, body, headers=header).status_code == 200
            asked = keys.live.engine.asked  # type: ignore[attr-defined]
            assert (asked.tenant, asked.weight) == expected


def test_stored_things_belong_to_the_tenant_or_else_to_the_key(keys: Keys) -> None:
    one, two, other = (keys.make(tenant=each) for each in ("a", "a", "b"))
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 16}
    stored = keys.live.post("/v1/responses", body, headers=one).json()["id"]
    found = [keys.live.get(f"/v1/responses/{stored}", headers=each).status_code for each in (one, two, other)]
    assert found == [200, 200, 404]


def test_the_admin_api(keys: Keys) -> None:
    admin, plain = keys.make(groups=ALL), keys.make()
    path = "/v1/admin/keys"
    assert keys.live.post(path, {"name": "mine"}, headers=plain).status_code == 403
    fields = {"name": "made", "priorities": [0, 5], "limits": {"requests_per_minute": 5}, "groups": ["inference"]}
    made = keys.live.post(path, fields, headers=admin)
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    assert made.json()["limits"] == {"requests_per_minute": 5}
    header = {"authorization": f"Bearer {made.json()['key']}"}
    assert keys.live.post("/v1/completions", COMPLETION, headers=header).status_code == 200
    assert keys.live.post(path, {"name": "x", "expire_at": 5}, headers=admin).status_code == 400
    assert keys.live.post(path, {"name": "made"}, headers=admin).status_code == 409
    changes = {"models": ["other*"], "limits": {"requests_per_minute": None, "tokens_per_day": 9}}
    assert keys.live.request("PATCH", f"{path}/made", json=changes, headers=plain).status_code == 403
    changed = keys.live.request("PATCH", f"{path}/made", json=changes, headers=admin).json()
    assert (changed["models"], changed["limits"]) == (["other*"], {"tokens_per_day": 9})
    assert changed["priorities"] == [0, 5]
    assert keys.live.post("/v1/completions", COMPLETION, headers=header).status_code == 403
    wrong = keys.live.request("PATCH", f"{path}/made", json={"weight": -1}, headers=admin)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "weight")
    rotated = keys.live.post(f"{path}/made/rotate?grace_s=0", headers=admin).json()["key"]
    assert keys.live.get("/v1/models", headers=header).status_code == 401
    header = {"authorization": f"Bearer {rotated}"}
    assert keys.live.get("/v1/models", headers=header).status_code == 200
    listed = keys.live.get(path, headers=admin)
    assert "made" in {each["name"] for each in listed.json()["data"]}
    assert rotated not in listed.text
    assert keys.live.request("DELETE", f"{path}/made", headers=admin).json()["state"] == "revoked"
    assert keys.live.get("/v1/models", headers=header).status_code == 401
    assert keys.live.get(f"{path}/made", headers=admin).status_code == 404


async def test_work_that_goes_on_ends_with_its_key() -> None:
    new = make_key(Identity(name="ci", groups=frozenset({RouteGroup.INFERENCE})))
    ring = KeyRing(None)
    ring.keep([new.stored])
    calls = CallLog(AccessControl(ring))
    statuses = []

    async def handle(request: Request) -> Response:
        assert current_identity() is sender
        assert current_span.get() is not None
        return Response(await request.body())

    urls = ("/v1/completions", "/v1/embeddings")
    tracing = RequestTracing(Tracer(TimelineRing(8)), lambda name: ())
    answer = RouteAnswers(make_guard(GatewayMetrics(), calls, tracing=tracing), dict.fromkeys(urls, handle))
    sender = new.stored.identity
    for url in urls:
        statuses.append((await answer(url, b"{}", request_id="1", tenant="", sender=sender)).status)
        assert current_span.get() is None, "the next request of this task is another one"
    ring.keep([revoke_key(new.stored)])
    refused = await answer("/v1/completions", b"{}", request_id="1", tenant="", sender=sender)
    assert [*statuses, refused.status] == [200, 403, 401]
    assert b"is revoked or has expired" in refused.body
