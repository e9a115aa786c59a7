"""Requests to change the protocol of their connection (`Upgrade: websocket`), which a route may accept."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

UPGRADE = "sluice.upgrade"
"""Key of the ASGI scope's extension with the `Upgrade` of a request that asks for another protocol."""
SWITCHING = 101


class Upgrade:
    """The wish of a request to go on with messages on its connection.

    A route accepts it: it sets `protocol` and starts its answer with the status 101, which is written to the connection
    before that has the new protocol. Any other answer declines it, and ends the connection.
    """

    def __init__(self, app: ASGIApp, connections: set[Any], switch: Callable[[asyncio.Protocol, bytes], None]) -> None:
        """`app` answers the connection's requests. `switch` writes the head, and gives the connection the protocol."""
        self.app = app
        self.connections = connections
        """The server's open connections, to which the protocol adds itself."""
        self.protocol: asyncio.Protocol | None = None
        self._switch = switch

    def serve(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with an answer of 101 switching the protocol."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            has_switched = False

            async def send_or_switch(message: Message) -> None:
                nonlocal has_switched
                if message["type"] == "http.response.start" and message["status"] == SWITCHING:
                    assert self.protocol is not None, "accepted without a protocol"
                    has_switched = True
                    lines = [b"%b: %b\r\n" % pair for pair in message["headers"]]
                    self._switch(self.protocol, b"".join((STATUS_LINE[SWITCHING], *lines, b"\r\n")))
                elif not has_switched:
                    await send(message)

            await app(scope, receive, send_or_switch)

        return serve


def find_socket_paths(app: Any) -> Collection[str]:
    """Return the paths of an application whose requests may change the protocol."""
    paths: Collection[str] = getattr(app, "socket_paths", ())
    return paths
