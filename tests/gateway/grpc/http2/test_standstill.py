"""Pings after the server stood still: an answer that lies there unread counts."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.grpc.http2.pings import PingRules, Pings


@dataclass
class Connection:
    """As much of a connection as its pings see. It reads nothing by itself."""

    transport: asyncio.Transport
    has_read: bool = False
    has_sent: bool = False
    streams: Mapping[int, Any] = field(default_factory=lambda: {1: object()})
    sent: list[bytes] = field(default_factory=list)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def send_ping(self, payload: bytes) -> None:
        self.sent.append(payload)

    def announce_end(self) -> None: ...
    def refuse_more(self) -> None: ...
    def close(self) -> None: ...


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, socket.socket]]:
    """Yield a connection that has sent a ping and been silent since, and its client."""
    own, client = socket.socketpair()
    with client:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=own)
        transport.pause_reading()
        connection = Connection(transport)
        yield connection, client
        transport.abort()


def look_twice(connection: Connection, client: socket.socket, answer: bytes) -> None:
    """Let the time of a ping pass before anything is read."""
    pings = Pings(connection, PingRules())
    pings._probe()
    assert len(connection.sent) == 1
    client.send(answer)
    pings._probe()
    pings.close()


async def test_a_client_whose_answer_is_not_read_yet_stays() -> None:
    async with connected() as (connection, client):
        look_twice(connection, client, b"pong")
        assert not connection.transport.is_closing()


async def test_a_client_that_sent_nothing_is_dropped() -> None:
    async with connected() as (connection, client):
        look_twice(connection, client, b"")
        assert connection.transport.is_closing()
