"""Infer requests that are answered without an ASGI cycle are answered like those that have one."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.http.app import V2App
from sluice.gateway.calls import Call, CallLog, CallObserver
from sluice.gateway.front.http.exchange import ConnectionExchange, HotRoutes
from sluice.gateway.front.http.guard import Guard, GuardedRoutes, RequestTracing
from sluice.gateway.front.restrictions import ApiCategory, Restriction, Restrictions
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.telemetry.tracer import Tracer
from sluice.serving.model import Model
from tests.gateway.api.v2.http.models import ADD_SUB, IDENTITY, STRINGS, TYPES, all_models, held, one, pair, typed
from tests.gateway.api.v2.http.small_server import small_server, through_application
from tests.gateway.api.v2.small_service import SmallService
from tests.gateway.front.http.plain_server import connect, serving
from tests.gateway.telemetry.test_tracer import Sink
from tests.waiting import PATIENCE_S

ERRORS = "/v2/models/error_model/infer"
HELD_BODY = json.dumps(one(shape=[1], datatype="INT32", data=[1])).encode()


class Watched:
    """The application with a count of the requests that its hot routes have begun."""

    def __init__(self, app: V2App, hot: HotRoutes | None = None) -> None:
        self.app = app
        self.num_begun = 0
        self._inner = hot or app.hot
        self.hot = HotRoutes(self._inner.takes, self.begin)

    def begin(self, exchange: ConnectionExchange) -> None:
        self.num_begun += 1
        self._inner.begin(exchange)

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


REQUESTS: list[tuple[str, Any, dict[str, str]]] = [
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
    ("/v2/models/nobody/infer", one(), {}),
    (IDENTITY, b"no JSON", {}),
    (IDENTITY, one(data=["text"]), {}),
    (IDENTITY, one(datatype="FP16"), {}),
    (IDENTITY, one(shape=[1, 2]), {}),
    (IDENTITY, {"inputs": []} | {"outputs": 1}, {}),
    (IDENTITY, one(), {"x-sluice-timeout-ms": "1000"}),
    (IDENTITY, one(), {"content-encoding": "gzip"}),
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


@pytest.mark.parametrize(("path", "body", "headers"), REQUESTS)
def test_either_way_the_answer_is_the_same(
    watched: tuple[Watched, httpx.Client], application: httpx.Client, path: str, body: Any, headers: dict[str, str]
) -> None:
    app, client = watched
    before = app.num_begun
    answer = post(client, path, body, headers)
    assert app.num_begun == before + 1
    sent = {name: each for name, each in answer.request.headers.items() if name != "host"}
    whole = application.post(path, content=answer.request.content, headers=sent)
    assert (answer.status_code, answer.content) == (whole.status_code, whole.content)
    assert {**answer.headers, "date": ""} == {**whole.headers, "date": ""}


def test_an_unexpected_error_is_answered_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("sluice.gateway.api.v2.http.infer.parse_plain_request", fail)
    with small_server(SmallService(*all_models())) as small:
        assert small.post(IDENTITY, one()).status_code == 500
    (found,) = [each for each in caplog.records if "unexpected" in each.getMessage()]
    assert found.exc_info and str(found.exc_info[1]) == "ours"


def raw_request(body: bytes, path: str = IDENTITY, more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body


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
    before = app.num_begun
    with connect(str(client.base_url)) as connection:
        encoded = "/v2/models/%69dentity/infer"
        pieces = [raw_request(numbered(i), encoded if i % 3 == 2 else IDENTITY) for i in range(9)]
        connection.sendall(b"".join(pieces))
        assert values(read_answers(connection, 9)) == [float(i) for i in range(9)]
        assert app.num_begun > before
        connection.sendall(raw_request(numbered(9.0)))
        assert values(read_answers(connection, 1)) == [9.0]


@pytest.mark.parametrize("cut", [10, 60, -30, -1])
def test_a_request_in_pieces_is_answered(watched: tuple[Watched, httpx.Client], cut: int) -> None:
    _, client = watched
    request = raw_request(numbered(4.5))
    with connect(str(client.base_url)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in (request[:cut], request[cut:], request[:cut], request[cut:]):
            connection.sendall(piece)
        assert values(read_answers(connection, 2)) == [4.5, 4.5]


def test_chunks_and_continue_are_answered(watched: tuple[Watched, httpx.Client]) -> None:
    _, client = watched
    body = numbered(2.5)
    chunked = client.post(IDENTITY, content=iter([body[:9], body[9:]]))
    assert chunked.json()["outputs"][0]["data"] == [2.5]
    with connect(str(client.base_url)) as connection:
        connection.sendall(raw_request(body, more="expect: 100-continue\r\n")[: -len(body)])
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert values(read_answers(connection, 1)) == [2.5]


def test_a_client_that_closes_is_answered_and_closed(watched: tuple[Watched, httpx.Client]) -> None:
    _, client = watched
    with connect(str(client.base_url)) as connection:
        connection.sendall(raw_request(numbered(1.0), more="connection: close\r\n"))
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert b"connection: close\r\n" in received
    assert values([received.partition(b"\r\n\r\n")[2]]) == [1.0]


class Seen(CallObserver):
    """Notes the calls that end."""

    def __init__(self) -> None:
        self.ended: list[tuple[int | None, int, bool]] = []

    def end(self, call: Call) -> None:
        self.ended.append((call.status, call.bytes_in, call.bytes_out > 0))


def guarded(*models: Model, calls: CallLog, **more: Any) -> tuple[Watched, list[int]]:
    counted: list[int] = []
    inner = V2App(SmallService(*models), ServeConfig())
    guard = Guard(calls, lambda path, status: counted.append(status), lambda path: "v2", **more)
    return Watched(inner, GuardedRoutes(inner.hot, guard).routes), counted


def test_answers_have_ids_and_are_counted() -> None:
    app, counted = guarded(*all_models(), calls=CallLog())
    with serving(app) as url, httpx.Client(base_url=url) as client:
        assert post(client, IDENTITY, one(), {"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert len(post(client, IDENTITY, one(), {"x-request-id": "not mine"}).headers["x-request-id"]) == 24
        long = one(shape=[1, 9000], data=[0.5] * 9000)
        assert post(client, IDENTITY, long, {"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
        assert post(client, IDENTITY, one(), {"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.get("/v2/health/live").status_code == 200
    assert counted == [200, 200, 200, 403] and app.num_begun == 4


def test_calls_traces_and_restrictions_stand_before_them() -> None:
    """Whoever observes or guards inference does so on the connection, too."""
    calls, seen, sink = CallLog(), Seen(), Sink()
    calls.observe(seen)
    tracing = RequestTracing(Tracer(sink=sink), lambda name: ())
    secret = Restriction(frozenset({ApiCategory.INFERENCE}), "pass", "word")
    app, counted = guarded(*all_models(), calls=calls, tracing=tracing, restrictions=Restrictions([secret]))
    with serving(app) as url, httpx.Client(base_url=url) as client:
        refused = post(client, IDENTITY, one(), {})
        assert refused.json() == {"error": "This API is restricted, expecting header 'pass'"}
        answer = post(client, IDENTITY, one(), {"pass": "word", "x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    size = int(answer.request.headers["content-length"])
    assert seen.ended == [(403, 0, True), (200, size, True)] and counted == [403, 200] and app.num_begun == 2
    assert [each.root.attributes["http.response.status_code"] for each in sink.kept] == [403, 200]
    assert [each.name for each in sink.kept[1].spans][1:] == ["infer identity"]


@pytest.mark.parametrize("is_observed", [False, True])
def test_a_disconnect_cancels_and_counts(is_observed: bool) -> None:
    calls, seen = CallLog(), Seen()
    calls.observe(seen)
    calls.is_active = is_observed
    model = held(is_decoupled=False)
    app, counted = guarded(model, calls=calls)
    with serving(app) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        with connect(str(client.base_url)) as connection:
            connection.sendall(raw_request(HELD_BODY, "/v2/models/held/infer"))
            assert model.started.wait(PATIENCE_S)
        assert model.cancelled.wait(PATIENCE_S)
        assert client.get("/v2/health/live").status_code == 200
    assert counted == [499] and seen.ended == [(499, len(HELD_BODY), False)] * is_observed


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
