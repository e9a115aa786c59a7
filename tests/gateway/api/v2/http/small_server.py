"""A service with models and nothing else, and the v2 application over it on a real server."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.gateway.api.v2.http.app import V2App
from sluice.gateway.options.config import ServeConfig
from tests.gateway.api.v2.small_service import SmallService
from tests.gateway.front.http.plain_server import asking, connect, serving


@dataclass
class SmallServer:
    """A running server, and a client of it."""

    service: SmallService
    client: httpx.Client
    app: ASGIApp
    ports: ExitStack

    @cached_property
    def url(self) -> str:
        """The address of the same application on a port, which begins to listen when this is first asked for."""
        return self.ports.enter_context(serving(self.app))

    def connect(self) -> socket.socket:
        return connect(self.url)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def post(self, path: str, body: object = None, **headers: str) -> httpx.Response:
        """POST bytes as they are, anything else as JSON; nothing as no body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is None:
            return self.client.post(path, headers=named)
        if isinstance(body, bytes):
            return self.client.post(path, content=body, headers=named)
        return self.client.post(path, json=body, headers=named)


def through_application(app: ASGIApp) -> ASGIApp:
    """Return an application that answers no request directly."""

    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)

    return whole


@contextmanager
def small_server(
    service: SmallService, config: ServeConfig | None = None, forwarded: str | None = None, *, is_direct: bool = True
) -> Iterator[SmallServer]:
    """Serve the models; without `is_direct` every request passes the application."""
    config = config or ServeConfig()
    config = replace(config, http=replace(config.http, forwarded_headers=forwarded))
    app: ASGIApp = V2App(service, config)
    app = app if is_direct else through_application(app)
    with ExitStack() as ports, asking(app, headers={"accept-encoding": ""}) as client:
        yield SmallServer(service, client, app, ports)
