"""uvicorn on sockets that are already open, which drains without losing a request."""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from math import isinf
from time import monotonic
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from sluice.gateway.front.http.protocol import BoundedHttpProtocol, ConnectionState
from sluice.gateway.front.http.switching import find_socket_paths

_KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than in the pools of common clients, so that they close first."""
_IDLE_S = 2.0
"""How long a connection without a request stays open while the server drains within a time."""
_PATIENT_IDLE_S = 20.0
"""The same without a time: longer than common clients keep such a connection (httpx 5 s, aiohttp 15), so that hardly
any sends a request at the moment at which its connection is closed."""
_DRAIN_LOOK_S = 0.05
_TICK_S = 1.0


class HttpServer:
    """One application on one listening socket, with its hot routes (`app.hot`) and the paths of its WebSockets
    (`app.socket_paths`), where it has any. The process handles signals, not this server."""

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
            ),
            app,
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
        self._server.ended.set()

    def end_sockets(self) -> None:
        """Close the connections that have changed their protocol, each when it has no open answer."""
        for each in list(self._server.server_state.connections):
            if not isinstance(each, BoundedHttpProtocol):
                each.shutdown()

    async def drain(self, timeout_s: float) -> bool:
        """Take no more connections, and let those that are open end after the request that they have or get next.

        A client that sends another request at that moment still gets its answer: connections without one are closed
        only after a while, which is longer where the time is infinite. Returns whether all have ended within
        `timeout_s`.
        """
        state = self._server.server_state
        assert isinstance(state, ConnectionState)
        state.is_draining = True
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(_DRAIN_LOOK_S)
        for each in self._server.servers:
            each.close()
        if isinf(timeout_s):
            await self._outlast(state)
            return True
        deadline = monotonic() + timeout_s
        idle_until = min(deadline, monotonic() + _IDLE_S)
        while state.connections and monotonic() < deadline:
            await asyncio.sleep(_DRAIN_LOOK_S)
            if monotonic() >= idle_until:
                for connection in list(state.connections):
                    connection.shutdown()  # closes those without a request
        return not state.connections

    @staticmethod
    async def _outlast(state: ConnectionState) -> None:
        """Wait until all connections have ended, each when its client has had time enough to send another request."""
        began_at = asyncio.get_running_loop().time()
        while state.connections:
            for connection in list(state.connections):
                cast(BoundedHttpProtocol, connection).end_when_idle(_PATIENT_IDLE_S, began_at)
            await asyncio.sleep(_DRAIN_LOOK_S)

    async def stop(self, timeout_s: float) -> None:
        """Give busy connections `timeout_s` to end, then drop them."""
        self.begin_stop()
        await asyncio.wait((self.task,), timeout=timeout_s)
        self._server.force_exit = True
        await self.task


class _SignallessServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: ASGIApp) -> None:
        super().__init__(config)
        self.server_state = ConnectionState()
        self.server_state.hot = getattr(app, "hot", None)
        self.server_state.socket_paths = find_socket_paths(app)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Keep the date of the headers until `ended`. uvicorn's own loop looks ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.ended.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
