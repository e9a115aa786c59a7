"""Runs ASGI applications on sockets that are already open. Signals are none of its business."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from gateway.http.protocol import BoundedHttpProtocol

_KEEP_ALIVE_S = 75
"""Longer than the pools of common clients and proxies keep an idle connection, so that they close first."""


class HttpServer:
    """One application on one listening socket."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _SignallessServer(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take requests, on the running event loop."""
        self._task = asyncio.create_task(self._server.serve([self._listener]), name="http-server")

    @property
    def task(self) -> asyncio.Task[None]:
        """Runs from `start` to `stop`; ends earlier only where the server breaks."""
        assert self._task is not None, "not started"
        return self._task

    def begin_stop(self) -> None:
        """Close the listener and idle connections; busy ones go on."""
        self._server.should_exit = True

    async def stop(self, timeout_s: float) -> None:
        """Give busy connections `timeout_s` to end, then drop them."""
        self.begin_stop()
        await asyncio.wait((self.task,), timeout=timeout_s)
        self._server.force_exit = True
        await self.task


class _SignallessServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
