"""Which infer requests are answered without an application, and that they are answered alike."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import CallLog
from sluice.gateway.http.direct import Direct, DirectExchange, GuardedDirect
from sluice.gateway.http.v2.app import V2App
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.v2.trace import TraceSettings
from sluice.gateway.v2.trace_values import TraceSetting
from tests.gateway.http.plain_server import serving
from tests.gateway.http.v2.infer_requests import ADD_SUB, IDENTITY, STRINGS, TYPES, one, pair, typed
from tests.gateway.http.v2.models import all_models, held
from tests.gateway.http.v2.small_server import small_server, through_application
from tests.gateway.v2.small_service import SmallService
from tests.waiting import PATIENCE_S

ERRORS = "/v2/models/error_model/infer"
HELD_BODY = json.dumps(one(shape=[1], datatype="INT32", data=[1])).encode()


class Watched:
    """The application with a record of which requests were taken directly."""

    def __init__(self, app: V2App, direct: Direct | None = None) -> None:
        self.app = app
        self.taken: list[bool] = []
        self.begin_inner = (direct or app.direct).begin
        self.takes = app.direct.takes

    @property
    def direct(self) -> Direct:
        return self

    def begin(self, exchange: DirectExchange) -> bool:
        self.taken.append(self.begin_inner(exchange))
        return self.taken[-1]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[Watched, httpx.Client]]:
    app = Watched(V2App(SmallService(*all_models()), ServeConfig()))
    with serving(app) as url, httpx.Client(base_url=url, timeout=PATIENCE_S, headers={"accept-encoding": ""}) as client:
        yield app, client


def as_binary(values: list[float]) -> tuple[bytes, dict[str, str]]:
    raw = np.array(values, np.float32).tobytes()
    size = {"binary_data_size": len(raw)}
    tensor = {"name": "INPUT0", "shape": [1, len(values)], "datatype": "FP32", "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + raw, {"inference-header-content-length": str(len(head))}


PLAIN: list[tuple[str, Any, dict[str, str]]] = [
    (IDENTITY, one(), {}),
    (IDENTITY, one() | {"id": "7"}, {"x-request-id": "mine"}),
    (IDENTITY, one() | {"outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]}, {}),
    (IDENTITY, one() | {"parameters": {"priority": 1, "own": "text"}}, {}),
    (IDENTITY, *as_binary([1.0, 2.0, 3.0])),
    (ADD_SUB, pair(outputs=[{"name": "OUTPUT0", "parameters": {"classification": 2}}]), {}),
    (STRINGS, {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "BYTES", "data": ["a", "ä"]}]}, {}),
    (TYPES, typed("INT64", 1, -2), {}),
    (IDENTITY, one(), {"accept-encoding": "gzip"}),
    ("/v2/models/identity/versions/1/infer", one(), {}),
    (IDENTITY, one(shape=[1, 3000], data=[0.5] * 3000), {}),
    (IDENTITY, one(shape=[1, 9000], data=[0.5] * 9000), {}),  # encoded aside
    (ERRORS, {"inputs": [{"name": "CODE", "shape": [1], "datatype": "BYTES", "data": ["OVERLOADED"]}]}, {}),
    (ERRORS, {"inputs": [{"name": "CODE", "shape": [1], "datatype": "BYTES", "data": ["TOO_LARGE"]}]}, {}),
]
DECLINED: list[tuple[str, Any, dict[str, str]]] = [
    ("/v2/models/nobody/infer", one(), {}),
    (IDENTITY, b"no JSON", {}),
    (IDENTITY, one(data=["text"]), {}),
    (IDENTITY, one(datatype="FP16"), {}),
    (IDENTITY, one(shape=[1, 2]), {}),
    (IDENTITY, {"inputs": []} | {"outputs": 1}, {}),
    (IDENTITY, one(), {"x-sluice-timeout-ms": "1000"}),
    (IDENTITY, one(), {"content-encoding": "gzip"}),
    (IDENTITY, one(shape=[1, 40_000], data=[0.5] * 40_000), {}),
    ("/v2/models/text_repeat/infer", {"inputs": []}, {}),
]


def post(client: httpx.Client, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers=headers)


@pytest.fixture(scope="module")
def application(watched: tuple[Watched, httpx.Client]) -> Iterator[httpx.Client]:
    """The same without direct answers."""
    with serving(through_application(watched[0].app)) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "headers", "is_direct"),
    [*((*each, True) for each in PLAIN), *((*each, False) for each in DECLINED)],
)
def test_either_way_the_answer_is_the_same(
    watched: tuple[Watched, httpx.Client],
    application: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: Any,
    headers: dict[str, str],
    is_direct: bool,
) -> None:
    app, client = watched
    before = len(app.taken)
    answer = post(client, path, body, headers)
    assert any(app.taken[before:]) is is_direct
    sent = {name: each for name, each in answer.request.headers.items() if name != "host"}
    whole = application.post(path, content=answer.request.content, headers=sent)
    assert (answer.status_code, answer.content) == (whole.status_code, whole.content)
    assert {**answer.headers, "date": ""} == {**whole.headers, "date": ""}
    assert "unexpected" not in caplog.text


def test_an_unexpected_error_is_logged_once_and_left_to_the_application(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise failures.pop()

    failures: list[Exception] = [KeyError("third"), ZeroDivisionError("second"), ZeroDivisionError("first")]
    monkeypatch.setattr("sluice.gateway.http.v2.direct.parse_plain_request", fail)
    app = Watched(V2App(SmallService(*all_models()), ServeConfig()))
    with serving(app) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        for _ in range(3):
            assert post(client, IDENTITY, one(), {}).status_code == 200
    assert app.taken == [False] * 3
    found = [each for each in caplog.records if "unexpected" in each.getMessage()]
    assert [each.levelname for each in found] == ["ERROR"] * 2
    assert [str(each.exc_info[1]) for each in found if each.exc_info] == ["first", "'third'"]
    assert all(each.exc_info and each.exc_info[2] for each in found)
    assert IDENTITY in found[0].getMessage() and "ZeroDivisionError" in found[0].getMessage()


def raw_request(body: bytes, path: str = IDENTITY, more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body


def connect(client: httpx.Client | str) -> socket.socket:
    address = httpx.URL(client) if isinstance(client, str) else client.base_url
    return socket.create_connection((address.host, address.port), PATIENCE_S)


def read_answers(connection: socket.socket, count: int) -> list[bytes]:
    """Return the bodies of so many answers with a length."""
    received, bodies = b"", list[bytes]()
    while len(bodies) < count:
        head, blank, rest = received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) if blank else 0
        if blank and len(rest) >= length:
            bodies.append(rest[:length])
            received = rest[length:]
            continue
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return bodies


def values(bodies: list[bytes]) -> list[float]:
    return [json.loads(body)["outputs"][0]["data"][0] for body in bodies]


def numbered(number: float, **more: Any) -> bytes:
    return json.dumps(one(data=[number]) | more).encode()


def test_requests_in_one_piece_are_answered_in_order(watched: tuple[Watched, httpx.Client]) -> None:
    app, client = watched
    before = len(app.taken)
    with connect(client) as connection:
        declined = "x-sluice-priority: 1\r\n"
        pieces = [raw_request(numbered(i), more=declined if i % 3 == 2 else "") for i in range(9)]
        connection.sendall(b"".join(pieces))
        assert values(read_answers(connection, 9)) == [float(i) for i in range(9)]
        assert app.taken[before:][0]
        connection.sendall(raw_request(numbered(9.0)))
        assert values(read_answers(connection, 1)) == [9.0]
    assert app.taken[-1]


@pytest.mark.parametrize("cut", [10, 60, -30, -1])
def test_a_request_in_pieces_is_answered(watched: tuple[Watched, httpx.Client], cut: int) -> None:
    _, client = watched
    request = raw_request(numbered(4.5))
    with connect(client) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in (request[:cut], request[cut:], request[:cut], request[cut:]):
            connection.sendall(piece)
        assert values(read_answers(connection, 2)) == [4.5, 4.5]


def test_chunks_and_continue_are_left_to_the_application(watched: tuple[Watched, httpx.Client]) -> None:
    app, client = watched
    before, body = len(app.taken), numbered(2.5)
    chunked = client.post(IDENTITY, content=iter([body[:9], body[9:]]))
    assert chunked.json()["outputs"][0]["data"] == [2.5]
    with connect(client) as connection:
        connection.sendall(raw_request(body, more="expect: 100-continue\r\n")[: -len(body)])
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert values(read_answers(connection, 1)) == [2.5]
    assert not any(app.taken[before:])


def test_a_client_that_closes_is_answered_and_closed(watched: tuple[Watched, httpx.Client]) -> None:
    _, client = watched
    with connect(client) as connection:
        connection.sendall(raw_request(numbered(1.0), more="connection: close\r\n"))
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert b"connection: close\r\n" in received
    assert values([received.partition(b"\r\n\r\n")[2]]) == [1.0]


def test_a_request_that_is_traced_is_left_to_the_application() -> None:
    service = SmallService(*all_models())
    app = Watched(V2App(service, ServeConfig()))
    with serving(app) as url, httpx.Client(base_url=url) as client:
        assert post(client, IDENTITY, one(), {}).status_code == 200
        service.trace = TraceSettings("/dev/null", TraceSetting(frozenset({"TIMESTAMPS"}), rate=1))
        assert post(client, IDENTITY, one(), {}).status_code == 200
    assert app.taken == [True, False]


def test_answers_have_ids_and_are_counted() -> None:
    calls, counted = CallLog(), list[tuple[str, int]]()
    inner = V2App(SmallService(*all_models()), ServeConfig())
    app = Watched(inner, GuardedDirect(inner.direct, calls, lambda path, status: counted.append((path, status))))
    with serving(app) as url, httpx.Client(base_url=url) as client:
        assert post(client, IDENTITY, one(), {"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert len(post(client, IDENTITY, one(), {"x-request-id": "not mine"}).headers["x-request-id"]) == 24
        long = one(shape=[1, 9000], data=[0.5] * 9000)
        assert post(client, IDENTITY, long, {"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
        assert counted == [(IDENTITY, 200)] * 3
        assert client.get("/v2/health/live").status_code == 200
        calls.is_active = True
        assert post(client, IDENTITY, one(), {}).status_code == 200
    assert app.taken == [True, True, True, False]


def test_a_disconnect_cancels_and_counts() -> None:
    model, counted = held(is_decoupled=False), list[int]()
    inner = V2App(SmallService(model), ServeConfig())
    app = Watched(inner, GuardedDirect(inner.direct, CallLog(), lambda path, status: counted.append(status)))
    with serving(app) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        with connect(client) as connection:
            connection.sendall(raw_request(HELD_BODY, "/v2/models/held/infer"))
            assert model.started.wait(PATIENCE_S)
        assert model.cancelled.wait(PATIENCE_S)
        assert client.get("/v2/health/live").status_code == 200
    assert app.taken == [True]
    assert counted == [499]


def test_what_follows_a_request_in_flight_waits() -> None:
    """A request that is not answered yet holds its connection, also against those that the application answers."""
    model = held(is_decoupled=False)
    with small_server(SmallService(model, *all_models())) as small:
        with connect(small.url) as connection:
            connection.sendall(raw_request(HELD_BODY, "/v2/models/held/infer") + raw_request(numbered(3.0)))
            assert model.started.wait(PATIENCE_S)
            assert small.get("/v2/health/live").status_code == 200
            job = model.jobs[0]
            assert model.loop is not None
            model.loop.call_soon_threadsafe(job.fail, SluiceError(ErrorCode.OVERLOADED, "too much"))
            refused, answered = read_answers(connection, 2)
        assert json.loads(refused) == {"error": "too much"}
        assert values([answered]) == [3.0]
