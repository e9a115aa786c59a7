"""A service with models and nothing else, and the v2 application over it on a real server."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.v2.app import V2App
from gateway.options.config import ServeConfig
from tests.gateway.http.plain_server import serving
from tests.gateway.v2.small_service import SmallService
from tests.waiting import PATIENCE_S


@dataclass
class SmallServer:
    """A running server, and a client of it."""

    service: SmallService
    client: httpx.Client
    url: str

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
    app = V2App(service, config)
    with (
        serving(app if is_direct else through_application(app)) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S, headers={"accept-encoding": ""}) as client,
    ):
        yield SmallServer(service, client, url)
