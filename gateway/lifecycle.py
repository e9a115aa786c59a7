"""From an empty process to a ready server, and from a signal to a clean end."""

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import uvloop

from engine.client.process import ProcessEngineClient
from engine.errors import ErrorCode, SluiceError
from gateway.checkpoint import model_name
from gateway.config import ServeConfig
from gateway.listeners import is_loopback, listen, url_of

if TYPE_CHECKING:  # imported for real while the engine loads
    from gateway.http.servers import HttpServer
    from gateway.service import InferenceService
    from pipelines.backends.llm.text import LlmText

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""After the last stream ended: how long its bytes may take to reach a slow client."""
ECHO_S = 0.1
"""A signal this soon after the first is the same one: `timeout` and others tell a process and its group."""
WATCH_S = 1.0
"""How often the log hears of a change in readiness."""


def run_server(config: ServeConfig, checkpoint: Path, started: float) -> None:
    """Serve until told to stop. `started` is when the command began, by perf_counter.

    Raises ListenError where a port cannot be had, SluiceError where the model cannot be served.
    """
    listeners = (
        listen(config.http.host, config.http.port, "--http-port"),
        listen(config.http.host, config.metrics.port, "--metrics-port"),
    )
    if config.access.api_key is None and not is_loopback(listeners[0]):
        log.warning("listening on %s without an API key: whoever reaches it may use it", config.http.host)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, checkpoint, listeners, started))


def _raise_file_limit() -> None:
    """Every connection is an open file, and the customary limit of 1024 is a login shell's, not a server's."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    config: ServeConfig, checkpoint: Path, listeners: tuple[socket.socket, socket.socket], started: float
) -> None:
    server = Server(config, checkpoint, listeners, started)
    server.handle_signals()
    await server.run()


class Server:
    """One engine process and two HTTP servers. Made on the event loop that runs it."""

    def __init__(
        self, config: ServeConfig, checkpoint: Path, listeners: tuple[socket.socket, socket.socket], started: float
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._listeners = listeners
        self._started = started
        self._name = config.model.served_model_name or model_name(checkpoint)
        self._engine = ProcessEngineClient(
            config.engine(str(checkpoint)), heartbeat_timeout_s=config.shutdown.heartbeat_timeout_s
        )
        self._stopping = asyncio.Event()
        self._signalled = 0.0
        self._service: InferenceService | None = None
        self._servers: list[HttpServer] = []

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT end the server gently, and a second one at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        now = perf_counter()
        if not self._stopping.is_set():
            log.info("%s: shutting down; once more ends at once", number.name)
            self._stopping.set()
            self._signalled = now
            return
        if now - self._signalled < ECHO_S:
            return
        log.warning("%s again: ending at once", number.name)
        self._engine.kill()
        os._exit(128 + number)

    async def run(self) -> None:
        """Start, serve until a signal, end. Raises SluiceError where the model cannot be served."""
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

    # -- start

    async def _start_and_watch(self) -> None:
        """Load the engine, and while it loads everything else; then watch its health for ever."""
        engine_start = asyncio.create_task(self._engine.start(), name="engine-start")
        try:
            await asyncio.to_thread(import_module, "gateway.http.app")
            service = self._open_http()
            model = await asyncio.to_thread(self._load_text)
            await engine_start
            await service.warm_up(model)
        finally:
            await _cancel(engine_start)
        service.begin_serving(model)
        self._say_ready(model)
        await self._watch(service)

    def _open_http(self) -> "InferenceService":
        """Answer on both ports; the probes say that nothing is ready."""
        from gateway.http.app import create_app, create_metrics_app
        from gateway.http.servers import HttpServer
        from gateway.service import InferenceService
        from gateway.telemetry.engine import EngineCollector
        from gateway.telemetry.metrics import GatewayMetrics

        metrics = GatewayMetrics()
        service = InferenceService(self._engine, metrics, self._config.shutdown.heartbeat_timeout_s)
        metrics.registry.register(EngineCollector(self._engine, service, self._name))
        apps = (create_app(service, self._config), create_metrics_app(metrics, self._config.access))
        self._servers = [HttpServer(app, listener) for app, listener in zip(apps, self._listeners, strict=True)]
        for server in self._servers:
            server.start()
        self._service = service
        http, metrics_url = map(url_of, self._listeners)
        _say(f"Listening on {http} (metrics {metrics_url}/metrics)")
        return service

    def _load_text(self) -> "LlmText":
        from pipelines.backends.llm.text import LlmText

        return LlmText.load(self._name, self._checkpoint, self._engine)

    def _say_ready(self, model: "LlmText") -> None:
        info = model.info
        what = f"{info.model_type}, {info.dtype}, context {info.max_model_len} tokens"
        cache = f"KV cache {info.num_blocks * info.block_size} tokens"
        http, metrics = map(url_of, self._listeners)
        _say(
            f"Sluice {version('sluice')} serving {model.name} ({what}; {cache})"
            f" - OpenAI {http}/v1 - v2 {http}/v2 - metrics {metrics}/metrics"
            f" - ready in {perf_counter() - self._started:.1f} s"
        )

    async def _watch(self, service: "InferenceService") -> None:
        """Tell the log when readiness changes. An engine given up stays so: requests get 503 until a restart."""
        was_ready, was_live = True, True
        tasks = [server.task for server in self._servers]
        while True:
            ended, _ = await asyncio.wait(tasks, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
                raise SluiceError(ErrorCode.INTERNAL, "an HTTP server ended unexpectedly")
            readiness, is_live = service.readiness(), service.is_live()
            if not readiness.is_ok and (was_ready or is_live != was_live):
                log.log(logging.WARNING if is_live else logging.CRITICAL, "not ready: %s", readiness.reason)
            elif readiness.is_ok and not was_ready:
                log.warning("ready again")
            was_ready, was_live = readiness.is_ok, is_live

    # -- end

    async def _drain(self) -> None:
        """Let open streams end; those that take too long end with an error event."""
        if self._service is None:
            return
        self._service.begin_drain()
        self._servers[0].begin_stop()
        timeout_s = self._config.shutdown.exit_timeout_s
        if await self._service.wait_idle(timeout_s):
            return
        log.warning("%d streams are still open after %g s; ending them", self._service.num_open, timeout_s)
        self._service.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down"))
        await self._service.wait_idle(FLUSH_S)

    async def _close(self) -> None:
        """Close what is open, in any state of the start. The engine's process is gone when this returns."""
        try:
            await asyncio.gather(*(server.stop(FLUSH_S) for server in self._servers))
        finally:
            await self._engine.stop()
            for listener in self._listeners:
                listener.close()


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _say(line: str) -> None:
    """A line for whoever started the server; scripts read the addresses from it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
