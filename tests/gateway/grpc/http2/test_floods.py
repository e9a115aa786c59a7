"""Clients that send without end, or do not read: each is bounded, and the others are served meanwhile."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from struct import pack
from time import thread_time

import grpc
import psutil
import pytest
from h2.errors import ErrorCodes as Code

from gateway.grpc.http2 import connection, limits
from gateway.options.grpc import GrpcOptions
from tests.gateway.grpc.http2.calls import DEAF, ECHO, HELD, LARGE, Calls, serving_calls
from tests.gateway.grpc.http2.client import (
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

NUM_FRAMES = 20_000
MOST_S = 2.0
"""Longest turn of the loop, in seconds of its thread: the client's part is in it. The server's own are some 10 ms, and
those of floods that are not bounded some minutes."""
MOST_BYTES = 100 << 20
LOOK_S = 0.001
"""Rest between two questions, and between two looks at the loop: few turns are in one look, and the longest is."""


@asynccontextmanager
async def bystander(calls: Calls) -> AsyncIterator[Callable[[], int]]:
    """A stock client that asks all the time. Yields how often it was answered; checks the loop's turns and memory."""
    answers, longest = 0, 0.0

    async def ask() -> None:
        nonlocal answers
        async with grpc.aio.insecure_channel(f"127.0.0.1:{calls.port}") as channel:
            while True:
                assert await channel.unary_unary(ECHO)(b"still there?", timeout=PATIENCE_S) == b"still there?"
                answers += 1
                await asyncio.sleep(LOOK_S)

    async def tick() -> None:
        nonlocal longest
        while True:
            before = thread_time()
            await asyncio.sleep(LOOK_S)
            longest = max(longest, thread_time() - before)

    asking, ticking = asyncio.ensure_future(ask()), asyncio.ensure_future(tick())
    gc.collect()
    gc.disable()  # a collection of all that the process of the tests holds takes longer than any turn
    try:
        await until(lambda: answers)
        used = psutil.Process().memory_info().rss
        yield lambda: answers
        before = answers
        while answers < before + 3:
            assert not asking.done()
            await asyncio.sleep(0.001)
        assert psutil.Process().memory_info().rss - used < MOST_BYTES
        assert longest < MOST_S
    finally:
        gc.enable()
        for each in (asking, ticking):
            each.cancel()
        await asyncio.wait((asking, ticking))


def in_block(*frames: bytes) -> Callable[[Client], bytes]:
    return lambda client: frame(HEADERS, 0, 1, b"\x00") + b"".join(frames)


def rapid_reset(client: Client) -> bytes:
    return b"".join(client.headers(n, HELD) + reset(n) for n in range(1, NUM_FRAMES, 2))


def bad_requests(client: Client) -> bytes:
    return b"".join(client.headers(n, more=[("Bad", "x")]) for n in range(1, NUM_FRAMES, 2))


def held_calls(client: Client) -> bytes:
    return b"".join(client.request(n, HELD) for n in range(1, NUM_FRAMES, 2))


def empty_data(client: Client) -> bytes:
    return client.headers(1, DEAF) + frame(DATA, 0, 1) * NUM_FRAMES


def empty_data_after_a_refusal(client: Client) -> bytes:
    return client.headers(1, more=[("Bad", "x")]) + frame(DATA, 0, 1) * NUM_FRAMES


FLOODS: dict[str, Callable[[Client], bytes]] = {
    "rapid reset": rapid_reset,
    "requests that are malformed": bad_requests,
    "more calls than may be": held_calls,
    "CONTINUATION of many bytes": in_block(*[frame(CONTINUATION, 0, 1, bytes(16_000))] * 8),
    "empty CONTINUATION": in_block(frame(CONTINUATION, 0, 1) * NUM_FRAMES),
    "SETTINGS": lambda c: settings() * NUM_FRAMES,
    "empty DATA": empty_data,
    "empty DATA after a refusal": empty_data_after_a_refusal,
    "PRIORITY": lambda c: frame(PRIORITY, 0, 1, pack(">LB", 3, 1)) * NUM_FRAMES,
    "GOAWAY": lambda c: frame(7, 0, 0, bytes(8)) * NUM_FRAMES,
    "unknown frames": lambda c: frame(0x77, 0, 0) * NUM_FRAMES,
    "updates of nothing": lambda c: c.headers(1, DEAF) + window_update(1, 0) + window_update(0, 0),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_a_flood_ends_the_connection(flood: Callable[[Client], bytes], caplog: pytest.LogCaptureFixture) -> None:
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
    options = GrpcOptions(port=0, http2_max_ping_strikes=0)
    async with serving_calls(options) as calls, bystander(calls), connected(calls.port, reads=False) as client:
        one = frame(PING, 0, 0, bytes(8)) if kind == PING else settings()
        await _flood_until_closed(calls, client, one * 2_000)


async def _flood_until_closed(calls: Calls, client: Client, part: bytes) -> None:
    """Send `part` again and again. The client's sockets take what they can; the server's memory may not."""
    async with asyncio.timeout(PATIENCE_S):
        while len(calls.server.connections) > 1:
            if client.num_unsent < 1 << 20:
                client.send(part)
            await asyncio.sleep(0.001)


async def test_responses_that_nobody_reads() -> None:
    """The server reads no more from a client that reads nothing, and goes on with one that reads after all.

    Each request has 15 bytes, and each response has 3 KB.
    """
    fields = request_fields(more=[("grpc-encoding", "x" * 3000)])  # the table has room for the others beside it
    async with serving_calls() as calls, bystander(calls), connected(calls.port, reads=False) as client:
        client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, client.block(fields)))
        block, number, loop = client.block(fields), 3, asyncio.get_running_loop()
        full = loop.time() + 0.2
        while loop.time() < full:
            if client.num_unsent < 1 << 16:
                many = range(number, number + 20_000, 2)
                client.send(*(frame(HEADERS, END_HEADERS | END_STREAM, n, block) for n in many))
                number += 20_000
                full = loop.time() + 0.2
            await asyncio.sleep(0.001)
        assert max(each.transport.get_write_buffer_size() for each in calls.server.connections) < 4 << 20
        taken = max(each._last_id for each in calls.server.connections)
        assert taken < number / 4
        client.read()
        last = client.stream(taken + 1000)
        await client.until(lambda: last.is_done)


async def test_settings_in_thousands_over_thousands_of_streams() -> None:
    async with serving_calls() as calls, bystander(calls), connected(calls.port, {INITIAL_WINDOW_SIZE: 0}) as client:
        client.send(*(client.request(n, LARGE, b"10") for n in range(1, 4000, 2)))
        await client.until(lambda: sum(bool(each.blocks) for each in client.streams.values()) == 2000)
        many = settings(*((INITIAL_WINDOW_SIZE, n % 2) for n in range(2700)))
        client.send(many * 100)
        await client.until(lambda: client.num_acks == 101)
        assert len(client.stream(1).data) == 1


async def test_updates_of_thousands_of_windows() -> None:
    """Every stream waits for the connection's window, then each gets a byte at a time."""
    async with serving_calls() as calls, bystander(calls), connected(calls.port, {INITIAL_WINDOW_SIZE: 0}) as client:
        numbers = range(1, 4000, 2)
        client.send(*(client.request(n, LARGE, b"5") for n in numbers))
        await client.until(lambda: sum(bool(each.blocks) for each in client.streams.values()) == 2000)
        client.send(*(window_update(n, 1) for _ in range(10) for n in numbers))
        await client.until(lambda: sum(each.is_ended for each in client.streams.values()) == 2000)
        assert all(client.stream(n).messages == [bytes(5)] for n in numbers)


async def test_streams_without_windows_that_are_reset_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_RESETS", 1 << 30)
    own = {INITIAL_WINDOW_SIZE: 1 << 20}
    async with serving_calls() as calls, bystander(calls), connected(calls.port, own) as client:
        client.send(client.request(1, LARGE, b"100000"))
        await client.until(lambda: len(client.stream(1).data) == 65_535)  # the connection's window is used up
        for begin in range(3, 10_003, 200):
            numbers = range(begin, begin + 200, 2)
            client.send(*(client.request(n, LARGE, b"10000") for n in numbers))
            await client.until(lambda numbers=numbers: all(client.stream(n).blocks for n in numbers))  # type: ignore[misc]
            client.send(*(reset(n) for n in numbers))
        client.send(reset(1))
        await calls.until_idle()
        [mine] = [each for each in calls.server.connections if each._last_id > 10_000]
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
    """A message of 500 kB in frames of two bytes."""
    async with serving_calls() as calls, bystander(calls), connected(calls.port) as client:
        whole = message(bytes(500_001))
        client.gives_windows = True
        client.send(client.headers(1))
        pieces = [frame(DATA, 0, 1, whole[at : at + 2]) for at in range(0, len(whole), 2)]
        client.send(b"".join(pieces), frame(DATA, END_STREAM, 1))
        assert (await client.end_of(1)).messages == [bytes(500_001)]


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
