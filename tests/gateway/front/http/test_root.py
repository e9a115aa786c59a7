"""`GET /`: a page for a browser, JSON for others; and the same rules of access as for metadata."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.metadata import version

import pytest
from starlette.requests import Request

from sluice.gateway.api.root import Overview
from sluice.gateway.front.http.access import find_api_category
from sluice.gateway.front.http.openapi import PAGE_HEADERS
from sluice.gateway.front.listeners import GrpcEndpoint
from sluice.gateway.front.restrictions import ApiCategory
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.config import ServeConfig, read_config
from tests.gateway.front.http.live import LiveServer, live_server
from tests.gateway.front.http.portless import BASE_URL

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEY = "sesame"


class PageReader(HTMLParser):
    """Collects the tags that are opened, links, and the attributes that load a resource."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.links: list[str] = []
        self.resources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open_tags.append(tag)
        self.links += [value or "" for name, value in attrs if name == "href" and tag == "a"]
        self.resources += [value or "" for name, value in attrs if name == "src" or (name == "href" and tag != "a")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag


def read_page(text: str) -> PageReader:
    reader = PageReader()
    reader.feed(text)
    reader.close()
    assert not reader.open_tags
    return reader


@pytest.fixture(scope="module")
def guarded() -> Iterator[LiveServer]:
    with live_server(ServeConfig(access=AccessOptions(api_key=KEY))) as running:
        yield running


def test_json_says_what_this_is_and_where_things_are(live: LiveServer) -> None:
    response = live.get("/")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["vary"] == "accept"
    overview = response.json()
    assert (overview["name"], overview["version"], overview["ready"]) == ("Sluice", version("sluice"), True)
    assert overview["models"] == ["rill"]
    assert "metrics" not in overview  # this server has no page of metrics
    for path in overview["links"]:
        assert live.get(path).status_code == 200


def test_a_browser_gets_a_page_without_foreign_resources(live: LiveServer) -> None:
    response = live.get("/", headers=BROWSER)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert response.headers.items() >= PAGE_HEADERS.items()
    page = read_page(response.text)
    assert page.links == list(live.get("/").json()["links"])
    assert not page.resources
    assert not re.search(r"https?://|@import|url\(", response.text.replace(BASE_URL, ""))
    assert f"curl -N {BASE_URL}/v1/chat/completions" in response.text
    assert f"Sluice {version('sluice')}" in response.text
    assert "Ready." in response.text
    assert "<code>rill</code>" in response.text


@pytest.mark.parametrize("headers", [{}, BROWSER])
def test_head_has_the_headers_and_no_body(live: LiveServer, headers: dict[str, str]) -> None:
    whole, head = live.get("/", headers=headers), live.request("HEAD", "/", headers=headers)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == whole.headers[name]


def test_other_methods_are_refused(live: LiveServer) -> None:
    assert live.post("/", {}).status_code == 405


def test_while_loading_it_answers_and_says_so(loading_live: LiveServer) -> None:
    overview = loading_live.get("/").json()
    assert (overview["ready"], overview["reason"], overview["models"]) == (
        False,
        "the server is loading its models",
        [],
    )
    assert "Not ready: the server is loading its models." in loading_live.get("/", headers=BROWSER).text


@pytest.mark.parametrize("headers", [{}, BROWSER])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_without_the_key_it_names_no_model(guarded: LiveServer, method: str, headers: dict[str, str]) -> None:
    response = guarded.request(method, "/", headers=headers)
    assert response.status_code == 401
    assert "rill" not in response.text
    allowed = guarded.request(method, "/", headers={**headers, "authorization": f"Bearer {KEY}"})
    assert allowed.status_code == 200


def test_it_is_restricted_as_metadata_is() -> None:
    assert find_api_category("/") is ApiCategory.METADATA
    with live_server(read_config({"--http-restricted-api": ["metadata:admin=yes"]}, {})) as running:
        refused = running.get("/")
        assert (refused.status_code, "rill" in refused.text) == (403, False)
        assert running.get("/", headers={"admin": "yes"}).json()["models"] == ["rill"]


def test_it_links_to_nothing_that_needs_another_header() -> None:
    with live_server(read_config({"--http-restricted-api": ["health,inference:admin=yes"]}, {})) as running:
        assert "/health" not in running.get("/").json()["links"]
        assert "curl" not in running.get("/", headers=BROWSER).text


def test_names_and_reasons_are_escaped() -> None:
    overview = Overview("model <b> failed", ["a<script>", "b&c"], {}, 8002)
    scope = {"type": "http", "scheme": "https", "path": "/", "query_string": b"", "server": ("h", 443)}
    text = overview.html(Request(scope | {"headers": [(b"host", b"host:8443")]}), "a<script>")
    read_page(text)
    assert '"model": "a&lt;script&gt;"' in text
    assert "<li><code>a&lt;script&gt;</code></li>\n<li><code>b&amp;c</code></li>" in text
    assert "Not ready: model &lt;b&gt; failed." in text
    assert '<a href="http://host:8002/metrics">' in text


def test_the_ports_of_metrics_and_grpc() -> None:
    overview = Overview("", [], {}, 8002, GrpcEndpoint(8001, uses_tls=False)).json()
    assert b'"metrics":{"port":8002,"path":"/metrics"}' in overview
    assert b'"grpc":{"port":8001,"tls":false}' in overview
