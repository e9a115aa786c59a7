"""A real HTTP server around any application, on a loop of its own, for blocking clients."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop
from starlette.types import ASGIApp

from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import listen, listener_url
from tests.gateway.front.http.portless import client_of, listen_at
from tests.waiting import PATIENCE_S


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve `app` on a port and an event loop of its own, and yield the server's URL."""
    listener = listen("127.0.0.1", 0, "--http-port")
    with _running(app, listener):
        yield listener_url(listener)


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), PATIENCE_S)


def send(url: str, *pieces: bytes) -> bytes:
    """Return what the server answers until it closes. Each piece comes in a segment of its own."""
    with connect(url) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b""
        try:
            for piece in pieces:
                client.sendall(piece)
            while chunk := client.recv(65536):
                received += chunk
        except ConnectionError:  # closed with our bytes unread
            pass
        return received


@contextmanager
def asking(app: ASGIApp, **settings: Any) -> Iterator[httpx.Client]:
    """Serve `app` on an event loop of its own without a port, and yield a client of it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "http"
        with _running(app, listen_at(path)), client_of(path, **settings) as client:
            yield client


@contextmanager
def _running(app: ASGIApp, listener: socket.socket) -> Iterator[None]:
    server = HttpServer(app, listener)
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    loop.call_soon_threadsafe(lambda: asyncio.ensure_future(_start(server)))
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()
        listener.close()


async def _start(server: HttpServer) -> None:
    server.start()
