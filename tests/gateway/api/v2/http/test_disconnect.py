"""A client's disconnect cancels its request; a client that stops sending is given up."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from sluice.gateway.front.http import request as body_module
from tests.gateway.api.v2.http.models import Held, held
from tests.gateway.api.v2.http.small_server import SmallServer, small_server
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import PATIENCE_S

TENSOR = {"name": "INPUT0", "shape": [1], "datatype": "INT32", "data": [1]}


@contextmanager
def holding(is_decoupled: bool) -> Iterator[tuple[SmallServer, Held]]:
    model = held(is_decoupled)
    with small_server(SmallService(model)) as small:
        yield small, model


def send(small: SmallServer, route: str, body: Any, more_bytes: int = 0) -> socket.socket:
    """Send a request, or all but `more_bytes` of it, and return the connection."""
    content = json.dumps(body).encode()
    head = f"POST /v2/models/held/{route} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content) + more_bytes}\r\n\r\n"
    address = httpx.URL(small.url)
    connection = socket.create_connection((address.host, address.port), PATIENCE_S)
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize(
    ("route", "is_decoupled", "body"),
    [
        ("infer", False, {"inputs": [TENSOR]}),
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
        with send(small, "infer", {"inputs": [TENSOR]}, more_bytes=5) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 504 ")
        assert not model.started.is_set()


def test_leaving_within_the_body_is_no_request() -> None:
    with holding(False) as (small, model):
        send(small, "infer", {"inputs": [TENSOR]}, more_bytes=5).close()
        assert small.get("/v2/health/live").status_code == 200
        assert not model.started.is_set()
