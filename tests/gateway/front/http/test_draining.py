"""A server that takes no more connections ends those that it has without losing a request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sluice.gateway.front.http import server
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import listen, listener_url

IDLE_S = 0.3
REQUEST = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"


class Draining:
    """A server with an answer that ends when it is told to."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self._listener = listen("127.0.0.1", 0, "--http-port")
        routes = [Route("/slow", self._slow), Route("/", self._quick)]
        self.server = HttpServer(Starlette(routes=routes), self._listener)

    async def _slow(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"begun"
            await self.ends.wait()
            yield b"ended"

        return StreamingResponse(pieces())

    async def _quick(self, request: Request) -> Response:
        return Response(b"quick")

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        address = urlsplit(listener_url(self._listener))
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            yield reader, writer
        finally:
            writer.close()


@pytest.fixture
async def draining(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Draining]:
    monkeypatch.setattr(server, "_PATIENT_IDLE_S", IDLE_S)
    made = Draining()
    made.server.start()
    yield made
    await made.server.stop(0)


async def test_a_request_behind_an_answer_that_said_nothing_is_answered(draining: Draining) -> None:
    async with draining.connected() as (reader, writer):
        writer.write(REQUEST % b"slow")
        head = await reader.readuntil(b"begun\r\n")
        assert b"connection: close" not in head
        ending = asyncio.create_task(draining.server.drain(inf))
        await asyncio.sleep(2 * IDLE_S)
        draining.ends.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(REQUEST % b"")
        answer = await reader.read()
        assert b"connection: close" in answer and answer.endswith(b"quick")
        assert await ending


async def test_an_answer_that_has_not_begun_says_that_it_is_the_last(draining: Draining) -> None:
    async with draining.connected() as (reader, writer):
        writer.write(REQUEST % b"")
        await reader.readuntil(b"quick")
        ending = asyncio.create_task(draining.server.drain(inf))
        await asyncio.sleep(0)  # it has begun
        writer.write(REQUEST % b"")
        assert b"connection: close" in await reader.read()
        assert await ending


async def test_connections_without_a_request_are_closed_in_the_end(draining: Draining) -> None:
    async with draining.connected() as (used, writer), draining.connected() as (unused, _):
        writer.write(REQUEST % b"")
        await used.readuntil(b"quick")
        assert await draining.server.drain(inf)
        assert (await used.read(), await unused.read()) == (b"", b"")
