"""The console's files: who gets them, how, and that they are built of the sources that stand beside them."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from sluice.gateway.front.http.access import find_api_category
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.http import HttpOptions
from sluice.gateway.watch.console.routes import load_files
from tests.gateway.front.http.live import LiveServer, live_server
from tests.paths import ROOT

SOURCES = ROOT / "console"
BUILT_OF = ("build.mjs", "package-lock.json", "tsconfig.json", "src", "index.html", "icon.svg")
KEY = "sesame"


@pytest.fixture(scope="module")
def guarded() -> Iterator[LiveServer]:
    with live_server(ServeConfig(access=AccessOptions(api_key=KEY))) as running:
        yield running


def test_the_page_loads_nothing_from_elsewhere(live: LiveServer) -> None:
    page = live.get("/console/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for name in load_files():
        assert live.get(f"/console/{name}").status_code == 200


def test_an_address_without_a_slash_leads_to_the_folder_under_any_prefix(live: LiveServer) -> None:
    answer = live.get("/console", follow_redirects=False)
    assert answer.status_code == 308
    assert answer.headers["location"] == "console/"  # relative: a proxy's prefix stays


def test_files_are_sent_again_only_when_they_have_changed(live: LiveServer) -> None:
    first = live.get("/console/console.js", headers={"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    assert first.headers["cache-control"] == "no-cache"
    again = live.get("/console/console.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = live.get("/console/console.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == first.content  # the client has uncompressed it


@pytest.mark.parametrize("name", ["../routes.py", "..%2froutes.py", "%2e%2e/%2e%2e/app.py", "/etc/passwd", "src"])
def test_nothing_else_can_be_read(live: LiveServer, name: str) -> None:
    answer = live.get(f"/console/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("not_found", "unknown_url")


def test_files_need_no_key_and_what_they_show_does(guarded: LiveServer) -> None:
    assert guarded.get("/console/").status_code == 200
    assert guarded.get("/console/console.js").status_code == 200
    assert guarded.get("/consoles").status_code == 401
    assert guarded.get("/v1/admin/live?once=true").status_code == 401


def test_files_belong_to_no_restricted_category() -> None:
    assert find_api_category("/console/") is None


def test_the_overview_names_the_console(live: LiveServer) -> None:
    assert "/console/" in live.get("/").json()["links"]
    assert 'href="/console/"' in live.get("/", headers={"accept": "text/html"}).text


def test_a_server_may_be_without_it() -> None:
    with live_server(ServeConfig(http=HttpOptions(serves_console=False))) as running:
        assert running.get("/console/").status_code == 404
        assert "/console/" not in running.get("/").json()["links"]


def test_built_files_are_of_these_sources() -> None:
    """The sum is made as in console/build.mjs, so that this needs no npm."""
    whole = sha256()
    for path in sorted(str(each.relative_to(SOURCES)) for name in BUILT_OF for each in _files_under(SOURCES / name)):
        whole.update(f"{path} {sha256((SOURCES / path).read_bytes()).hexdigest()}\n".encode())
    built = json.loads(load_files()["build.json"].content)
    assert built["sources"] == whole.hexdigest(), "run `make console`, and commit gateway/watch/console/static with it"


def _files_under(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from (each for each in path.rglob("*") if each.is_file())
