"""Both protocols on real ports over one service, on an event loop of their own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvloop

from sluice.gateway.api.v2.grpc.server import GrpcServer
from sluice.gateway.api.v2.http.app import V2App
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import listen, listener_url
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.grpc import GrpcOptions
from tests.gateway.api.v2.http.small_server import through_application
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import PATIENCE_S


@contextmanager
def both_ports(
    service: SmallService, *, is_direct: bool = True, grpc_server: str = "sluice", forwarded: str | None = None
) -> Iterator[tuple[str, str]]:
    """Serve `service`, and yield the URL of its HTTP port and the address of its gRPC port.

    Headers and metadata whose names match `forwarded` go along: with it, gRPC answers nothing directly.
    """
    config = ServeConfig()
    app = V2App(service, replace(config, http=replace(config.http, forwarded_headers=forwarded)))
    listener = listen("127.0.0.1", 0, "--http-port")
    http = HttpServer(app if is_direct else through_application(app), listener)
    options = GrpcOptions(port=0, server=grpc_server, header_forward_pattern=forwarded)
    servers: list[GrpcServer] = []
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> int:
        http.start()
        servers.append(GrpcServer(service, options, "127.0.0.1"))
        return await servers[0].start()

    async def stop() -> None:
        for each in servers:
            await each.stop(0)
        await http.stop(0)

    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE_S)
        yield listener_url(listener), f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()
        service.shared_memory.close()
