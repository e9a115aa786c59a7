"""Requests in any pieces: their answers are those of the same bytes at once, and no body is ever run as a request."""

import socket
from collections.abc import Iterator
from itertools import pairwise

import h11
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.http_target import PATIENCE_S, Target, attacking
from tests.fuzz.running import fuzzed

SECRET = b"GET /secret HTTP/1.1\r\nhost: x\r\n\r\n"
BODIES = (
    b"",
    b"{}",
    b'{"model": "tiny", "prompt": "hi"}',
    b'{"inputs": []}',
    SECRET,
    b"\r\n" + SECRET * 3,
    b"0\r\n\r\n" + SECRET,
    b"x" * 5000 + SECRET,
)
TARGETS = (
    b"/tokenize",
    b"/v2/models/tiny/infer",
    b"/v2/models/tiny/generate",
    b"/nothing",
    b"/v2/nothing",
    b"/version",
)
OPTIONS = (
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    b"upgrade: websocket\r\nconnection: keep-alive, upgrade\r\n",
    b"upgrade: a\r\nupgrade: b\r\nconnection: upgrade\r\n",
    b"upgrade: h2c\r\n",
    b"expect: 100-continue\r\n",
    b"te: trailers\r\ntrailer: x\r\n",
    b"content-encoding: br\r\n",
)
TRAILERS = (b"", b"x: y\r\n", b"host: z\r\n", b"authorization: Bearer x\r\nconnection: upgrade\r\nupgrade: h2c\r\n")
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with attacking(request.getfixturevalue("server")) as found:
        yield found


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A request, and its method."""
    method, path = draw(st.sampled_from((b"GET", b"HEAD", b"POST", b"PUT"))), draw(st.sampled_from(TARGETS))
    body = draw(st.sampled_from(BODIES))
    options = draw(st.lists(st.sampled_from(OPTIONS), max_size=2, unique=True))
    if draw(st.booleans()):
        framing, content = b"content-length: %d\r\n" % len(body), body
    else:
        framing, content = b"transfer-encoding: chunked\r\n", draw(chunks(body))
    return b"".join((method, b" ", path, b" HTTP/1.1\r\nhost: x\r\n", framing, *options, b"\r\n", content)), method


@st.composite
def chunks(draw: st.DrawFn, body: bytes) -> bytes:
    size = draw(st.sampled_from((1, 7, 100, 10_000)))
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    extension = draw(st.sampled_from((b"", b";a=b")))
    whole = b"".join(b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in pieces)
    return whole + b"0\r\n" + draw(st.sampled_from(TRAILERS)) + b"\r\n"


@fuzzed(40)
@given(st.lists(messages(), min_size=1, max_size=4), st.data())
def test_answers_do_not_depend_on_how_requests_are_cut(
    target: Target, sent: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    content, methods = b"".join(each for each, _ in sent) + LAST, [*(method for _, method in sent), b"GET"]
    places = data.draw(
        st.one_of(st.just(range(1, len(content))), st.sets(st.integers(1, len(content) - 1), max_size=9))
    )
    whole = exchange(target, [content], methods)
    cut = exchange(target, [content[a:b] for a, b in pairwise([0, *sorted(places), len(content)])], methods)
    assert cut == whole[: len(cut)]
    # An answer before a body that was never asked for ends the connection, unless the body is there already.
    assert len(cut) == len(whole) or b"expect:" in content
    assert not any(b"secret" in body for _, body in whole)
    target.check()


def exchange(target: Target, pieces: list[bytes], methods: list[bytes]) -> list[tuple[int, bytes]]:
    """Return status and body of the answers to requests with these methods; fewer where one ends the connection."""
    url = httpx.URL(target.server.base_url)
    with socket.create_connection((url.host, url.port), PATIENCE_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b""
        try:
            for piece in pieces:
                client.sendall(piece)
            while chunk := client.recv(1 << 16):
                received += chunk
        except ConnectionError:  # closed with bytes of ours unread
            pass
    return read_answers(received, methods)


def read_answers(received: bytes, methods: list[bytes]) -> list[tuple[int, bytes]]:
    """Return the answers in what was received, as a client reads them. There is nothing else in it."""
    connection, answers = h11.Connection(h11.CLIENT), []
    connection.receive_data(received)
    connection.receive_data(b"")
    for method in methods:
        connection.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        connection.send(h11.EndOfMessage())
        status, body = 0, b""
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            assert isinstance(event, h11.InformationalResponse | h11.Response | h11.Data), event
            status = getattr(event, "status_code", status)
            body += bytes(event.data) if isinstance(event, h11.Data) else b""
        answers.append((status, body))
        if connection.their_state is not h11.DONE:
            break
        connection.start_next_cycle()
    assert connection.trailing_data[0] == b""
    return answers
