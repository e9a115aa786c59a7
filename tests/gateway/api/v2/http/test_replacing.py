"""A model that is replaced while a request's body comes in: the request goes to its successor."""

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sluice.gateway.plane.models import ModelFinder
from sluice.serving.model import Model
from tests.gateway.api.v2.http.models import text_once, text_repeat
from tests.gateway.api.v2.http.small_server import small_server
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import PATIENCE_S

TENSOR = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["word"]}


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
        (text_once, "infer", {"inputs": [TENSOR]}),
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
    head = f"POST /v2/models/{old.name}/{route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-length: {len(content)}\r\n\r\n"
    with small_server(service) as small:
        address = httpx.URL(small.url)
        with socket.create_connection((address.host, address.port), PATIENCE_S) as connection:
            connection.sendall(head.encode() + content[:5])
            assert models.has_routed.wait(PATIENCE_S)
            service.repository.loaded = [new]
            old.retire()
            connection.sendall(content[5:])
            answer = b""
            while more := connection.recv(65536):
                answer += more
    assert answer.startswith(b"HTTP/1.1 200 "), answer
