"""`sluice serve` on a thread of this process. Engines over the stand-in for TensorRT-LLM are forked."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from sluice.cli.serve import bundled_pipeline
from sluice.gateway.front.listeners import Listeners, listen
from sluice.gateway.lifecycle import GatewayServer
from sluice.gateway.options.command_line import parse_flags
from sluice.gateway.options.config import read_config
from sluice.gateway.server import Server
from tests.stand_ins.engines import fork_engines
from tests.stand_ins.paths import PYTHONPATH, STAND_INS
from tests.waiting import PATIENCE_S


class _Server(GatewayServer):
    """Says when it is ready, or why it never is."""

    def begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ready = threading.Event()
        self.failure: BaseException | None = None

    def _print_ready(self, server: Server) -> None:
        self.ready.set()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stopping.set)


@dataclass
class HereServer:
    """A running server, with the names that `ServerProcess` has."""

    server: _Server

    @property
    def base_url(self) -> str:
        return self.server._http_url

    @property
    def metrics_url(self) -> str:
        return self.server._metrics_url

    @property
    def grpc_address(self) -> str:
        return self.server._grpc_address

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, timeout=PATIENCE_S)

    def engines(self) -> list[psutil.Process]:
        """The processes of all engines."""
        return [psutil.Process(pid) for engine in self.server._engines() for pid in engine.pids]


@contextmanager
def serving_here(*arguments: str, **stand_in: str) -> Iterator[HereServer]:
    """Serve with these arguments and, where it is given, the stand-in: `serving_here(model, VERSION="1.4.0")`."""
    config = read_config(parse_flags(["--grpc-port=0", *arguments]))
    started: list[_Server] = []
    made, interval = threading.Event(), sys.getswitchinterval()

    async def serve() -> None:
        sockets = (listen("127.0.0.1", 0, "--http-port"),)
        checkpoint = None if config.model.path is None else Path(config.model.path)
        with bundled_pipeline(config, checkpoint) as complete:
            server = _Server(complete, checkpoint, Listeners(sockets, listen("127.0.0.1", 0, "--metrics-port")), 0.0)
            server.begin()
            started.append(server)
            made.set()
            try:
                await server.run()
            except BaseException as error:
                server.failure = error
            finally:
                server.ready.set()

    with pytest.MonkeyPatch.context() as patch:
        fork_engines(patch)
        for name, value in stand_in.items():
            patch.setenv(f"STAND_IN_{name}", value)
        if stand_in:
            patch.syspath_prepend(STAND_INS)
            patch.setenv("PYTHONPATH", PYTHONPATH)
        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            assert made.wait(PATIENCE_S) and started[0].ready.wait(PATIENCE_S)
            if started[0].failure is not None:
                raise started[0].failure
            yield HereServer(started[0])
        finally:
            if started:
                started[0].stop()
            thread.join(PATIENCE_S)
            sys.setswitchinterval(interval)
