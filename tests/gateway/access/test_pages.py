"""What web pages may ask of a server that asks nobody for a key: those of strangers nothing, its own everything."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.access.control import AccessControl
from gateway.access.ring import KeyRing
from gateway.calls import CallLog
from gateway.http.access import PageGuard
from gateway.http.app import create_metrics_app
from gateway.options.access import AccessOptions
from gateway.options.config import ServeConfig, read_config
from gateway.options.option import OptionError
from gateway.telemetry.metrics import GatewayMetrics
from tests.gateway.http.live import MODEL, LiveServer, live_server

OURS, THEIRS = "https://app.example.com", "https://evil.example"
TEXT = {"content-type": "text/plain"}
"""What a page may send to another origin without asking first."""
APIS: dict[str, tuple[str, Any]] = {
    "openai": ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1}),
    "ollama": ("/api/generate", {"model": MODEL, "prompt": "x", "options": {"num_predict": 1}, "stream": False}),
    "v2": (f"/v2/models/{MODEL}/generate", {"text_input": "x", "max_tokens": 1}),
    "v2 inference": (f"/v2/models/{MODEL}/infer", {"inputs": []}),
    "logging": ("/v2/logging", {}),
    "keys": ("/v1/admin/keys", {"name": "mine"}),
}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server(on_port=True) as running:
        yield running


@pytest.fixture(scope="module")
def open_live() -> Iterator[LiveServer]:
    """A server that names pages and hosts."""
    access = AccessOptions(cors_origins=(OURS,), allowed_hosts=("llm.example.com", "*.internal.example"))
    with live_server(ServeConfig(access=access), on_port=True) as running:
        yield running


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": THEIRS},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "evil.example"},
    ],
)
def test_a_stranger_s_page_is_refused_by_every_api(live: LiveServer, api: str, headers: dict[str, str]) -> None:
    path, body = APIS[api]
    refused = live.post(path, body, headers=TEXT | headers)
    assert refused.status_code == 403
    assert "this server asks nobody for a key, so it refuses other web pages" in refused.text
    assert "x-request-id" in refused.headers


@pytest.mark.parametrize(("api", "is_nested"), [("openai", True), ("ollama", False), ("v2", False)])
def test_a_refusal_has_the_protocol_s_shape(live: LiveServer, api: str, is_nested: bool) -> None:
    path, body = APIS[api]
    error = live.post(path, body, headers={"origin": THEIRS}).json()["error"]
    assert (error["type"] == "permission_error") if is_nested else error.startswith("this server")


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example", "evil.example."])
def test_a_name_that_leads_here_reads_nothing(live: LiveServer, host: str) -> None:
    assert live.get("/v1/admin/requests", headers={"host": host}).status_code == 403


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "localhost", "LOCALHOST:8000", "app.localhost", "[::1]:8000", "10.0.0.7", "gateway:8000"),
        *("sluice.default.svc", "host.docker.internal:8000", "sluice.default.svc.cluster.local.:8000", ""),
    ],
)
def test_addresses_and_names_of_this_network_are_the_server_s(live: LiveServer, host: str) -> None:
    assert live.get("/v1/models", headers={"host": host}).status_code == 200


def test_the_server_s_own_pages_go_on(live: LiveServer) -> None:
    path, body = APIS["openai"]
    own = {"origin": live.url, "sec-fetch-site": "same-origin"}
    assert live.post(path, body, headers=own).status_code == 200
    for page in ("/", "/docs", "/console/"):
        assert live.get(page, headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_a_link_of_another_page_leads_here(live: LiveServer) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert live.get("/console/", headers=link).status_code == 200
    assert live.get("/console/", headers=link | {"sec-fetch-dest": "iframe"}).status_code == 403
    assert live.post(*APIS["openai"], headers=link).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": OURS, "sec-fetch-site": "cross-site"}, 200),
        ({"origin": THEIRS}, 403),
        ({"host": "llm.example.com"}, 200),
        ({"host": "a.internal.example:80"}, 200),
        ({"host": "other.example.com"}, 403),
    ],
)
def test_pages_and_hosts_that_are_named_are_let_in(open_live: LiveServer, headers: dict[str, str], status: int) -> None:
    assert open_live.post(*APIS["openai"], headers=headers).status_code == status


def test_named_hosts_hold_for_other_machines_too() -> None:
    headers = {b"host": b"evil.example"}
    assert PageGuard(CallLog()).find_refusal("GET", headers, "10.0.0.5") is None
    assert PageGuard(CallLog(), hosts=("a.test",)).find_refusal("GET", headers, "10.0.0.5") is not None


def test_the_name_that_a_server_listens_on_is_its_own() -> None:
    headers = {b"host": b"Box.Example.com:8000"}
    assert PageGuard(CallLog(), host="box.example.com").find_refusal("GET", headers, "127.0.0.1") is None


def test_every_page_may_ask_where_that_is_set() -> None:
    pages = PageGuard(CallLog(), origins=("*",))
    assert pages.find_refusal("POST", {b"origin": b"null", b"sec-fetch-site": b"cross-site"}, "127.0.0.1") is None


def test_pages_are_not_looked_at_where_keys_are_asked_for() -> None:
    pages = PageGuard(CallLog(AccessControl(KeyRing(None, "sesame"))))
    assert pages.find_refusal("POST", {b"origin": THEIRS.encode(), b"host": b"evil.example"}, "127.0.0.1") is None


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
