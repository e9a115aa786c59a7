"""Requests whose framing or encoding is out of the ordinary, clients that leave or stop sending, and models that are
replaced while a body comes in."""

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sluice.gateway.front.http import request as body_module
from sluice.gateway.plane.models import ModelFinder
from sluice.serving.model import Model
from tests.gateway.api.v2.http.models import Held, held, one, text_once, text_repeat
from tests.gateway.api.v2.http.small_server import SmallServer, small_server
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import PATIENCE_S

IDENTITY = "/v2/models/identity/infer"
HELD = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "INT32", "data": [1]}]}
WORD = {"inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["word"]}]}
BOM = b"\xef\xbb\xbf"
WISH = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


def answers(small: SmallServer, *pieces: bytes) -> list[Any]:
    """Return the documents that the server answers to `pieces`, each in a segment of its own, until it closes."""
    with small.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    return [json.loads(each.partition(b"\r\n\r\n")[2]) for each in received.split(b"HTTP/1.1 200 OK\r\n")[1:]]


def infer(value: float, headers: bytes = b"") -> tuple[bytes, bytes]:
    """Return the head and the body of a request."""
    body = json.dumps(one(data=[value])).encode()
    return head_of(IDENTITY, len(body), headers), body


def head_of(path: str, num_bytes: int, headers: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (path.encode(), headers, num_bytes)


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


@contextmanager
def holding(is_decoupled: bool) -> Iterator[tuple[SmallServer, Held]]:
    model = held(is_decoupled)
    with small_server(SmallService(model)) as small:
        yield small, model


def send(small: SmallServer, route: str, body: Any, more_bytes: int = 0) -> socket.socket:
    """Send a request, or all but `more_bytes` of it, and return the connection."""
    content = json.dumps(body).encode()
    connection = small.connect()
    connection.sendall(head_of(f"/v2/models/held/{route}", len(content) + more_bytes) + content)
    return connection


@pytest.mark.parametrize(
    ("route", "is_decoupled", "body"),
    [
        ("infer", False, HELD),
        ("generate", False, {"INPUT0": 1}),
        ("generate", True, {"INPUT0": 1}),
        ("generate_stream", True, {"INPUT0": 1}),
    ],
)
def test_leaving_cancels(route: str, is_decoupled: bool, body: Any) -> None:
    with holding(is_decoupled) as (small, model):
        with send(small, route, body):
            assert model.started.wait(PATIENCE_S)
            assert not model.cancelled.is_set()
        assert model.cancelled.wait(PATIENCE_S)
        assert model.num_in_flight == 0
        assert small.get("/v2/health/live").status_code == 200


def test_a_body_that_stops_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.05)
    with holding(False) as (small, model):
        with send(small, "infer", HELD, more_bytes=5) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 504 ")
        assert not model.started.is_set()


def test_leaving_within_the_body_is_no_request() -> None:
    with holding(False) as (small, model):
        send(small, "infer", HELD, more_bytes=5).close()
        assert small.get("/v2/health/live").status_code == 200
        assert not model.started.is_set()


class WatchedModels(ModelFinder):
    """Signals when a request has found its model."""

    has_routed = threading.Event()

    def route(self, name: str, version: int = -1, key: str = "") -> Model:
        found = super().route(name, version, key)
        self.has_routed.set()
        return found


@pytest.mark.parametrize(
    ("make", "route", "body"),
    [
        (text_once, "infer", WORD),
        (text_once, "generate", {"text_input": "word"}),
        (text_repeat, "generate_stream", {"text_input": "word"}),
    ],
)
def test_a_model_replaced_under_a_body(make: Callable[[], Model], route: str, body: dict[str, Any]) -> None:
    old, new = make(), make()
    service = SmallService(old)
    service.models = models = WatchedModels(service.repository, service.health)
    models.has_routed.clear()
    content = json.dumps(body).encode()
    head = head_of(f"/v2/models/{old.name}/{route}", len(content), b"Connection: close\r\n")
    with small_server(service) as small, small.connect() as connection:
        connection.sendall(head + content[:5])
        assert models.has_routed.wait(PATIENCE_S)
        service.repository.loaded = [new]
        old.retire()
        connection.sendall(content[5:])
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 "), answer
