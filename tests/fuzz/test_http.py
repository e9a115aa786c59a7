"""Every route of a running server, with anything in paths, headers, queries and bodies, while a victim streams."""

import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.damage import damaged
from tests.fuzz.http_target import OF_TRITON, PATIENCE_S, Target, attacking
from tests.fuzz.json_bodies import bodies
from tests.fuzz.running import MINUTES, fuzzed
from tests.fuzz.test_documents import HTML, LINES, MARKDOWN, PDF
from tests.server_process import running_bundled

LEFT_OUT = re.compile(r"/sleep|/wake_up|/v1/admin/(keys|live|logs|profile|tenants)|/v2/logging|/unload$")
"""Routes that change the server for the victim and the log, and those whose answers go on."""
CHANGES = re.compile(r"/trace/|sharedmemory|/repository/|lora_adapter|/v1/files|/v1/batches|/v1/rag")
"""Further routes that `make test` leaves out: other tests have the same server."""
MULTIPART = (
    b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B\r\ncontent-disposition: form-data; '
    b'name="file"; filename="a.jsonl"\r\ncontent-type: application/jsonl\r\n\r\n' + LINES + b"\r\n--B--\r\n"
)
CONTENTS = {
    "multipart/form-data": MULTIPART,
    "application/x-ndjson": LINES,
    "text/plain": MARKDOWN,
    "text/markdown": MARKDOWN,
    "text/html": HTML,
    "application/pdf": PDF.to_bytes(),
}
PATH_TEXTS = (
    "",
    "a",
    "tiny",
    "rill",
    "sluice",
    "..",
    "../..",
    "%",
    "\0",
    "é",
    "💥",
    "x" * 3000,
    "0",
    "-1",
    "a/b",
    "\n",
    "?#",
)
QUERY_TEXTS = ("", "0", "1", "-1", "true", "1e5", "NaN", "9" * 400, "a", "null", "2024-99-99", "\0", "💥", "'", "[]")
HEADERS = {
    "x-sluice-tenant": ("a", "", "é".encode().decode("latin-1"), "x" * 3000),
    "x-sluice-priority": ("low", "5", "-1", "x", "9" * 400),
    "x-sluice-timeout-ms": ("1", "0", "-1", "NaN", "1e999", "x", "9" * 400),
    "x-sluice-queue-timeout-ms": ("1", "0", "x", "inf"),
    "x-sluice-sticky": ("a", "x" * 3000),
    "x-sluice-collection-key": ("a", "é".encode().decode("latin-1")),
    "x-sluice-resume": ("true", "false", "yes", ""),
    "last-event-id": ("0" * 32 + ":1", "a:b", "0" * 32 + ":" + "9" * 12, ":", "-1"),
    "idempotency-key": ("a", "", "x" * 300, "é".encode().decode("latin-1")),
    "x-request-id": ("a", "x" * 3000, "{}", ""),
    "traceparent": ("00-" + "1" * 32 + "-" + "2" * 16 + "-01", "00-0-0-0", "x"),
    "accept": ("text/event-stream", "*/*", "x", ""),
    "content-type": (
        "application/json",
        "text/plain",
        "multipart/form-data; boundary=B",
        "multipart/form-data",
        "x/y",
        "",
    ),
    "content-encoding": ("gzip", "deflate", "x"),
    "inference-header-content-length": ("0", "5", "-1", "x", "9" * 30),
    "authorization": ("Bearer a", "Bearer", "Basic x", "x"),
}
TIMEOUT = {"x-sluice-timeout-ms": "1000"}
"""Bounds generations, which else go on to the end of the context."""


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    if not MINUTES:
        with attacking(request.getfixturevalue("server")) as found:
            yield found
        return
    flags = ("--dtype=f32", "--trust-request-chat-template", "--allow-runtime-lora-updating", "--max-num-seqs=16")
    with running_bundled(tmp_path_factory.mktemp("server") / "log", *flags) as server:
        server.wait_ready()
        server.model = "rill"
        with attacking(server) as found:
            yield found


def operations(target: Target) -> list[tuple[str, str, dict[str, Any]]]:
    """The method, path and description of each operation that is asked for."""
    found = []
    for path, methods in target.document["paths"].items():
        if LEFT_OUT.search(path) or (not MINUTES and CHANGES.search(path)):
            continue
        found += [(method.upper(), path, operation) for method, operation in methods.items()]
    return found


@st.composite
def requests(draw: st.DrawFn, target: Target) -> tuple[str, str, bytes | None, dict[str, str]]:
    """A request to one of the operations."""
    method, path, operation = draw(st.sampled_from(operations(target)))
    query, headers = [], dict(TIMEOUT)
    for parameter in operation.get("parameters", ()):
        name = parameter["name"]
        if parameter["in"] == "path":
            good = str(parameter.get("example", "a")).replace("rill", target.server.model)
            value = good if draw(st.integers(0, 2)) else draw(st.sampled_from(PATH_TEXTS))
            path = path.replace(f"{{{name}}}", quote(value, safe="" if draw(st.booleans()) else "/"))
        elif parameter["in"] == "query" and draw(st.integers(0, 2)) == 0:
            query.append(f"{name}={quote(draw(st.sampled_from(QUERY_TEXTS)))}")
    for name in draw(st.lists(st.sampled_from(sorted(HEADERS)), max_size=1)):
        headers[name] = draw(st.sampled_from(HEADERS[name]))
    content, kind = draw(contents(target, operation.get("requestBody", {}).get("content", {})))
    if kind:
        headers.setdefault("content-type", kind)
    return method, f"{path}?{'&'.join(query)}" if query else path, content, headers


@st.composite
def contents(draw: st.DrawFn, target: Target, described: dict[str, Any]) -> tuple[bytes | None, str]:
    """A body of one of the described types, and its type."""
    if not described:
        return None, ""
    kind = draw(st.sampled_from(sorted(described)))
    if kind != "application/json":
        return draw(damaged(CONTENTS[kind])), "multipart/form-data; boundary=B" if kind.startswith("multi") else kind
    example = _renamed(described[kind].get("example", {}), target.server.model)
    return draw(bodies(example, described[kind].get("schema", {}))), kind


def _renamed(value: Any, model: str) -> Any:
    """Return an example with the name of the model that this server has."""
    if isinstance(value, dict):
        return {name: _renamed(each, model) for name, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, model) for each in value]
    return model if value == "rill" else value


@fuzzed(60)
@given(st.data())
def test_a_request_is_answered_or_refused(target: Target, data: st.DataObject) -> None:
    method, path, body, headers = data.draw(requests(target))
    target.send(method, path, body, {name: value.encode("latin-1") for name, value in headers.items()})  # type: ignore[misc]


GOOD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-sluice-timeout-ms: 1000\r\n"
    b'content-length: 52\r\n\r\n{"model": "tiny", "prompt": "hi", "max_tokens": 2   }',
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-sluice-timeout-ms: 1000\r\ntransfer-encoding: chunked\r\n\r\n"
    b'34\r\n{"model": "tiny", "prompt": "hi", "max_tokens": 2   }\r\n0\r\n\r\n',
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /v2/models/tiny/infer HTTP/1.1\r\nhost: x\r\ninference-header-content-length: 2\r\ncontent-length: 6"
    b"\r\n\r\n{}abcd",
    b"PUT /v1/files HTTP/1.0\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 0\r\nconnection: keep-alive\r\n\r\n",
)
REFUSALS = (501, 505)
"""Statuses of transfer codings and versions of HTTP that are not read."""
HTTP_SNIPPETS = (
    *(b"\r\n", b"\r\n\r\n", b"\n", b":", b" ", b"HTTP/1.1", b"HTTP/2.0", b"GET ", b"POST ", b"OPTIONS "),
    *(b"CONNECT ", b"*"),
    *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n"),
    *(b"content-length: 5\r\n", b"content-length: -1\r\n"),
    *(b"upgrade: websocket\r\nconnection: upgrade\r\n", b"expect: 100-continue\r\n", b"host: \r\n"),
    *(b"x" * 70_000, b"0\r\n\r\n"),
    *(b"FFFFFFFFFFFFFFFFFF\r\n", b";a=b", b"/%00", b"/%ff", b"//", b"/..", b"http://x/", b"\t", b"\x0b"),
    *(b"\x7f", b"\xc3\xa9"),
)


@fuzzed(25)
@given(st.sampled_from(GOOD).flatmap(lambda content: damaged(content, HTTP_SNIPPETS)), st.integers(1, 5000))
def test_bytes_at_the_port_are_answered_or_refused(target: Target, content: bytes, piece: int) -> None:
    url = httpx.URL(target.server.base_url)
    with socket.create_connection((url.host, url.port), PATIENCE_S) as client:
        received = b""
        try:
            for start in range(0, len(content), piece):
                client.sendall(content[start : start + piece])
            client.shutdown(socket.SHUT_WR)
            while chunk := client.recv(1 << 16):
                received += chunk
        except (ConnectionError, BrokenPipeError):
            pass  # closed with bytes of ours unread
    for status, body in re.findall(rb"HTTP/1\.1 (\d{3}) .*?\r\n\r\n([^\r]*)", received, re.DOTALL):
        assert int(status) < 500 or int(status) in REFUSALS or OF_TRITON.match(body), received[:2000]
    target.check()
