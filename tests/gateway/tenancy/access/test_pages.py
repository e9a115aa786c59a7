"""What web pages may ask of a server that asks nobody for a key: those of strangers nothing, its own everything."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sluice.gateway.api.app import create_metrics_app
from sluice.gateway.calls import CallLog
from sluice.gateway.front.http.access import PageGuard
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.config import ServeConfig, read_config
from sluice.gateway.options.option import OptionError
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.tenancy.access.control import AccessControl
from sluice.gateway.tenancy.access.ring import KeyRing
from tests.gateway.front.http.live import MODEL, LiveServer, live_server

HERE, OURS, THEIRS = "127.0.0.1:8000", "https://app.example.com", "https://evil.example"
SAID = "this server asks nobody for a key, so it refuses other web pages"
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
GUARD = PageGuard(CallLog())
NAMED = PageGuard(CallLog(), origins=(OURS,), hosts=("llm.example.com", "*.internal.example"))
LISTENS = PageGuard(CallLog(), host="box.example.com")
FOR_ALL = PageGuard(CallLog(), origins=("*",))
WITH_KEYS = PageGuard(CallLog(AccessControl(KeyRing(None, "sesame"))))


def is_let_in(guard: PageGuard, method: str, headers: dict[str, str], peer: str = "127.0.0.1") -> bool:
    sent = {name.encode(): value.encode() for name, value in ({"host": HERE} | headers).items()}
    refusal = guard.find_refusal(method, sent, peer)
    assert refusal is None or refusal.message.startswith(SAID)
    return refusal is None


@pytest.mark.parametrize(
    ("guard", "method", "headers"),
    [
        *((GUARD, "POST", {"origin": each}) for each in (THEIRS, "null", "http://127.0.0.1:1")),
        *((GUARD, "POST", {"sec-fetch-site": each}) for each in ("cross-site", "same-site")),
        *((GUARD, "GET", {"host": each}) for each in ("evil.example:8000", "127.0.0.1.evil.example", "evil.example.")),
        (GUARD, "POST", LINK),
        (GUARD, "GET", LINK | {"sec-fetch-dest": "iframe"}),
        (NAMED, "POST", {"origin": THEIRS}),
        (NAMED, "POST", {"host": "other.example.com"}),
    ],
)
def test_strangers_pages_and_names_that_lead_here_are_refused(
    guard: PageGuard, method: str, headers: dict[str, str]
) -> None:
    assert not is_let_in(guard, method, headers)


@pytest.mark.parametrize(
    ("guard", "method", "headers"),
    [
        *((GUARD, "GET", {"host": each}) for each in (HERE, "localhost", "LOCALHOST:8000", "app.localhost")),
        *((GUARD, "GET", {"host": each}) for each in ("[::1]:8000", "10.0.0.7", "gateway:8000", "")),
        *((GUARD, "GET", {"host": each}) for each in ("sluice.default.svc", "host.docker.internal:8000")),
        (GUARD, "GET", {"host": "sluice.default.svc.cluster.local.:8000"}),
        (GUARD, "POST", {"origin": f"http://{HERE}", "sec-fetch-site": "same-origin"}),
        (GUARD, "GET", {"sec-fetch-site": "same-origin"}),
        (GUARD, "GET", LINK),
        (NAMED, "POST", {"origin": OURS, "sec-fetch-site": "cross-site"}),
        *((NAMED, "POST", {"host": each}) for each in ("llm.example.com", "a.internal.example:80")),
        (LISTENS, "GET", {"host": "Box.Example.com:8000"}),
        (FOR_ALL, "POST", {"origin": "null", "sec-fetch-site": "cross-site"}),
        (WITH_KEYS, "POST", {"origin": THEIRS, "host": "evil.example"}),
    ],
)
def test_the_server_s_own_pages_and_those_that_are_named_go_on(
    guard: PageGuard, method: str, headers: dict[str, str]
) -> None:
    assert is_let_in(guard, method, headers)


def test_named_hosts_hold_for_other_machines_too() -> None:
    assert is_let_in(GUARD, "GET", {"host": "evil.example"}, peer="10.0.0.5")
    assert not is_let_in(NAMED, "GET", {"host": "evil.example"}, peer="10.0.0.5")


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server(ServeConfig(access=AccessOptions(cors_origins=(OURS,))), on_port=True) as running:
        yield running


APIS: dict[str, tuple[str, Any]] = {
    "openai": ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1}),
    "ollama": ("/api/generate", {"model": MODEL, "prompt": "x", "options": {"num_predict": 1}, "stream": False}),
    "v2": (f"/v2/models/{MODEL}/generate", {"text_input": "x", "max_tokens": 1}),
    "v2 inference": (f"/v2/models/{MODEL}/infer", {"inputs": []}),
    "logging": ("/v2/logging", {}),
    "keys": ("/v1/admin/keys", {"name": "mine"}),
}


@pytest.mark.parametrize("api", APIS)
def test_every_api_refuses_a_stranger_s_page_in_its_own_shape(live: LiveServer, api: str) -> None:
    path, body = APIS[api]
    refused = live.post(path, body, headers={"content-type": "text/plain", "origin": THEIRS})
    assert (refused.status_code, "x-request-id" in refused.headers) == (403, True)
    error = refused.json()["error"]
    assert (error["message"] if isinstance(error, dict) else error).startswith(SAID)
    assert isinstance(error, dict) == path.startswith("/v1/")


def test_pages_of_this_server_and_those_that_are_named_reach_it(live: LiveServer) -> None:
    for headers in ({"origin": live.url, "sec-fetch-site": "same-origin"}, {"origin": OURS}):
        assert live.post(*APIS["openai"], headers=headers).status_code == 200
    for page in ("/", "/docs", "/console/"):
        assert live.get(page, headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert live.get("/v1/admin/requests", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("headers", [{"origin": THEIRS}, {"host": "evil.example"}])
async def test_the_page_of_metrics_is_no_stranger_s(headers: dict[str, str]) -> None:
    app = create_metrics_app(GatewayMetrics(), CallLog())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/metrics", headers=headers)).status_code == 403


@pytest.mark.parametrize("name", ["http://a.test", "a.test:80", ""])
def test_what_is_no_name_of_a_server_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(OptionError, match="--allowed-hosts"):
        read_config({"--allowed-hosts": [name]}, {})
