"""WebSocket connections: messages in whatever frames and pieces they come, pings, and the end of the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Frame, Opcode

from sluice.gateway.front.http import websocket
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.http.switching import UPGRADE, Upgrade
from sluice.gateway.front.http.websocket import MessageSocket, accept_headers
from sluice.gateway.front.listeners import listen, listener_url
from tests.waiting import PATIENCE_S, until

MAX_BYTES = 1000


class Wire(asyncio.Transport):
    """The server's end of a connection, which notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_read = True

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.is_read = False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


def opened() -> tuple[MessageSocket, Wire]:
    socket, wire = MessageSocket(set(), MAX_BYTES), Wire()
    socket.connection_made(wire)
    return socket, wire


def frames_of(text: str, cuts: list[int]) -> bytes:
    """Return a message as several masked frames, with a ping between them."""
    payload = text.encode()
    places = sorted({0, *(cut % (len(payload) + 1) for cut in cuts), len(payload)})
    parts = [payload[start:end] for start, end in pairwise(places)] or [b""]
    sent = b""
    for number, part in enumerate(parts):
        opcode = Opcode.CONT if number else Opcode.TEXT
        sent += Frame(opcode, part, fin=number == len(parts) - 1).serialize(mask=True)
        sent += Frame(Opcode.PING, b"x").serialize(mask=True)
    return sent


texts = st.text(max_size=40)


@given(
    messages=st.lists(st.tuples(texts, st.lists(st.integers(0, 200), max_size=4)), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 500), max_size=8),
)
def test_messages_are_whole_however_they_are_cut(messages: list[tuple[str, list[int]]], cuts: list[int]) -> None:
    async def run() -> None:
        socket, _ = opened()
        sent = b"".join(frames_of(*each) for each in messages)
        places = sorted({0, *(cut % (len(sent) + 1) for cut in cuts), len(sent)})
        for start, end in pairwise(places):
            socket.data_received(sent[start:end])
        for text, _ in messages:
            received = await asyncio.wait_for(socket.receive(), PATIENCE_S)
            assert received is not None and received.body.decode() == text

    asyncio.run(run())


async def test_of_a_message_that_is_too_long_nothing_is_kept() -> None:
    socket, _ = opened()
    socket.data_received(Frame(Opcode.TEXT, b"x" * MAX_BYTES, fin=False).serialize(mask=True))
    for _ in range(50):
        socket.data_received(Frame(Opcode.CONT, b"x" * MAX_BYTES, fin=False).serialize(mask=True))
    assert socket._message is not None and not socket._message.body
    socket.data_received(Frame(Opcode.CONT, b"").serialize(mask=True))
    received = await socket.receive()
    assert received is not None and "at most 1000 bytes" in str(received.problem)


async def test_messages_that_nobody_receives_are_not_read_from_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_TURN_S", inf)
    socket, wire = opened()
    socket.data_received(frames_of("a" * 50, []) * 1000)
    assert not wire.is_read and len(socket._queue) < 100
    for _ in range(1000):
        await socket.receive()
    await until(lambda: wire.is_read)


async def test_pings_of_a_client_that_reads_nothing_get_no_pongs() -> None:
    socket, wire = opened()
    ping = Frame(Opcode.PING, b"x").serialize(mask=True)
    socket.data_received(ping)
    assert len(wire.written) == 1
    socket.pause_writing()
    socket.data_received(ping * 100)
    assert len(wire.written) == 1


async def test_a_flood_of_frames_leaves_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_TURN_S", 0.0)
    socket, wire = opened()
    socket.data_received(Frame(Opcode.PONG, b"").serialize(mask=True) * 10_000)
    num_left = len(socket._unread)
    assert num_left and not wire.is_read
    await until(lambda: len(socket._unread) < num_left)
    await until(lambda: wire.is_read)


async def test_others_have_their_turn_between_two_reads_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_SHORT_TURN_S", 0.0)
    socket, wire = opened()
    socket.data_received(Frame(Opcode.PONG, b"").serialize(mask=True))
    assert not socket._unread and not wire.is_read
    await until(lambda: wire.is_read)


async def test_a_silent_connection_gets_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_S", 0.001)
    _, wire = opened()
    await until(lambda: wire.written)
    assert wire.written[0] == Frame(Opcode.PING, b"").serialize(mask=False)


class Echo:
    """An application that answers each message with itself once it may."""

    socket_paths = ("/",)

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_received = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        upgrade: Upgrade = scope["extensions"][UPGRADE]
        socket = upgrade.protocol = MessageSocket(upgrade.connections, MAX_BYTES)
        headers = accept_headers({name.decode(): value.decode() for name, value in scope["headers"]})
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 101, "headers": pairs})
        while (message := await socket.receive()) is not None:
            socket.num_open += 1
            self.num_received += 1
            await self.may_answer.wait()
            socket.write_now(bytes(message.body))
            socket.finish_one()


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[Echo, HttpServer, ClientConnection]]:
    echo, listener = Echo(), listen("127.0.0.1", 0, "--http-port")
    server = HttpServer(echo, listener)
    server.start()
    async with connect(f"ws{listener_url(listener).removeprefix('http')}/") as client:
        yield echo, server, client
    await server.stop(0)


async def test_a_server_that_drains_answers_what_it_has_and_closes() -> None:
    async with echoing() as (echo, server, client):
        await client.send("a")
        await until(lambda: echo.num_received)
        [connection] = server._server.server_state.connections
        connection.shutdown()
        echo.may_answer.set()
        assert await client.recv() == "a"
        with pytest.raises(ConnectionClosedError) as closed:
            await client.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == websocket.SERVICE_RESTART
        assert await server.drain(PATIENCE_S)
