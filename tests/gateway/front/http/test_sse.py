"""Event streams through a real server: what a client sees of errors, and what a generator sees of clients."""

import asyncio
import re
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import Call, CallLog, CallObserver
from sluice.gateway.front.http.errors import install_error_handlers, openai_error_body
from sluice.gateway.front.http.guard import Guard, GuardMiddleware
from sluice.gateway.front.http.sse import PLACEHOLDER, EventStreamResponse, TextFrame, event_frame, push_all
from sluice.pipelines.llm.activity import held_listener
from tests.gateway.front.http.plain_server import connect, serving
from tests.waiting import PATIENCE_S

Frames = Callable[[], AsyncGenerator[bytes, None]]


def encode_error(error: SluiceError) -> bytes:
    return b"data: " + openai_error_body(error) + b"\n\n"


def guard(calls: CallLog) -> Guard:
    return Guard(calls, lambda path, status: None, lambda path: "openai")


def app(frames: Frames, keep_alive_s: float = 0.0) -> Starlette:
    async def stream(request: Request) -> EventStreamResponse:
        return EventStreamResponse(
            partial(push_all, frames()), encode_error, {"x-extra": "1"}, keep_alive_s=keep_alive_s
        )

    made = Starlette(routes=[Route("/", stream)], middleware=[Middleware(GuardMiddleware, guard=guard(CallLog()))])
    install_error_handlers(made)
    return made


async def two_frames() -> AsyncGenerator[bytes, None]:
    yield b"data: 1\n\n"
    yield b""  # an event without text: it must not become the empty chunk that ends a response
    yield b"data: 2\n\n"


async def no_frames() -> AsyncGenerator[bytes, None]:
    for frame in list[bytes]():
        yield frame


async def fails_first() -> AsyncGenerator[bytes, None]:
    raise SluiceError(ErrorCode.OVERLOADED, "queue is full", retry_after_s=2)
    yield b""


async def fails_later() -> AsyncGenerator[bytes, None]:
    yield b"data: 1\n\n"
    raise SluiceError(ErrorCode.UNAVAILABLE, "the engine died")


async def breaks_later() -> AsyncGenerator[bytes, None]:
    yield b"data: 1\n\n"
    raise ZeroDivisionError("a bug at /srv/secret.py")


def note_held() -> None:
    """Say as a model does that its engine is yet to start."""
    listener = held_listener.get()
    if listener is not None:
        listener()


async def starts_late() -> AsyncGenerator[bytes, None]:
    note_held()
    await asyncio.sleep(0.2)
    yield b"data: 1\n\n"


async def never_starts() -> AsyncGenerator[bytes, None]:
    note_held()
    await asyncio.sleep(0.2)
    raise SluiceError(ErrorCode.UNAVAILABLE, "no engine has started")
    yield b""


def test_the_answer_to_a_request_that_waits_for_an_engine_begins_with_comments() -> None:
    with serving(app(starts_late, keep_alive_s=0.02)) as url:
        response = httpx.get(url)
    assert re.fullmatch(r"(: keep-alive\n\n)+data: 1\n\n", response.text)
    with serving(app(never_starts, keep_alive_s=0.02)) as url:
        response = httpx.get(url)
    assert response.status_code == 200
    assert re.fullmatch(r"(: keep-alive\n\n)+data: {.*no engine has started.*}\n\n", response.text)


def test_without_comments_its_failure_has_a_status_of_its_own() -> None:
    for keep_alive_s in (0.0, 600.0):
        with serving(app(never_starts, keep_alive_s)) as url:
            assert httpx.get(url).status_code == 503


def test_a_clean_stream() -> None:
    with serving(app(two_frames)) as url:
        response = httpx.get(url, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    assert response.text == "data: 1\n\ndata: 2\n\n"
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert (response.headers["x-extra"], response.headers["x-request-id"]) == ("1", "mine")


def test_frames_are_counted_in_their_call() -> None:
    """The bytes of an answer are those of all its frames, whether or not the connection takes pieces."""
    calls, ended = CallLog(), list[Call]()
    calls.observe(Ended(ended))
    inner = app(two_frames)
    inner.add_middleware(GuardMiddleware, guard=guard(calls))
    with serving(inner) as url:
        text = httpx.get(url).text
    assert text.count("data: ") == 2
    assert [call.bytes_out for call in ended] == [len(text)]


def test_a_failure_that_nobody_expected_has_its_status_in_its_call() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("secret")

    calls, ended = CallLog(), list[Call]()
    calls.observe(Ended(ended))
    with serving(GuardMiddleware(failing, guard(calls))) as url:
        answer = httpx.get(url)
    assert answer.status_code == 500 and "secret" not in answer.text
    assert [(call.status, call.bytes_out) for call in ended] == [(500, len(answer.content))]


class Ended(CallObserver):
    """Keeps calls that have ended."""

    def __init__(self, ended: list[Call]) -> None:
        self._ended = ended

    def end(self, call: Call) -> None:
        self._ended.append(call)


def test_only_the_head_of_a_stream_is_sent_where_no_more_was_asked_for() -> None:
    with serving(app(two_frames)) as url, ask(url, b"HEAD") as client:
        client.sendall(b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"data:" not in answer


def test_a_stream_without_events_is_empty() -> None:
    with serving(app(no_frames)) as url:
        response = httpx.get(url)
    assert (response.status_code, response.text) == (200, "")


def test_an_error_before_the_first_event_is_an_http_error() -> None:
    with serving(app(fails_first)) as url:
        response = httpx.get(url)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["message"] == "queue is full"


def test_a_later_error_is_the_last_event() -> None:
    with serving(app(fails_later)) as url:
        response = httpx.get(url)
    assert response.status_code == 200
    first, last, end = response.text.split("\n\n")
    assert (first, end) == ("data: 1", "")
    assert '"message":"the engine died"' in last


def test_a_bug_shows_its_request_id_and_nothing_else() -> None:
    with serving(app(breaks_later)) as url:
        response = httpx.get(url, headers={"x-request-id": "r-7"})
    assert "secret" not in response.text
    assert "request id r-7" in response.text


class Watched:
    """A stream that waits for ever after `num_frames` frames, and records when it is closed."""

    def __init__(self, num_frames: int) -> None:
        self.waiting = threading.Event()
        self.closed = threading.Event()
        self._num_frames = num_frames

    async def frames(self) -> AsyncGenerator[bytes, None]:
        try:
            for _ in range(self._num_frames):
                yield b"data: x\n\n"
            self.waiting.set()
            await asyncio.Event().wait()
        finally:
            self.closed.set()


def ask(url: str, method: bytes = b"GET") -> socket.socket:
    """A client that has sent a request and reads nothing."""
    client = connect(url)
    client.sendall(b"%b / HTTP/1.1\r\nhost: test\r\n\r\n" % method)
    return client


@pytest.mark.parametrize("num_frames", [0, 1])
def test_a_client_that_leaves_closes_the_stream_queued_or_not(num_frames: int) -> None:
    watched = Watched(num_frames)
    with serving(app(watched.frames)) as url, ask(url) as client:
        assert watched.waiting.wait(PATIENCE_S)
        assert not watched.closed.is_set()
        client.close()
        assert watched.closed.wait(PATIENCE_S)


PING = b": keep-alive\n\n"


def read_until(client: socket.socket, ending: bytes) -> bytes:
    found = b""
    while not found.endswith(ending):
        piece = client.recv(65536)
        assert piece, found
        found += piece
    return found


def chunk(frame: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(frame), frame)


def test_silence_within_a_stream_is_broken_and_its_frames_stay_whole() -> None:
    asked: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def frames() -> AsyncGenerator[bytes, None]:
        for frame in (b"data: 1\n\n", b"data: 2\n\n"):
            yield frame
            asked.append((asyncio.get_running_loop(), asyncio.Event()))
            await asked[-1][1].wait()

    with serving(app(frames, keep_alive_s=0.04)) as url, ask(url) as client:
        for number in (b"1", b"2"):
            answer = read_until(client, chunk(PING) * 2)
            assert answer.endswith(chunk(b"data: %b\n\n" % number) + chunk(PING) * 2)
            loop, event = asked[-1]
            loop.call_soon_threadsafe(event.set)
        rest = read_until(client, b"0\r\n\r\n")
    assert rest.replace(chunk(PING), b"") == b"0\r\n\r\n"


def test_nothing_is_sent_before_the_first_frame_nor_by_default() -> None:
    """Up to the first frame a failure can still have a status."""

    async def slow(*, at_start: bool) -> AsyncGenerator[bytes, None]:
        for is_later in (False, True):
            if is_later is not at_start:
                await asyncio.sleep(0.1)
            yield b"data: x\n\n"

    for keep_alive_s, at_start in ((0.01, True), (0.0, False)):
        with serving(app(lambda first=at_start: slow(at_start=first), keep_alive_s)) as url:  # type: ignore[misc]
            assert httpx.get(url).content == b"data: x\n\n" * 2


def test_a_client_that_reads_nothing_holds_the_stream_back_and_may_still_leave() -> None:
    is_blocked, closed = threading.Event(), threading.Event()

    async def flood() -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        # Once a write waits for the client, the next frame is not asked for and the timer fires.
        timer = loop.call_later(60, is_blocked.set)
        try:
            while True:
                timer.cancel()
                timer = loop.call_later(0.2, is_blocked.set)
                yield b"x" * 65536
                await asyncio.sleep(0)  # as every real stream waits for something
        finally:
            closed.set()

    with serving(app(flood)) as url, ask(url) as client:
        assert is_blocked.wait(PATIENCE_S)
        assert not closed.is_set()
        client.close()
        assert closed.wait(PATIENCE_S)


@given(st.text())
def test_a_filled_frame_is_the_event_with_that_text(text: str) -> None:
    payload = {"id": PLACEHOLDER, "choices": [{"delta": {"content": PLACEHOLDER}, "finish_reason": None}]}
    filled = TextFrame.around(payload).fill(text)
    payload["choices"] = [{"delta": {"content": text}, "finish_reason": None}]
    assert orjson.loads(filled.removeprefix(b"data: ")) == payload
    assert filled.count(b"\n") == 2
    assert filled.endswith(b"\n\n")


def test_an_event_is_one_line_of_data_and_an_empty_one() -> None:
    assert event_frame({"text": "a\nb"}) == b'data: {"text":"a\\nb"}\n\n'
