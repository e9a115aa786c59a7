"""Infer and settings requests whose framing or encoding is out of the ordinary."""

import gzip
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.gateway.api.v2.http.infer_requests import one
from tests.gateway.api.v2.http.small_server import SmallServer
from tests.waiting import PATIENCE_S

IDENTITY = "/v2/models/identity/infer"
BOM = b"\xef\xbb\xbf"
WISH = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


def answers(small: SmallServer, *pieces: bytes) -> list[Any]:
    """Return the documents that the server answers to `pieces`, each in a segment of its own, until it closes."""
    address = urlsplit(small.url)
    with socket.create_connection((address.hostname, address.port), PATIENCE_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    return [json.loads(each.partition(b"\r\n\r\n")[2]) for each in received.split(b"HTTP/1.1 200 OK\r\n")[1:]]


def infer(value: float, headers: bytes = b"") -> tuple[bytes, bytes]:
    """Return the head and the body of a request."""
    body = json.dumps(one(data=[value])).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (
        IDENTITY.encode(),
        headers,
        len(body),
    ), body


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_infer_request_with_a_wish_for_http_2_has_its_tensors(small: SmallServer, is_cut: bool) -> None:
    first, last = infer(1.5, WISH), infer(2.5, WISH + b"Connection: close\r\n")
    sent = (*first, *last) if is_cut else (b"".join((*first, *last)),)
    found = answers(small, *sent)
    assert [each["outputs"][0]["data"] for each in found] == [[1.5], [2.5]]


@pytest.mark.parametrize("is_long", [False, True])
def test_a_byte_order_mark_is_skipped(small: SmallServer, is_long: bool) -> None:
    for path, document in (
        (IDENTITY, json.dumps(one()).encode()),
        ("/v2/models/text_once/generate", b'{"text_input": "a"}'),
        ("/v2/models/text_once/generate_stream", b'{"text_input": "a"}'),
    ):
        assert small.post(path, BOM + document + b" " * (200_000 if is_long else 0)).status_code == 200
    answer = small.post("/v2/models/text_once/generate", BOM + b'{"text_input": "a", "text_input": "b"}')
    assert answer.status_code == 400 and "already exists in request" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/logging", "/v2/repository/models/identity/load"])
def test_settings_have_no_encoding(small: SmallServer, path: str) -> None:
    answer = small.post(path, gzip.compress(b"{}"), Content_Encoding="gzip")
    assert answer.status_code == 400
    assert answer.json() == {"error": "Unsupported content-encoding, only 'identity' is supported."}


@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", "/v2/models/identity", "/v2/models/identity/config"])
def test_head_is_get_without_a_body(small: SmallServer, path: str) -> None:
    head, whole = small.client.head(path), small.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]
