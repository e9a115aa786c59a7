"""Where a request ends and its answer ends: options that are declined, HEAD, HTTP/1.0, and bytes in any pieces."""

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sluice.gateway.front.http import protocol
from tests.gateway.front.http.live import LiveServer
from tests.gateway.front.http.plain_server import send, serving

WISHES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "websocket": b"connection: keep-alive\r\nConnection: upgrade\r\nupgrade: websocket\r\n",
    "unknown": b"Connection: upgrade\r\nUpgrade: foo/2, bar\r\nUPGRADE: baz\r\n",
    "expect": b"Connection: upgrade\r\nUpgrade: TLS/1.0\r\nExpect: 100-continue\r\n",
}
CLOSE = b"connection: close\r\n"


async def say(request: Request) -> Response:
    """Answer with what came."""
    body = await request.body()
    return JSONResponse([request.method, request.url.path, request.url.query, body.decode("latin-1")])


async def count(request: Request) -> Response:
    async def numbers() -> AsyncIterator[bytes]:
        for number in range(3):
            yield b"%d\n" % number

    return StreamingResponse(numbers(), headers={"x-kind": "stream"})


async def refuse(request: Request) -> Response:
    return Response("no", 401)


async def names(request: Request) -> Response:
    await request.body()
    return JSONResponse(sorted(request.headers))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    routes = [
        Route("/count", count, methods=["GET", "POST"]),
        Route("/refuse", refuse, methods=["GET", "POST"]),
        Route("/names", names, methods=["POST"]),
        Route("/{path:path}", say, methods=["GET", "POST", "OPTIONS"]),
    ]
    with serving(Starlette(routes=routes)) as url:
        yield url


def parts(received: bytes) -> list[tuple[int, bytes]]:
    """Return the status and the body of each answer, where none has chunks."""
    _, *found = re.split(rb"HTTP/1\.1 (\d{3}) ", received)
    return [(int(status), rest.partition(b"\r\n\r\n")[2]) for status, rest in zip(found[::2], found[1::2], strict=True)]


def said(method: str, path: str, body: bytes = b"", query: str = "") -> tuple[int, bytes]:
    return 200, json.dumps([method, path, query, body.decode()], separators=(",", ":")).encode()


def post(path: bytes, body: bytes, headers: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (path, headers, len(body), body)


def test_a_chunked_body_of_a_request_to_change_the_protocol_is_read(url: str) -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    answers = parts(send(url, head, b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n" + post(b"/b", b"", CLOSE)))
    assert answers == [said("POST", "/a", b"hello"), said("POST", "/b")]


def test_many_requests_to_change_the_protocol_in_one_segment_are_answered(url: str) -> None:
    wish = b"GET /%d HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    answers = parts(send(url, b"".join(wish % number for number in range(100)) + post(b"/b", b"", CLOSE)))
    assert answers == [*(said("GET", f"/{number}") for number in range(100)), said("POST", "/b")]


def test_a_head_that_asks_for_an_upgrade_is_bounded(url: str) -> None:
    wish = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
    long = wish + b"x: %b\r\n\r\n" % (b"y" * (protocol.MAX_HEAD_BYTES + 100))
    assert parts(send(url, long[:30_000], long[30_000:]))[-1][0] == 431


def test_fields_behind_a_body_are_no_headers(url: str) -> None:
    head = b"POST /names HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    trailers = b"authorization: Bearer x\r\nhost: y\r\n\r\n"
    assert parts(send(url, head + b"1\r\na\r\n0\r\n" + trailers)) == [
        (200, b'["connection","host","transfer-encoding"]')
    ]


FAULTS = {
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "an HTTP/1.1 request must have a Host header, got none"),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n", 400, "the request must have one Host header, got 2"),
    "two hosts, old": (b"GET / HTTP/1.0\r\nHost: a\r\nhost: a\r\n\r\n", 400, "the request must have one Host header"),
    "bad host": (b"GET / HTTP/1.1\r\nHost: a/b?c\r\n\r\n", 400, "host must be a host and port, got 'a/b?c'"),
    "connect": (b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", 405, "method CONNECT is not allowed"),
    "connect, old": (b"CONNECT a:80 HTTP/1.0\r\n\r\n", 405, "method CONNECT is not allowed"),
    "preface": (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        400,
        "the request is not valid HTTP: HTTP/2 by prior knowledge is not served here, send HTTP/1.1",
    ),
    "version 2": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505, "the request's version is HTTP/2.0; HTTP/1.1 and"),
    "no version": (b"GET /\r\n\r\n", 505, "the request's version is HTTP/0.9; HTTP/1.1 and"),
    "coding": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        501,
        "transfer-encoding must be chunked, got 'gzip, chunked'",
    ),
    "target": (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400, "the request"),
    "target beyond ASCII": (
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
        400,
        "the request is not valid HTTP: Invalid char in url path",
    ),
}


@pytest.mark.parametrize(("request_bytes", "status", "message"), FAULTS.values(), ids=FAULTS)
def test_a_head_against_the_rules_is_refused_in_words(
    url: str, request_bytes: bytes, status: int, message: str
) -> None:
    ((got, body),) = parts(send(url, request_bytes))
    assert got == status
    assert json.loads(body)["error"].startswith(message), body
    before = post(b"/a", b"1") + post(b"/b", b"2")
    *answers, (later, _) = parts(send(url, before + request_bytes))
    assert (answers, later) == ([said("POST", "/a", b"1"), said("POST", "/b", b"2")], status), "it waits for its turn"


def test_a_broken_body_of_a_waiting_request_is_refused_after_the_answers_before_it(url: str) -> None:
    broken = b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"
    answers = parts(send(url, post(b"/a", b"1") + broken))
    assert [status for status, _ in answers] == [200, 400]
    assert answers[0] == said("POST", "/a", b"1")


def test_a_refused_connect_says_what_is_allowed(url: str) -> None:
    assert b"\r\nallow: GET, HEAD, POST" in send(url, b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n")


@pytest.mark.parametrize(
    ("target", "path", "query"), [(b"http://a/b?c=d", "/b", "c=d"), (b"http://a", "/", ""), (b"http://a?c", "/", "c")]
)
def test_a_target_may_be_a_whole_url(url: str, target: bytes, path: str, query: str) -> None:
    answers = parts(send(url, b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % target))
    assert answers == [said("GET", path, query=query)]


def test_more_waiting_requests_than_the_limit_are_refused_after_their_answers(url: str) -> None:
    answers = parts(send(url, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2000))
    statuses = [status for status, _ in answers]
    assert len(statuses) > 200 and statuses == [200] * (len(statuses) - 1) + [400]


def test_the_answer_to_a_client_that_was_never_asked_for_its_body_ends_the_connection(url: str) -> None:
    head = b"POST /refuse HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    received = send(url, head)
    assert parts(received) == [(401, b"no")] and b"\r\nconnection: close\r\n" in received


def test_an_expectation_of_http_1_0_is_passed_over(url: str) -> None:
    head = b"POST /a HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n"
    assert parts(send(url, head, b"a")) == [said("POST", "/a", b"a")]


@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_a_stream_to_http_1_0_ends_with_the_connection(url: str, method: bytes) -> None:
    received = send(url, method + b" /count HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert received.endswith(b"\r\n\r\n0\n1\n2\n")
    assert b"transfer-encoding" not in received and b"\r\nconnection: close\r\n" in received


def test_an_answer_of_known_length_to_http_1_0_says_its_length(url: str) -> None:
    received = send(url, b"GET /a HTTP/1.0\r\n\r\n")
    assert parts(received) == [said("GET", "/a")] and b"\r\ncontent-length: 18\r\n" in received


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("path", [b"/a", b"/count", b"/refuse"])
def test_head_is_get_without_a_body(url: str, path: bytes, version: bytes) -> None:
    asked = b" %b HTTP/%b\r\nHost: x\r\nConnection: close\r\n\r\n" % (path, version)
    head, whole = send(url, b"HEAD" + asked), send(url, b"GET" + asked)
    assert head.endswith(b"\r\n\r\n")
    assert _lines(head) == _lines(whole.partition(b"\r\n\r\n")[0])


def _lines(head: bytes) -> list[bytes]:
    dropped = (b"date:", b"transfer-encoding:")  # there is no body to have chunks
    return [line for line in head.strip().split(b"\r\n") if not line.startswith(dropped)]


def test_a_connection_goes_on_behind_an_answer_to_head(url: str) -> None:
    asked = b"HEAD /count HTTP/1.1\r\nHost: x\r\n\r\n" * 3
    answers = parts(send(url, asked + post(b"/b", b"", CLOSE)))
    assert answers == [(200, b""), (200, b""), (200, b""), said("POST", "/b")]


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    bounds = [0, *places, len(data)]
    return [data[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize("wish", [b"", *WISHES.values()], ids=["plain", *WISHES])
def test_an_answer_does_not_depend_on_where_its_request_is_cut(url: str, wish: bytes) -> None:
    """A body that reads like a request is none, in a segment of its own either."""
    inner = b"GET /secret HTTP/1.1\r\nHost: x\r\n\r\n"
    asked = post(b"/a", inner, wish) + post(b"/b", b"", CLOSE)
    expected = [said("POST", "/a", inner), said("POST", "/b")]
    places = [[place] for place in range(0, len(asked), 1 if wish in (b"", WISHES["h2c"]) else 5)]
    for cuts in (*places, range(1, len(asked))):
        assert [each for each in parts(send(url, *cut(asked, cuts))) if each[0] != 100] == expected, cuts


def test_clients_find_the_server_as_before(url: str) -> None:
    assert httpx.post(f"{url}/a", content=iter([b"x", b"y"])).json() == ["POST", "/a", "", "xy"]
    assert httpx.head(f"{url}/a").headers["content-type"] == "application/json"


def test_every_get_route_answers_head(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    document = live.get("/openapi.json").json()
    paths = [path for path, methods in document["paths"].items() if "get" in methods]
    assert len(paths) > 30
    for path in paths:
        with live.client.stream("GET", path) as whole:  # some have no end
            head = live.request("HEAD", path)
            assert (head.status_code, head.content) == (whole.status_code, b""), path
            assert head.headers.get("content-type") == whole.headers.get("content-type"), path
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_head_of_a_route_that_only_takes_posts_is_refused(live: LiveServer) -> None:
    assert live.request("HEAD", "/v1/chat/completions").status_code == 405
