"""Asking a server without a port: the same server, protocol and stock client, over a socket that is a file."""

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp

from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import listen, listener_url
from tests.waiting import PATIENCE_S

T = TypeVar("T")

BASE_URL = "http://sluice.test"
"""Clients without a port call the server so, and it calls itself so to them."""
_BACKLOG = 2048


def listen_at(path: Path) -> socket.socket:
    """Return a socket that listens at a path, for `HttpServer`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def connect_to(path: Path) -> socket.socket:
    """Return a connection, for bytes that no client would send."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    connection.connect(str(path))
    return connection


def client_of(path: Path, **settings: Any) -> httpx.Client:
    """Return a client of the server that listens at a path. Stock clients take it as their `http_client`."""
    transport = httpx.HTTPTransport(uds=str(path))
    return httpx.Client(base_url=BASE_URL, transport=transport, timeout=PATIENCE_S, **settings)


@asynccontextmanager
async def listening(app: ASGIApp, listener: socket.socket) -> AsyncIterator[str]:
    """Serve on the running event loop, and yield the address where that is a port."""
    server = HttpServer(app, listener)
    server.start()
    try:
        yield listener_url(listener) if listener.family is socket.AF_INET else ""
    finally:
        await server.stop(PATIENCE_S)
        listener.close()


@dataclass
class Portless:
    """A server on an event loop of its own, which may also be asked on a port."""

    path: Path
    """Where it listens."""
    app: ASGIApp
    loop: asyncio.AbstractEventLoop
    ports: AsyncExitStack
    """Closes the port, if a test has asked for one."""

    @cached_property
    def url(self) -> str:
        """The server's address on a port, which begins to listen when this is first asked for."""
        return self.run(self.ports.enter_async_context(listening(self.app, listen("127.0.0.1", 0, "--http-port"))))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, run on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)
