"""The process of `sluice engine`: an engine under supervision, its probes, and its end."""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterable
from http import HTTPStatus
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import uvloop
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import Listening
from sluice.errors import SluiceError
from sluice.gateway.announcements import print_line
from sluice.gateway.calls import CallLog
from sluice.gateway.front.http.access import PageGuard, PageMiddleware
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import listen, listener_url
from sluice.gateway.front.path_masking import hide_paths
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.engine_server import EngineServerOptions
from sluice.gateway.telemetry.engine import NamedEngine, engine_families
from sluice.gateway.telemetry.exposition import choose_writer

if TYPE_CHECKING:
    from sluice.engine.fleet.membership.redis_leases import Registration

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at an engine that drains, or may have been given up."""
FLUSH_S = 2.0
"""Seconds that the last answers of the probes may take."""


def run_engine(config: ServeConfig, options: EngineServerOptions, listening: Listening, name: str) -> int:
    """Serve the model of `config` under `name` until a signal. Returns the exit code. Raises ListenError for a port
    that is not available, SluiceError where the engine cannot start."""
    listener = None
    if options.health_port:
        listener = listen(options.health_host, options.health_port, "--health-port", host_flag="--health-host")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(EngineServer(config, options, listening, name, listener).run())


class EngineServer:
    """Serves one engine and the port of its probes. Belongs to the event loop that runs it."""

    def __init__(
        self,
        config: ServeConfig,
        options: EngineServerOptions,
        listening: Listening,
        name: str,
        listener: socket.socket | None,
    ) -> None:
        assert config.model.path is not None
        self._name = name
        self._options = options
        self._registration: Registration | None = None
        self._version = "1"
        self._exit_timeout_s = config.shutdown.exit_timeout_s
        engine = msgspec.structs.replace(config.engine(config.model.path), listening=listening, role=options.role)
        self._engine = ProcessEngineClient(engine, heartbeat_timeout_s=config.shutdown.heartbeat_timeout_s)
        self._listener = listener
        self._http = None if listener is None else HttpServer(self._probes(), listener)
        self._stopping = asyncio.Event()
        self._is_told_twice = asyncio.Event()

    async def run(self) -> int:
        """Start, serve until a signal, drain, stop. Returns the exit code. Raises SluiceError where the engine cannot
        start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        if self._http is not None:
            self._http.start()
        starting = asyncio.create_task(self._engine.start(), name="engine-start")
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0
            starting.result()
            self._print_ready()
            self._register()
            while not self._stopping.is_set() and self._engine.failure is None:
                await asyncio.wait((stopping,), timeout=LOOK_S)
            if self._engine.failure is None:
                await self._drain()
                return 0
            return 1
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.wait((starting, stopping))
            if not starting.cancelled():
                starting.exception()
            if self._registration is not None:
                await self._registration.end()
            await self._engine.stop()
            if self._http is not None:
                await self._http.stop(FLUSH_S)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            log.warning("%s again: ending without the requests that still run", number.name)
            self._is_told_twice.set()
        else:
            log.info("%s: taking no new requests; once more ends at once", number.name)
            self._stopping.set()

    def _print_ready(self) -> None:
        info = self._engine.info
        where = " and ".join(self._engine.endpoints)
        what = f"{info.runtime}, {info.model_type}, {info.num_blocks} blocks of {info.block_size} tokens"
        probes = "" if self._listener is None else f"; probes at {listener_url(self._listener)}"
        print_line(f"engine of {self._name} ready at {where} ({what}){probes}")

    def _register(self) -> None:
        """Register the engine's address in Redis, if requested. Raises SluiceError for an address that no gateway can
        reach."""
        options, endpoint = self._options, self._engine.endpoints[0]
        if options.register is None:
            return
        from sluice.engine.fleet.membership.redis_leases import Lease, Registration  # few engines need Redis' client

        address = options.advertised_address(endpoint)
        lease = Lease(
            name=options.register_name or address.removeprefix("tcp://"),
            address=address,
            version=options.register_version,
            weight=options.register_weight,
        )
        self._registration = Registration(options.register, lease)
        self._registration.start()
        log.info("registering as %s at %s", lease.name, options.register.place)

    async def _drain(self) -> None:
        """Drain the engine: its requests end within the exit timeout."""
        engine, end = self._engine, perf_counter() + self._exit_timeout_s
        engine.drain()
        if self._registration is not None:
            await self._registration.end()
        while perf_counter() < end and not self._is_told_twice.is_set() and engine.failure is None:
            stats = engine.stats
            if stats.is_draining and not stats.num_running and not stats.num_waiting:
                return
            await asyncio.sleep(LOOK_S)
        num_left = engine.stats.num_running + engine.stats.num_waiting
        log.warning("%d requests have not ended; they are cancelled", num_left)

    # -- probes

    def _probes(self) -> ASGIApp:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(self))
        routes = [
            Route("/health/live", self._answer_live),
            Route("/health/ready", self._answer_ready),
            Route("/metrics", self._answer_metrics),
        ]
        return PageMiddleware(Starlette(routes=routes), PageGuard(CallLog()))

    async def _answer_live(self, _: Request) -> Response:
        return _probe(self._engine.failure)

    async def _answer_ready(self, _: Request) -> Response:
        if self._stopping.is_set():
            return _probe("the engine takes no new requests: it is about to end")
        return _probe(self._problem())

    async def _answer_metrics(self, request: Request) -> Response:
        encode, content_type = choose_writer(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

    def _problem(self) -> str | None:
        """Return the reason why the engine cannot take a request now; None if it can."""
        engine = self._engine
        if engine.failure is not None:
            return engine.failure
        try:
            engine.info  # noqa: B018 - it raises while the engine loads for the first time
        except SluiceError as error:
            return error.message
        return "the engine is restarting" if engine.is_restarting else None

    def named_engines(self) -> list[NamedEngine]:
        """Return the engine once it has loaded."""
        try:
            return [NamedEngine(self._name, self._version, self._engine, self._engine.info)]
        except SluiceError:
            return []


class _EngineCollector(Collector):
    """Reads the engine's families at each scrape."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        return engine_families(self._server.named_engines())


def _probe(problem: str | None) -> Response:
    status = HTTPStatus.OK if problem is None else HTTPStatus.SERVICE_UNAVAILABLE
    return PlainTextResponse(hide_paths(problem or ""), status)
