"""A real HTTP server around any application, on a loop of its own, for blocking clients."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop
from starlette.types import ASGIApp

from gateway.http.server import HttpServer
from gateway.listeners import listen, listener_url
from tests.waiting import PATIENCE_S


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve `app` on an event loop of its own, and yield the server's URL."""
    listener = listen("127.0.0.1", 0, "--http-port")
    url = listener_url(listener)
    server = HttpServer(app, listener)
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    loop.call_soon_threadsafe(lambda: asyncio.ensure_future(_start(server)))
    try:
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


async def _start(server: HttpServer) -> None:
    server.start()
