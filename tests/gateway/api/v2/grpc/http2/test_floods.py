"""Clients that send without end, or do not read: each is bounded, and the others are served meanwhile."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from struct import pack

import grpc
import psutil
import pytest
from h2.errors import ErrorCodes as Code

from sluice.gateway.front.http2 import connection, limits
from sluice.gateway.front.http2.frames import ConnectionFault
from tests.clock import ManualClock
from tests.gateway.api.v2.grpc.http2.calls import DEAF, ECHO, HELD, LARGE, Calls, serving_calls
from tests.gateway.api.v2.grpc.http2.client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PRIORITY,
    Client,
    connected,
    frame,
    message,
    request_fields,
    reset,
    settings,
    window_update,
)
from tests.waiting import PATIENCE_S, until

NUM_FRAMES = 3_000
LOW = {"_IDLE_FRAMES": 500, "_IDLE_FRAMES_PER_S": 50, "_RESETS": 500, "_RESETS_PER_S": 50}
"""Limits that so many frames reach, however long they take."""
MOST_BYTES = 100 << 20


@asynccontextmanager
async def bystander(calls: Calls) -> AsyncIterator[None]:
    """A stock client that asks all the time, and is answered to the end, in bounded memory."""
    answers = 0

    async def ask() -> None:
        nonlocal answers
        async with grpc.aio.insecure_channel(f"127.0.0.1:{calls.port}") as channel:
            while True:
                assert await channel.unary_unary(ECHO)(b"still there?", timeout=PATIENCE_S) == b"still there?"
                answers += 1

    asking = asyncio.ensure_future(ask())
    try:
        await until(lambda: answers)
        used = psutil.Process().memory_info().rss
        yield
        before = answers
        await until(lambda: answers >= before + 3 or asking.done())
        assert not asking.done()
        assert psutil.Process().memory_info().rss - used < MOST_BYTES
    finally:
        asking.cancel()
        await asyncio.wait((asking,))


def narrow(calls: Calls) -> None:
    """Let what the server writes to the client that connected last wait for it at once."""
    mine = max(calls.server.connections, key=lambda each: each.transport.get_extra_info("peername")[1])
    mine.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    mine.transport.set_write_buffer_limits(0)


def in_block(*frames: bytes) -> Callable[[Client], bytes]:
    return lambda client: frame(HEADERS, 0, 1, b"\x00") + b"".join(frames)


def calls_of(path: str, *behind: Callable[[int], bytes]) -> Callable[[Client], bytes]:
    """Many calls, and frames behind the head of each."""
    return lambda client: b"".join(
        client.headers(n, path) + b"".join(make(n) for make in behind) for n in range(1, 2 * NUM_FRAMES, 2)
    )


BAD = [("Bad", "x")]
FLOODS: dict[str, Callable[[Client], bytes]] = {
    "rapid reset": calls_of(HELD, reset),
    "requests that are malformed": lambda c: b"".join(c.headers(n, more=BAD) for n in range(1, NUM_FRAMES, 2)),
    "more calls than may be": calls_of(HELD, lambda n: frame(DATA, END_STREAM, n, message(b""))),
    "CONTINUATION of many bytes": in_block(*[frame(CONTINUATION, 0, 1, bytes(16_000))] * 8),
    "empty CONTINUATION": in_block(frame(CONTINUATION, 0, 1) * NUM_FRAMES),
    "SETTINGS": lambda c: settings() * NUM_FRAMES,
    "empty DATA": lambda c: c.headers(1, DEAF) + frame(DATA, 0, 1) * NUM_FRAMES,
    "empty DATA after a refusal": lambda c: c.headers(1, more=BAD) + frame(DATA, 0, 1) * NUM_FRAMES,
    "PRIORITY": lambda c: frame(PRIORITY, 0, 1, pack(">LB", 3, 1)) * NUM_FRAMES,
    "GOAWAY": lambda c: frame(7, 0, 0, bytes(8)) * NUM_FRAMES,
    "unknown frames": lambda c: frame(0x77, 0, 0) * NUM_FRAMES,
    "updates of nothing": lambda c: c.headers(1, DEAF) + window_update(1, 0) + window_update(0, 0),
}


@pytest.mark.parametrize(("seconds", "num_more"), [(0.0, 0), (2.0, 4), (1000.0, 5)])
def test_a_bucket_lets_some_pass_at_once_and_so_many_a_second(
    monkeypatch: pytest.MonkeyPatch, seconds: float, num_more: int
) -> None:
    clock = ManualClock(100.0)
    monkeypatch.setattr(limits, "monotonic", clock)
    bucket = limits.Bucket(5, 2, "frames")
    for _ in range(5):
        bucket.take()
    clock.now += seconds
    for _ in range(num_more):
        bucket.take()
    with pytest.raises(ConnectionFault, match="more than 2 frames a second"):
        bucket.take()


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_a_flood_ends_the_connection(
    flood: Callable[[Client], bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, most in LOW.items():
        monkeypatch.setattr(limits, name, most)
    caplog.set_level(logging.DEBUG, connection.__name__)
    async with serving_calls() as calls, connected(calls.port) as client:
        sent = flood(client)
        async with bystander(calls):
            client.send(sent)
            await client.until_closed()
        await calls.until_idle()
        assert not calls.num_held
        [ended] = [each.args[1] for each in caplog.records if isinstance(each.args, tuple) and len(each.args) == 2]
        assert ended == ("PROTOCOL_ERROR" if flood is FLOODS["updates of nothing"] else "ENHANCE_YOUR_CALM")
        # A client that still writes may hear of the end before it has read the reason.
        assert [Code(code).name for _, code, _ in client.goaways] in ([], [ended])


async def test_resets_of_calls_that_have_begun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Few at a time, so that no other limit is reached."""
    monkeypatch.setattr(limits, "_RESETS", 300)
    monkeypatch.setattr(limits, "_RESETS_PER_S", 10)
    caplog.set_level(logging.DEBUG, connection.__name__)
    async with serving_calls() as calls, bystander(calls), connected(calls.port) as client:
        for begin in range(1, 20_000, 100):
            client.send(*(client.request(n, HELD) + reset(n) for n in range(begin, begin + 100, 2)))
            await asyncio.sleep(0.005)
            await calls.until_idle()
            if len(calls.server.connections) == 1:
                break
        await client.until_closed()
        assert 500 < begin < 10_000
        assert "more than 10 cancelled calls a second (ENHANCE_YOUR_CALM)" in caplog.text


@pytest.mark.parametrize("kind", [PING, 4], ids=["PING", "SETTINGS"])
async def test_answers_that_nobody_reads(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed, although its last frames never leave."""
    monkeypatch.setattr(connection, "_CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(limits, "_IDLE_FRAMES", 1 << 30)
    monkeypatch.setattr(limits, "MAX_UNSENT_ANSWERS", 100)
    async with serving_calls() as calls, connected(calls.port, reads=False) as client:
        one = frame(PING, 0, 0, bytes(8)) if kind == PING else settings()
        await until(lambda: calls.server.connections)
        narrow(calls)
        async with asyncio.timeout(PATIENCE_S):
            while calls.server.connections:
                if client.num_unsent < 1 << 20:
                    client.send(one * 2_000)
                await asyncio.sleep(0)


async def test_responses_that_nobody_reads() -> None:
    """The server reads no more from a client that reads nothing, and goes on with one that reads after all.

    Each request has 15 bytes, and each response has 3 KB.
    """
    fields = request_fields(more=[("grpc-encoding", "x" * 3000)])  # the table has room for the others beside it
    async with serving_calls() as calls, bystander(calls), connected(calls.port, reads=False) as client:
        client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, client.block(fields)))
        block, numbers = client.block(fields), range(3, 100_003, 2)
        client.send(*(frame(HEADERS, END_HEADERS | END_STREAM, n, block) for n in numbers))
        await until(lambda: any(each.is_write_paused for each in calls.server.connections))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{calls.port}") as channel:
            for _ in range(50):
                assert await channel.unary_unary(ECHO)(b"x", timeout=PATIENCE_S) == b"x"
        assert max(each.transport.get_write_buffer_size() for each in calls.server.connections) < 4 << 20
        taken = max(each._last_id for each in calls.server.connections)
        assert taken < numbers.stop / 4
        client.read()
        last = client.stream(taken + 1000)
        await client.until(lambda: last.is_done)


async def test_settings_in_thousands_over_thousands_of_streams() -> None:
    async with serving_calls() as calls, bystander(calls), connected(calls.port, {INITIAL_WINDOW_SIZE: 0}) as client:
        client.send(*(client.request(n, LARGE, b"10") for n in range(1, 2000, 2)))
        await client.until(lambda: sum(bool(each.blocks) for each in client.streams.values()) == 1000)
        many = settings(*((INITIAL_WINDOW_SIZE, n % 2) for n in range(2700)))
        client.send(many * 30)
        await client.until(lambda: client.num_acks == 31)
        assert len(client.stream(1).data) == 1


async def test_updates_of_thousands_of_windows() -> None:
    """Every stream waits for the connection's window, then each gets a byte at a time."""
    async with serving_calls() as calls, bystander(calls), connected(calls.port, {INITIAL_WINDOW_SIZE: 0}) as client:
        numbers = range(1, 2000, 2)
        client.send(*(client.request(n, LARGE, b"5") for n in numbers))
        await client.until(lambda: sum(bool(each.blocks) for each in client.streams.values()) == 1000)
        client.send(*(window_update(n, 1) for _ in range(10) for n in numbers))
        await client.until(lambda: sum(each.is_ended for each in client.streams.values()) == 1000)
        assert all(client.stream(n).messages == [bytes(5)] for n in numbers)


async def test_streams_without_windows_that_are_reset_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_RESETS", 1 << 30)
    own = {INITIAL_WINDOW_SIZE: 1 << 20}
    async with serving_calls() as calls, bystander(calls), connected(calls.port, own) as client:
        client.send(client.request(1, LARGE, b"100000"))
        await client.until(lambda: len(client.stream(1).data) == 65_535)  # the connection's window is used up
        for begin in range(3, 4_003, 200):
            numbers = range(begin, begin + 200, 2)
            client.send(*(client.request(n, LARGE, b"10000") for n in numbers))
            await client.until(lambda numbers=numbers: all(client.stream(n).blocks for n in numbers))  # type: ignore[misc]
            client.send(*(reset(n) for n in numbers))
        client.send(reset(1))
        await calls.until_idle()
        [mine] = [each for each in calls.server.connections if each._last_id > 4_000]
        assert not mine._ready


@pytest.mark.parametrize("path", [DEAF, HELD])
async def test_messages_of_nothing(path: str) -> None:
    """A window full of empty messages: those of a unary call are refused as soon as there are two."""
    async with serving_calls() as calls, bystander(calls), connected(calls.port) as client:
        client.send(client.headers(1, path), frame(DATA, 0, 1, message(b"") * 3276) * 64)
        if path == HELD:
            assert (await client.end_of(1)).status == 12
        assert (await client.ask(3)).messages == [b"hello"]


async def test_bytes_one_by_one_of_long_messages() -> None:
    """A message of 20 kB in frames of two bytes."""
    async with serving_calls() as calls, bystander(calls), connected(calls.port) as client:
        whole = message(bytes(20_001))
        client.gives_windows = True
        client.send(client.headers(1))
        pieces = [frame(DATA, 0, 1, whole[at : at + 2]) for at in range(0, len(whole), 2)]
        client.send(b"".join(pieces), frame(DATA, END_STREAM, 1))
        assert (await client.end_of(1)).messages == [bytes(20_001)]


async def test_acknowledgements_cost_nothing() -> None:
    async with serving_calls() as calls, bystander(calls), connected(calls.port) as client:
        client.send((frame(4, ACK, 0) + frame(PING, ACK, 0, bytes(8))) * NUM_FRAMES)
        assert (await client.ask(1)).messages == [b"hello"]


async def test_a_client_that_never_says_what_it_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PREFACE_TIMEOUT_S", 0.05)
    async with serving_calls() as calls, connected(calls.port, sends_preface=False) as client:
        client.send(b"PRI * HTT")
        await client.until_closed()


async def test_blocks_larger_than_they_look() -> None:
    """A few bytes that refer to a long field of the table over and over."""
    async with serving_calls() as calls, bystander(calls), connected(calls.port) as client:
        first = client.headers(1, more=[("x-long", "v" * 3900)], flags=END_HEADERS | END_STREAM)
        client.send(first, frame(HEADERS, END_HEADERS | END_STREAM, 3, b"\xbe" * 16_000))
        await client.until_closed()
        assert client.goaways[-1][1] == Code.ENHANCE_YOUR_CALM
