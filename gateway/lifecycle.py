"""The life of the server's process: from its start to a ready server, and from a signal to a clean end."""

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

import uvloop

from sluice.addresses import host_and_port
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.announcements import describe_served, print_line
from sluice.gateway.checkpoint import served_name
from sluice.gateway.front.listeners import (
    GrpcEndpoint,
    Listeners,
    OtherPorts,
    SocketFolder,
    is_loopback,
    listen,
    listen_together,
    listener_url,
)
from sluice.gateway.model_engine import make_model_engine
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.process_settings import favour_event_loop
from sluice.gateway.watch.logs.ring import find_ring
from sluice.gateway.watch.logs.socket import LogSocket
from sluice.heap import settle_objects
from sluice.run_folder import remove_all, remove_left_over
from sluice.start_times import START_TIMES

if TYPE_CHECKING:  # imported for real while the engine loads
    from starlette.types import ASGIApp

    from sluice.engine.fleet.client import Engine
    from sluice.gateway.answers.batches.service import BatchService
    from sluice.gateway.api.app import Protocols
    from sluice.gateway.api.v2.grpc.server import GrpcServer
    from sluice.gateway.front.http.server import HttpServer
    from sluice.gateway.server import Server
    from sluice.gateway.workers.host import WorkerPool

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 2.0
"""Seconds that the last bytes may take to reach a slow client after the last stream ended."""
GRPC_NOTICE_S = 0.25
"""Seconds between telling gRPC's clients that the server ends and closing their connections."""
SIGNAL_ECHO_S = 0.5
"""Seconds within which a second signal counts as the first: `timeout` and others signal a process and its group, and on
a busy machine not at once."""
HANG_TIMEOUT_S = 15.0
"""Seconds that the rest of a shutdown may take beyond open streams, before the process ends by force."""
WORKERS_READY_S = 60.0
"""Longest time that the ready line waits for the workers."""
WATCH_INTERVAL_S = 1.0
"""Seconds between checks for a change in readiness."""


def run_server(config: ServeConfig, checkpoint: Path | None, started: float) -> None:
    """Serve until a signal. `started` is when the command began, by perf_counter.

    Raises ListenError for a port that is not available, SluiceError where the model cannot be served.
    """
    http = config.http
    listeners = Listeners(
        listen_together(http.host, http.port, "--http-port", http.num_workers, shares_port=http.shares_port),
        _listen_for_metrics(config),
    )
    remove_left_over()
    START_TIMES.mark("Python started, options read, ports bound")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, checkpoint, listeners, started))


def _listen_for_metrics(config: ServeConfig) -> socket.socket | None:
    if not config.metrics.is_allowed:
        return None
    if config.metrics.host is None:
        return listen(config.http.host, config.metrics.port, "--metrics-port")
    return listen(config.metrics.host, config.metrics.port, "--metrics-port", host_flag="--metrics-address")


async def _serve(config: ServeConfig, checkpoint: Path | None, listeners: Listeners, started: float) -> None:
    server = GatewayServer(config, checkpoint, listeners, started)
    server.handle_signals()
    await server.run()


class GatewayServer:
    """The servers of the ports, the repository behind them, and the engine of MODEL where one is named.

    It must be made on the event loop that runs it.
    """

    def __init__(self, config: ServeConfig, checkpoint: Path | None, listeners: Listeners, started: float) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._listeners = listeners
        self._started = started
        self._sockets = SocketFolder() if config.http.num_workers > 1 else None
        self._engine = None if checkpoint is None else make_model_engine(config, checkpoint, self._choose_socket)
        self._log_socket: LogSocket | None = None
        self._stopping = asyncio.Event()
        self._signalled = 0.0
        self._server: Server | None = None
        self._batches: BatchService | None = None
        self._servers: list[HttpServer] = []
        self._workers: WorkerPool | None = None
        self._grpc: GrpcServer | None = None
        self._grpc_address = ""

    def _choose_socket(self) -> Path | None:
        """Return where the next engine lets workers attach to it; None without workers."""
        return None if self._sockets is None else self._sockets.choose()

    def handle_signals(self) -> None:
        """Let SIGTERM and SIGINT shut the server down, and a second one end it at once. SIGHUP replaces the workers."""
        loop = asyncio.get_running_loop()
        if self._sockets is not None:
            loop.add_signal_handler(signal.SIGHUP, self._replace_workers)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _replace_workers(self) -> None:
        if self._workers is not None and not self._stopping.is_set():
            log.info("SIGHUP: the HTTP workers are replaced, one after the other")
            self._workers.restart()

    def _on_signal(self, number: signal.Signals) -> None:
        now = perf_counter()
        if not self._stopping.is_set():
            log.info("%s: shutting down; once more ends at once", number.name)
            self._stopping.set()
            self._signalled = now
            self._end_by_force_later(number)
            return
        if now - self._signalled < SIGNAL_ECHO_S:
            return
        log.warning("%s again: ending at once", number.name)
        self._end_by_force(number)

    def _end_by_force_later(self, number: signal.Signals) -> None:
        """Start a timer that ends the process: a thread that hangs in a library would otherwise keep it for ever."""
        limit_s = self._config.shutdown.exit_timeout_s + HANG_TIMEOUT_S

        def end() -> None:
            log.critical("not ended %g s after %s: ending by force", limit_s, number.name)
            self._end_by_force(number)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()

    def _end_by_force(self, number: signal.Signals) -> NoReturn:
        for engine in self._engines():
            engine.kill()
        if self._workers is not None:
            self._workers.kill()
        remove_all()
        os._exit(128 + number)

    async def run(self) -> None:
        """Start, serve until a signal, shut down. Raises SluiceError where the model cannot be served."""
        ring = find_ring()
        self._log_socket = None if ring is None else LogSocket(ring)
        serving = asyncio.create_task(self._start_and_watch(), name="serving")
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await _cancel(serving)
            await self._drain()
        finally:
            await _cancel(serving, stopping)
            await self._close()

    async def _start_and_watch(self) -> None:
        """Load the engine, and everything else meanwhile; then watch the server's health until cancelled."""
        engine_start = asyncio.create_task(self._start_engine(), name="engine-start")
        try:
            await asyncio.to_thread(_import_heavy_modules)
            START_TIMES.mark("protocols and libraries imported")
            server, app = await self._open()
            START_TIMES.mark("HTTP and gRPC listen")
            gc.freeze()  # what is imported stays
            gc.enable()
            await self._load_all(server, engine_start)
        finally:
            await _cancel(engine_start)
        self._begin_serving(server, app)
        if self._workers is not None and not await self._workers.wait_ready(WORKERS_READY_S):
            log.warning("not all HTTP workers are ready after %g s; the host answers meanwhile", WORKERS_READY_S)
        self._print_ready(server)
        reading = asyncio.create_task(self._read_documentation(server), name="documentation")
        try:
            await self._watch(server)
        finally:
            await _cancel(reading)

    def _begin_serving(self, server: "Server", app: "Protocols") -> None:
        from sluice.gateway.server import check_start

        check_start(server.plane, self._config.repository)
        settle_objects()
        favour_event_loop()
        server.plane.health.begin_serving()
        assert self._batches is not None
        self._batches.start(app.answer)

    async def _load_all(self, server: "Server", engine_start: "asyncio.Task[None]") -> None:
        """Load the repository and MODEL at the same time. Models of the repository that call MODEL wait for it."""
        repository = server.plane.repository
        settled = None if self._checkpoint is None else repository.expect(self._model_name)
        loading = asyncio.create_task(repository.start(self._config.repository.load), name="repository")
        try:
            try:
                await self._load_model(server, engine_start)
            finally:
                if settled is not None:
                    settled()
            START_TIMES.mark("MODEL loaded")
            await loading
            START_TIMES.mark("the rest of the repository loaded")
        finally:
            await _cancel(loading)

    async def _read_documentation(self, server: "Server") -> None:
        """Read the documentation, from which the bundled pipeline answers. What an earlier server has read is kept."""
        from sluice.gateway.documentation import ingest_documentation

        if self._config.rag.is_served and server.library is not None:
            await ingest_documentation(server.library)

    async def _start_engine(self) -> None:
        if self._engine is not None:
            await self._engine.start()

    async def _load_model(self, server: "Server", engine_start: "asyncio.Task[None]") -> None:
        """Load MODEL, which is in no repository."""
        from sluice.gateway.assembly import load_model

        if self._engine is not None and self._checkpoint is not None:
            await load_model(server, self._config, self._checkpoint, self._engine, engine_start)

    @property
    def _model_name(self) -> str:
        """Name of MODEL; "" where there is none."""
        if self._checkpoint is None:
            return ""
        return served_name(self._config.model.served_model_name, self._checkpoint)

    async def _open(self) -> "tuple[Server, Protocols]":
        """Open the ports. Until the models are loaded, the probes report that the server is not ready."""
        from sluice.gateway.answers.batches.service import BatchService
        from sluice.gateway.assembly import make_application, make_server, measure_process
        from sluice.gateway.tenancy.accounts import report_access

        if self._sockets is not None:
            from sluice.gateway.workers.host import WorkerPool

            self._workers = WorkerPool(self._config, self._listeners.http, self._sockets.path)
        self._server = server = make_server(self._config, self._choose_socket, self._workers)
        measure_process(server, self._config.metrics, "gateway")
        access = server.accounts.calls.access
        await access.ring.start()
        report_access(access)
        if not access.is_enforced and not is_loopback(self._listeners.http[0]):
            log.warning("listening on %s without an API key: whoever reaches it may use it", self._config.http.host)
        self._batches = BatchService(server.plane, server.rooms, self._config)
        metrics = self._listeners.metrics
        ports = OtherPorts(None if metrics is None else metrics.getsockname()[1], await self._listen_for_grpc(server))
        app = make_application(server, self._config, self._batches, ports)
        await self._start_http(server, app)
        more = [f"metrics {self._metrics_url}"] if self._metrics_url else []
        more += [f"gRPC {self._grpc_address}"] if self._grpc_address else []
        print_line(f"Listening on {self._http_url}" + (f" ({', '.join(more)})" if more else ""))
        return server, app

    async def _start_http(self, server: "Server", app: "ASGIApp") -> None:
        """Serve the protocols, by workers where there are several, and the metrics."""
        from sluice.gateway.api.app import create_metrics_app, make_page_guard
        from sluice.gateway.front.http.server import HttpServer

        if self._workers is None:
            self._servers.append(HttpServer(app, self._listeners.http[0]))
        else:
            await self._workers.start(app, server)
        if self._listeners.metrics is not None:
            calls, aliases = server.accounts.calls, self._config.metrics.aliases
            pages = make_page_guard(calls, self._config)
            metrics_app = create_metrics_app(server.metrics, calls, server.gather, aliases, pages)
            self._servers.append(HttpServer(metrics_app, self._listeners.metrics))
        for each in self._servers:
            each.start()

    @property
    def _http_url(self) -> str:
        return listener_url(self._listeners.http[0])

    @property
    def _metrics_url(self) -> str:
        """URL of the metrics page; "" without one."""
        listener = self._listeners.metrics
        return f"{listener_url(listener)}/metrics" if listener is not None else ""

    async def _listen_for_grpc(self, server: "Server") -> GrpcEndpoint | None:
        """Start gRPC. Returns None where it is switched off."""
        from sluice.gateway.api.v2.grpc.server import GrpcServer

        options, host = self._config.grpc, self._config.http.host
        if not options.is_allowed:
            return None
        self._grpc = GrpcServer(server.v2, options, host, self._config.requests.session_headers)
        port = await self._grpc.start()
        self._grpc_address = host_and_port(options.host or host, port)
        return GrpcEndpoint(port, options.uses_ssl or options.uses_mutual_ssl)

    def _print_ready(self, server: "Server") -> None:
        http = self._http_url
        grpc = f" and gRPC {self._grpc_address}" if self._grpc_address else ""
        metrics = f" - metrics {self._metrics_url}" if self._metrics_url else ""
        print_line(
            f"Sluice {version('sluice')} serving {describe_served(server.plane.repository)}"
            f" - OpenAI {http}/v1 - v2 {http}/v2{grpc}{metrics}"
            f" - ready in {perf_counter() - self._started:.1f} s"
        )
        START_TIMES.mark("ready")
        for line in START_TIMES.lines():
            log.debug("start: %s", line)

    async def _watch(self, server: "Server") -> None:
        """Log changes of readiness. An engine that was given up stays so: requests get 503 until a restart."""
        was_ready, was_live = True, True
        tasks, health = [each.task for each in self._servers], server.plane.health
        while True:
            ended, _ = await asyncio.wait(tasks, timeout=WATCH_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
                raise SluiceError(ErrorCode.INTERNAL, "an HTTP server ended unexpectedly")
            server.rooms.watch()
            problem, is_live = health.why_not_ready(), health.is_live()
            if problem and (was_ready or is_live != was_live):
                log.log(logging.WARNING if is_live else logging.CRITICAL, "not ready: %s", problem)
            elif not problem and not was_ready:
                log.warning("ready again")
            was_ready, was_live = not problem, is_live

    async def _drain(self) -> None:
        """Wait for open requests; those that take too long end with an error."""
        server = self._server
        if server is None:
            return
        assert self._batches is not None
        await self._batches.stop()
        server.plane.health.begin_drain()
        if self._workers is not None:
            self._workers.begin_stop()
        elif self._servers:
            self._servers[0].begin_stop()
        timeout_s = self._config.shutdown.exit_timeout_s
        if self._grpc is not None:
            self._grpc.begin_stop()
            await asyncio.sleep(min(GRPC_NOTICE_S, timeout_s))
        if await server.plane.wait_idle(timeout_s):
            return
        log.warning("%d requests are still open after %g s; ending them", server.plane.num_open, timeout_s)
        await server.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down"))
        await server.plane.wait_idle(FLUSH_TIMEOUT_S)

    async def _close(self) -> None:
        """Close everything, whatever the start has reached. The engines' processes have ended when this returns."""
        try:
            servers = (*self._servers, self._grpc, self._workers)
            await asyncio.gather(*(server.stop(FLUSH_TIMEOUT_S) for server in servers if server is not None))
        finally:
            if self._batches is not None:
                await self._batches.close()
            if self._server is not None:
                await self._server.rooms.close()
            if self._engine is not None:
                await self._engine.stop()
            self._listeners.close()
            if self._sockets is not None:
                self._sockets.close()
            if self._log_socket is not None:
                self._log_socket.close()

    def _engines(self) -> "list[Engine]":
        """Return MODEL's engine, which exists from the start, and those of loaded models."""
        own: list[Engine] = [] if self._engine is None else [self._engine]
        return own + (self._server.plane.engines() if self._server is not None else [])


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _import_heavy_modules() -> None:
    """Import heavy modules; to be called on a thread, so that the event loop goes on."""
    for name in ("sluice.gateway.assembly", "sluice.gateway.api.v2.grpc.server", "sluice.pipelines.llm.backend"):
        import_module(name)
