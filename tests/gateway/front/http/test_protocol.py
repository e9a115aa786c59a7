"""Raw bytes at the port: whatever arrives, the next client is served."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.front.http import protocol, server
from tests.gateway.front.http.plain_server import connect, send, serving
from tests.waiting import wait_until

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    async def hello(request: Request) -> Response:
        return Response(await request.body() or b"hello")

    with serving(Starlette(routes=[Route("/", hello, methods=["GET", "POST"])])) as url:
        yield url
        assert httpx.get(url).text == "hello"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe\x80" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZZ\r\n",
    ],
)
def test_garbage_is_refused(url: str, garbage: bytes) -> None:
    answer = send(url, garbage)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert refusal(answer)["error"].startswith("the request is not valid HTTP: ")


def refusal(answer: bytes) -> dict[str, Any]:
    """Return the JSON of a refused request, whose head must name a request id."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\ncontent-type: application/json\r\n" in head and b"\r\nx-request-id: " in head
    parsed: dict[str, Any] = json.loads(body)
    return parsed


def test_what_is_no_http_is_refused_in_the_protocol_s_shape_under_the_client_s_id(url: str) -> None:
    head = (
        b"POST %s HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    answer = send(url, head % b"/v1/completions")
    assert b"\r\nx-request-id: mine\r\n" in answer
    assert refusal(answer)["error"]["type"] == "invalid_request_error"
    assert "Transfer-Encoding" in refusal(send(url, head % b"/v2"))["error"]


def test_a_broken_body_is_refused_while_its_request_waits_for_it(url: str) -> None:
    with connect(url) as client:
        client.sendall(CHUNKED + b"1\r\na\r\n")
        client.sendall(b"ZZZ\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_a_request_to_change_the_protocol_is_answered_without_advice(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    assert httpx.get(url, headers=headers).text == "hello"
    # The advice would be warnings. Errors may come from the broken bodies of the tests before.
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * protocol.MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\nx: " + b"y" * (protocol.MAX_HEAD_BYTES * 64),
        CHUNKED + b"1\r\na\r\n0\r\nx: " + b"y" * (protocol.MAX_HEAD_BYTES * 8),
    ],
    ids=["many headers", "one header", "trailers"],
)
def test_a_head_without_end_is_refused(url: str, sent: bytes) -> None:
    answer = send(url, sent)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert refusal(answer)["error"].endswith(f"exceed {protocol.MAX_HEAD_BYTES} bytes")
    assert httpx.get(url, headers={"x": "y" * (protocol.MAX_HEAD_BYTES // 2)}).status_code == 200


def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an answer the time of an idle connection counts, not that of a head."""
    monkeypatch.setattr(server, "_KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)

    async def hello(request: Request) -> Response:
        return Response(b"hello")

    with serving(Starlette(routes=[Route("/", hello)])) as url:
        # A client that is late itself gets 408, and asks again.
        wait_until(lambda: send(url, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").endswith(b"hello"))


def test_a_head_behind_a_long_body_passes(url: str) -> None:
    """One piece of what arrives may hold both, where a client was answered early and goes on to its next request."""
    body = b"y" * (protocol.MAX_HEAD_BYTES * 2)
    with connect(url) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert client.recv(65536).startswith(b"HTTP/1.1 100 ")
        client.sendall(body + b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200 ") == 2 and answer.endswith(b"hello")


def test_a_head_that_never_ends_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)
    answer = send(url, b"GET / HTTP/1.1\r\nhost: x\r\n")
    assert answer.startswith(b"HTTP/1.1 408 ") and "did not end" in refusal(answer)["error"]
    assert send(url, b"") == b""


def test_the_head_s_deadline_does_not_touch_bodies_and_answers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    with connect(url) as late:
        late.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\na")
        for _ in range(2):  # each waits for longer than a head may take
            assert send(url, b"GET / HTTP/1.1\r\nhost: x\r\n").startswith(b"HTTP/1.1 408 ")
        late.sendall(b"b")
        answer = b"".join(iter(lambda: late.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"ab")


def test_more_chunks_than_a_body_may_have_are_refused(url: str) -> None:
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    most = head + b"1\r\na\r\n" * protocol.MAX_CHUNKS
    assert send(url, most + b"0\r\n\r\n").endswith(b"a" * protocol.MAX_CHUNKS)
    answer = send(url, most + b"1\r\na\r\n" * 1000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"exceeds maximum of 65536 non-empty chunks" in answer
    assert httpx.get(url).text == "hello"


def test_half_a_request_and_away(url: str) -> None:
    for data in (b"", b"GE", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf"):
        with connect(url) as client:
            client.sendall(data)
    assert httpx.get(url).text == "hello"


def test_a_client_that_sends_on_reads_why_it_was_refused() -> None:
    async def refuse(request: Request) -> Response:
        return Response(b"too large", 413, {"connection": "close"})

    with serving(Starlette(routes=[Route("/", refuse, methods=["POST"])])) as refusing:
        size = 32 << 20
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
        assert send(refusing, head + bytes(size)).endswith(b"too large")
