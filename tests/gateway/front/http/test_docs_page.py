"""The OpenAPI document and the page that shows it."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sluice.gateway.api.rag.schemas import CollectionRequest, DocumentsRequest, QueryRequest, SearchRequest
from sluice.gateway.front.http.openapi import PAGE_HEADERS
from sluice.gateway.front.http.parsing import RequestObject, parse_body
from tests.gateway.front.http.live import MODEL, LiveServer
from tests.waiting import PATIENCE_S

CHROMIUM = shutil.which("chromium")
_ONLY_HERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def bodies(live: LiveServer) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, operations in live.get("/openapi.json").json()["paths"].items():
        for operation in operations.values():
            if (content := operation.get("requestBody", {}).get("content", {}).get("application/json")) is not None:
                yield path, content


def test_every_body_has_an_example_that_matches_its_schema(live: LiveServer) -> None:
    found = list(bodies(live))
    assert len(found) > 20
    for path, content in found:
        assert "example" in content, path
        assert content["example"] or path.endswith("/load"), path
        jsonschema.validate(content["example"], content["schema"])


def test_the_examples_for_language_models_are_answered(live: LiveServer) -> None:
    sent = {path: content["example"] for path, content in bodies(live) if content["example"].get("model") == MODEL}
    assert {"/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"} <= sent.keys()
    for path, example in sent.items():
        assert live.post(path, example).status_code == 200, path


@pytest.mark.parametrize("schema", [CollectionRequest, DocumentsRequest, QueryRequest, SearchRequest])
def test_the_examples_of_rag_are_read(schema: type[RequestObject]) -> None:
    assert schema.example != "{}"
    assert parse_body(schema, schema.example.encode(), is_strict=True)[1] == []


def test_the_page_names_no_other_server(live: LiveServer) -> None:
    page = live.get("/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert page.headers.items() >= PAGE_HEADERS.items()
    assert not re.search(r"https?://|//", re.sub(r"<!--.*?-->", "", page.text))
    assert '"validatorUrl": null' in page.text
    for path in re.findall(r'(?:src|href)="(docs/[^"]+)"', page.text):
        assert live.get(f"/{path}").status_code == 200


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_without_other_servers_shows_every_route(live: LiveServer, tmp_path: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", _ONLY_HERE]
    command = [str(CHROMIUM), *options, "--virtual-time-budget=10000", "--dump-dom", f"{live.url}/docs"]
    page = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    paths = live.get("/openapi.json").json()["paths"]
    assert set(re.findall(r'data-path="([^"]*)"', page)) == paths.keys()
